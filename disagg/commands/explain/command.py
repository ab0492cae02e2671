"""`disagg explain`: the transfers that one request would need, and the reason for each path."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console

from disagg.commands.cases import options
from disagg.commands.cases.costs import Costs, link_costs, read_costs
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case
from disagg.commands.explain.engine import engine_of
from disagg.commands.explain.explanation import ExplainRequest, explain_request
from disagg.commands.explain.table import show
from disagg.commands.shell.errors import one_sentence
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


@click.command(epilog=EPILOG, context_settings={"show_default": True, "max_content_width": 120})
@click.option("--model", help=options.MODEL_HELP)
@click.option("--decode-model", metavar="MODEL", help="Model of the decode side, if it differs; mismatches are named.")
@click.option("--prefill", required=True, metavar="SIDE", help="The prefill side, such as tp=4,pp=2,page=16,layout=nhd.")
@click.option("--decode", required=True, metavar="SIDE", help="The decode side.")
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
@click.option("--seed", type=int, default=0, help="Seed of the random page ids.")
@click.option("--piece-us", type=click.FloatRange(0), help="Microseconds per piece sent directly; default: measured.")
@click.option(
    "--gbps", type=click.FloatRange(0, min_open=True), help="1e9 bytes per second for long pieces; default: measured."
)
@click.option(
    "--packed-gbps", type=click.FloatRange(0, min_open=True), help="1e9 bytes per second for packed pieces; default: measured."
)
@click.option("--link", metavar="RATE", help="Predict for NICs of this rate on each rank, such as 400gbit or 8x400gbit.")
@click.option(
    "--costs",
    "costs_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Predict with the costs in FILE, which disagg-bench --calibrate writes.",
)
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
    piece_us: float | None,
    gbps: float | None,
    packed_gbps: float | None,
    link: str | None,
    costs_file: Path | None,
    json_file: Path | None,
    plot_file: Path | None,
    **settings: int | str | None,
) -> None:
    """Show which ranks would send what to each other for one request, and why each component takes its path. No engine is
    started and no memory allocated; bytes, runs and descriptors are those that disagg-bench reports for the same case. With
    given costs, pieces take the path that these favour, unless there is --pack-below.
    Exit status 2 if the sides do not fit each other.
    """
    shape = options.shape_of(model, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    name = shape or model
    if name is None:
        raise ConfigError("options: expected --model, or --layers, --kv-heads and --head-dim")
    sides = {"prefill": Side.parse(prefill), "decode": Side.parse(decode)}
    case = Case(model=name, num_layers=None if shape else layers, **sides, **settings)  # type: ignore[arg-type]
    request = ExplainRequest(
        case=case,
        decode_model=decode_model,
        consecutive=pages == "consecutive",
        costs=given_costs(case, link=link, file=costs_file, piece_us=piece_us, gbps=gbps, packed_gbps=packed_gbps),
        favoured=True,
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


def given_costs(
    case: Case,
    *,
    link: str | None,
    file: Path | None,
    piece_us: float | None,
    gbps: float | None,
    packed_gbps: float | None,
) -> Costs | None:
    """The costs given by options: single ones replace those of the link, of the file, or else the measured ones, and the
    measured phases with them.

    Raises `ConfigError` for a link and a file, for costs of another engine, and if only some are given and the others are
    unknown.
    """
    given = {"piece_s": None if piece_us is None else piece_us / 1e6, "gbps": gbps, "packed_gbps": packed_gbps}
    chosen = {name: value for name, value in given.items() if value is not None}
    if link is not None and file is not None:
        raise ConfigError(f"costs: expected --link or --costs, found --link {link} and --costs {file}")
    engine = engine_of(case.backend, case.transport)
    whole = None
    if link is not None:
        whole = link_costs(link)
    elif file is not None:
        whole = read_costs(file)
        if whole.engine not in ("", engine.key):
            raise ConfigError(f"costs: {file}: expected those of {engine.key!r}, found those of {whole.engine!r}")
    if not chosen:
        return whole
    base = whole or engine.costs
    if base is not None:
        return msgspec.structs.replace(base, **chosen, phases={})
    if len(chosen) < len(given):
        raise ConfigError(
            f"costs of {engine.name} over {engine.transport} have not been measured: expected --link, --costs, or --piece-us, "
            "--gbps and --packed-gbps, found "
            + ", ".join("--" + option.replace("piece_s", "piece-us").replace("_", "-") for option in chosen)
        )
    return Costs(chosen["piece_s"], chosen["gbps"], chosen["packed_gbps"])
