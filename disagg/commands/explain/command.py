"""`disagg explain`: the transfers that one request would need, and the reason for each path."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from disagg.commands.cases import options
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case
from disagg.commands.explain.explanation import ExplainRequest, explain_request
from disagg.commands.explain.summary import parse_link
from disagg.commands.explain.table import show
from disagg.commands.shell.errors import one_sentence
from disagg.commands.shell.files import check_files
from disagg.commands.shell.text import indented_json
from disagg.core.errors import ConfigError

EPILOG = """\b
Examples:
  disagg explain --model llama-3-70b --tokens 4096 --prefill tp=4 --decode tp=2
  disagg explain --model llama-3-70b --tokens 4096 --prefill tp=4,layout=hnd --decode tp=2,layout=hnd \\
      --plot hnd.png
  disagg explain --model deepseek-v3.2 --tokens 8192 --prefill tp=8,page=64 --decode tp=4 \\
      --backend mooncake --json -
  disagg explain --layers 32 --kv-heads 8 --head-dim 128 --tokens 4096 --prefill tp=4 --decode tp=2
  disagg explain --model ./config.json --tokens 2048 --prefill tp=2,pp=2 --decode tp=8 \\
      --backend nixl --transport rdma --link 400gbit
"""


def only_one(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> str:
    """Refuse a second side, which makes a second case in `disagg-bench`. Raises `click.BadParameter`."""
    if len(given) > 1:
        raise click.BadParameter(f"expected one side, found {' and '.join(given)}")
    return given[0]


@click.command(epilog=EPILOG, context_settings={"show_default": True, "max_content_width": 120})
@click.option("--model", help=options.MODEL_HELP)
@click.option("--decode-model", metavar="MODEL", help="Model of the decode side, if it differs; mismatches are named.")
@click.option(
    "--prefill",
    required=True,
    multiple=True,
    callback=only_one,
    metavar="SIDE",
    help="The prefill side, such as tp=4,pp=2,page=16,layout=nhd.",
)
@click.option("--decode", required=True, multiple=True, callback=only_one, metavar="SIDE", help="The decode side.")
@click.option("--tokens", type=click.IntRange(1), required=True, help="Length of the request.")
@options.prefix_hit
@options.layers
@options.kv_heads
@options.head_dim
@click.option("--backend", default="auto", help="Engine: cma, nixl, mooncake, nvlink, local, auto, or a third party's.")
@click.option(
    "--transport",
    type=click.Choice(["auto", "rdma", "tcp", "shm"]),
    default="auto",
    help="auto: as between two processes of one host.",
)
@options.pack_below
@click.option(
    "--pages",
    type=click.Choice(["random", "consecutive"]),
    default="random",
    help="The request's pages: random ones as in disagg-bench, or consecutive ones.",
)
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the random page ids.")
@click.option("--link", metavar="RATE", help="NICs of each rank, such as 400gbit or 8x400gbit: show what each carries.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the result as JSON; - for standard output.",
)
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw a picture (png, svg or pdf).")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@one_sentence
def explain(
    *,
    prefill: str,
    decode: str,
    model: str | None,
    layers: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    decode_model: str | None,
    pages: str,
    link: str | None,
    json_file: Path | None,
    plot_file: Path | None,
    **settings: int | str | None,
) -> None:
    """Show which ranks would send what to each other for one request, and why each component takes its path. No engine is
    started and no memory allocated; bytes, runs and descriptors are the bytes, pieces and posts that disagg-bench
    reports for the same case.
    Exit status 2 if the sides do not fit each other.
    """
    shape = options.shape_of(model, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    name = shape or model
    if name is None:
        raise ConfigError("options: expected --model, or --layers, --kv-heads and --head-dim")
    check_files([json_file, plot_file])
    sides = {"prefill": Side.parse(prefill), "decode": Side.parse(decode)}
    case = Case(model=name, num_layers=None if shape else layers, **sides, **settings)  # type: ignore[arg-type]
    request = ExplainRequest(
        case=case,
        decode_model=decode_model,
        consecutive=pages == "consecutive",
        link=None if link is None else parse_link(link),
    )
    found = explain_request(request)
    if plot_file is not None:
        from disagg.commands.explain.plot import plot

        plot(found, plot_file)
    encoded = indented_json(found.summary)
    if str(json_file) == "-":
        sys.stdout.write(encoded.decode())
        return
    if json_file is not None:
        json_file.write_bytes(encoded)
    show(found.summary, Console())
