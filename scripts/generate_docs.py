"""Write the generated parts of the documentation: `python scripts/generate_docs.py [--check] [--pictures]`.

In README.md and docs/, the function NAME writes the text between `<!-- generated: NAME -->` and `<!-- end -->`. A name may
have arguments: `source examples/minimal_server.py Worker`. `--check` writes nothing and exits with status 1 if a page is
outdated. `--pictures` also redraws the pictures, `--charts` those of figures in docs/benchmarks alone.
"""

from __future__ import annotations

import ast
import enum
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import click  # noqa: E402
import msgspec  # noqa: E402

from benchmarks.work_requests import work_requests  # noqa: E402
from disagg.commands.bench.command import bench  # noqa: E402
from disagg.commands.rank.rank import RankConfig  # noqa: E402
from disagg.commands.shell.group import COMMANDS, disagg  # noqa: E402
from disagg.config import Config  # noqa: E402
from disagg.integrations import shaping  # noqa: E402
from disagg.integrations.options import Options  # noqa: E402
from disagg.models import PRESETS  # noqa: E402
from disagg.models.decoders import REFUSED  # noqa: E402
from disagg.protocol import messages as wire  # noqa: E402
from disagg.protocol.connection import CONNECTION_TABLE, ConnectionState  # noqa: E402
from disagg.protocol.receive_session import RECEIVE_TABLE, WRITER_TABLE, ReceiveState, WriterState  # noqa: E402
from disagg.protocol.send_session import SEND_TABLE, SendState  # noqa: E402
from disagg.settings import Setting, is_list, is_table, names_of, settings  # noqa: E402
from examples.transformers_pd.architectures import describe  # noqa: E402
from examples.transformers_pd.run import BACKENDS, PAIRS  # noqa: E402
from scripts.docs_figures import (  # noqa: E402
    converted,
    sglang_load,
    sglang_rows,
    vllm_bullets,
    vllm_deaths,
    vllm_drafts,
    vllm_drains,
    vllm_first_tokens,
    vllm_fp8,
    vllm_loads,
    vllm_moves,
    vllm_recipes,
    vllm_steps,
    vllm_turns,
)
from tests.integrations.cross import cases as cross  # noqa: E402
from tests.integrations.sglang.recipes import RECIPES  # noqa: E402
from tests.support import grid  # noqa: E402
from tests.support.architectures import CASES, IN_EXAMPLES, IN_VLLM, NESTED  # noqa: E402

RANK_FLAGS = [each.flag for each in settings(RankConfig) if each.key != "role"]
"""The options of the commands of ranks that are settings too."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- generated: ([^\n]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


# -- settings ----------------------------------------------------------------------------------------------------------


def _kind(setting: Setting) -> str:
    """The type of a setting, in words."""
    if "parse" in setting.extra:
        return "text"
    if typing.get_origin(setting.base) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(setting.base))
    names = names_of(setting.base)
    if names is not None:
        return "table of " + ", ".join(f"`{name}`" for name in names)
    if is_table(setting):
        return "table"
    if is_list(setting):
        return "list of text"
    return {str: "text", int: "number", float: "number", bool: "true or false"}[setting.base]


def _default(setting: Setting) -> str:
    if setting.required:
        return "must be given"
    if setting.default in (None, "", (), {}):
        return "none"
    if is_table(setting):
        return "as below"
    return f"`{str(setting.default).lower() if isinstance(setting.default, bool) else setting.default}`"


def _settings(chosen: list[Setting]) -> Iterator[str]:
    yield "| key | variable | option | value | default | |"
    yield "|---|---|---|---|---|---|"
    for each in chosen:
        cells = (f"`{each.key}`", f"`{each.variable}`", f"`{each.flag}`", _kind(each), _default(each), each.description)
        yield f"| {' | '.join(cells)} |"


def manager_settings() -> Iterator[str]:
    """The settings of a manager."""
    yield from _settings(list(settings(Config)))


def rank_settings() -> Iterator[str]:
    """The additional settings of the rank commands."""
    known = {setting.key for setting in settings(Config)}
    yield from _settings([setting for setting in settings(RankConfig) if setting.key not in known | {"role"}])


def integration_settings() -> Iterator[str]:
    """The additional settings of the connectors of servers."""
    known = {setting.key for setting in settings(Config)}
    yield "| key | variable | value | default | |"
    yield "|---|---|---|---|---|"
    for each in settings(Options):
        if each.key not in known:
            yield f"| `{each.key}` | `{each.variable}` | {_kind(each)} | {_default(each)} | {each.description} |"


def shaping_rows(table: str) -> Iterator[str]:
    """A table of `disagg.integrations.shaping`. Rows that are compared or refused come first.

    Fields of config.json without a row are compared, so those that do not matter are listed too. Of options they are left out.
    """
    rows: Any = getattr(shaping, table)
    by_class: dict[str, Iterable[shaping.Row]] = rows if isinstance(rows, dict) else {"": rows}
    found: dict[tuple[shaping.Verdict, str], list[str]] = {}
    for name, each in by_class.items():
        for row in each:
            names = ", ".join(f"`{field}`" for field in row.names)
            found.setdefault((row.verdict, row.how), []).append(f"{name}: {names}" if name else names)
    yield "| | by what, or why | |"
    yield "|---|---|---|"
    for verdict in shaping.Verdict:
        if verdict is shaping.Verdict.NONE and table != "MODEL":
            continue
        for (other, how), names_of_rows in found.items():
            if other is verdict:
                yield f"| {verdict.value} | {how} | {('; ' if by_class is rows else ', ').join(names_of_rows)} |"


def limits() -> Iterator[str]:
    """The defaults of settings that are tables of numbers."""
    yield "| key | default |"
    yield "|---|---|"
    for setting in settings(Config):
        for name in names_of(setting.base) or ():
            yield f"| `{setting.key}.{name}` | `{getattr(setting.default, name)}` |"


# -- the protocol ------------------------------------------------------------------------------------------------------


def _diagram(table: Mapping[tuple[Any, Any], Any], states: type[enum.Enum], *, start: enum.Enum) -> Iterator[str]:
    """A state diagram of a table; states without a next state are ends."""
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {start.value}"
    for (state, step), then in table.items():
        yield f"    {state.value} --> {then.value}: {step.value}"
    for state in states:
        if not any(before is state for before, _ in table):
            yield f"    {state.value} --> [*]"
    yield "```"


def connection_states() -> Iterator[str]:
    """The diagram of `CONNECTION_TABLE`."""
    yield from _diagram(CONNECTION_TABLE, ConnectionState, start=ConnectionState.GREETING)


def receive_states() -> Iterator[str]:
    """The diagram of `RECEIVE_TABLE`."""
    yield from _diagram(RECEIVE_TABLE, ReceiveState, start=ReceiveState.WAITING)


def writer_states() -> Iterator[str]:
    """The diagram of `WRITER_TABLE`."""
    yield from _diagram(WRITER_TABLE, WriterState, start=WriterState.RESERVED)


def send_states() -> Iterator[str]:
    """The diagram of `SEND_TABLE`."""
    yield from _diagram(SEND_TABLE, SendState, start=SendState.AWAITED)


def messages() -> Iterator[str]:
    """A table of every control message with its fields."""
    yield "| message | meaning | fields |"
    yield "|---|---|---|"
    for kind in typing.get_args(wire.AnyMessage):
        fields = ", ".join(f"`{f.encode_name}`" + ("" if f.required else "?") for f in msgspec.structs.fields(kind))
        yield f"| `{kind.__struct_config__.tag}` | {' '.join((kind.__doc__ or '').split())} | {fields} |"


def bounds() -> Iterator[str]:
    """The bounds of decoding."""
    yield f"Protocol version {wire.PROTOCOL_VERSION}. A message has at most {wire.MAX_MESSAGE_NBYTES >> 20} MiB, a payload at"
    yield f"most {wire.MAX_PAYLOAD_NBYTES >> 10} KiB, a list at most {wire.MAX_ITEMS:,} items."


# -- tested cases ------------------------------------------------------------------------------------------------------


def presets() -> Iterator[str]:
    """A table of presets by engine."""
    yield "| model | state | `local`, in one process | " + " | ".join(f"`{e}`, between processes" for e in grid.ENGINES) + " |"
    yield "|---|---|---|" + "---|" * len(grid.ENGINES)
    by_engine = {(engine, name): f"`{ours}` → `{theirs}`" for engine, name, _, ours, theirs in grid.ENGINE_PRESETS}
    for name, _, ours, theirs in grid.LOCAL_PRESETS:
        kinds = ", ".join(state.name for state in PRESETS[name].states)
        cells = [by_engine.get((engine, name), "") for engine in grid.ENGINES]
        yield f"| {name} | {kinds} | `{ours}` → `{theirs}` | {' | '.join(cells)} |"


def sides() -> Iterator[str]:
    """A table of pairs of sides by engine."""
    yield "| prefill → decode | model | engines |"
    yield "|---|---|---|"
    every = ", ".join(f"`{engine}`" for engine in grid.ENGINES)
    for model, pairs, engines in (
        ("six KV heads, three layers", grid.LOCAL_SIDES, "`local`"),
        ("six KV heads, three layers", grid.ENGINE_SIDES, every),
        ("qwen3-next-80b, four layers", grid.CONTEXT_SIDES, every),
    ):
        for ours, theirs in pairs:
            yield f"| `{ours}` → `{theirs}` | {model} | {engines} |"


def described() -> Iterator[str]:
    """The model types that are described, by how they are tested."""
    own = {*CASES, *IN_EXAMPLES}
    nested = {name: text for name, text in NESTED.items() if name not in own}
    by_decoder: dict[str, list[str]] = {}
    for name, text in sorted(nested.items()):
        by_decoder.setdefault(text, []).append(f"`{name}`")
    yield f"**Described and tested** ({len(own)}): {_names(own)}."
    yield ""
    yield (
        f"**Described and tested by their decoder** ({len(nested)}): "
        + "; ".join(f"{', '.join(names)} (`{text}`)" for text, names in by_decoder.items())
        + "."
    )
    yield ""
    yield f"**Described and tested in vLLM** ({len(IN_VLLM)}): {_names(IN_VLLM)}."


def refused() -> Iterator[str]:
    """The model types that are refused, by reason."""
    yield "| refused | why |"
    yield "|---|---|"
    for reason in dict.fromkeys(REFUSED.values()):
        yield f"| {_names(name for name, why in REFUSED.items() if why == reason)} | {reason} |"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def real_models() -> Iterator[str]:
    """A table of architectures whose real code runs divided and undivided."""
    yield "| architecture | state | prefill → decode | engines |"
    yield "|---|---|---|---|"
    engines = ", ".join(f"`{engine}`" for engine in BACKENDS)
    for name, pair in PAIRS.items():
        kinds = ", ".join(component.name for component in describe(name))
        yield f"| {name} | {kinds} | {pair.prefill} → {pair.decode} | {engines} |"


def across_engines() -> Iterator[str]:
    """A table of pairs of servers of different engines."""
    yield "| model | prefill | decode |"
    yield "|---|---|---|"
    for pair in cross.PAIRS.values():
        vllm = cross.label("vLLM", pair.vllm)
        yield f"| {pair.model} | {vllm} | {cross.label('SGLang', pair.sglang_decode)} |"
        yield f"| {pair.model} | {cross.label('SGLang', pair.sglang_prefill)} | {vllm} |"


def sglang_recipes() -> Iterator[str]:
    """A table of published deployments of SGLang, and how each is tested."""
    yield "| models | state | setting | tested by |"
    yield "|---|---|---|---|"
    for each in RECIPES:
        yield f"| {each.models} | {each.state} | {each.setting} | {each.proof.value} |"


# -- source ------------------------------------------------------------------------------------------------------------


def block(path: str, *heading: str) -> Iterator[str]:
    """The first block of code in the section of another page, verbatim."""
    section = (ROOT / path).read_text().partition(f"\n## {' '.join(heading)}\n")[2]
    found = re.search(r"^```.*?^```$", section, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{path}: expected a section {' '.join(heading)!r} with code"
    yield found[0]


def source(path: str, *names: str) -> Iterator[str]:
    """A file, or the named functions, classes and `Class.method`s of it, verbatim."""
    text = (ROOT / path).read_text()
    yield f"```{'toml' if path.endswith('.toml') else 'python'}"
    if not names:
        yield text.rstrip()
    lines = text.splitlines()
    for number, name in enumerate(names):
        if number:
            yield ""
        node: ast.AST = ast.parse(text)
        for part in name.split("."):
            node = next(child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part)
        assert isinstance(node, ast.FunctionDef | ast.ClassDef)
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        indent = len(lines[first - 1]) - len(lines[first - 1].lstrip())
        yield from (line[indent:] for line in lines[first - 1 : node.end_lineno])
    yield "```"


# -- commands and figures ----------------------------------------------------------------------------------------------


def command_line() -> Iterator[str]:
    """Every command with its help and its options, from the commands themselves. Settings are on the page of settings."""
    for name, command in (*((f"disagg {name}", disagg.get_command(None, name)) for name in COMMANDS), ("disagg-bench", bench)):
        assert command is not None
        yield f"## {name}"
        yield ""
        yield " ".join((command.help or "").split())
        yield ""
        arguments = [each.metavar or each.name or "" for each in command.params if isinstance(each, click.Argument)]
        if arguments:
            yield f"`{' '.join([name, '[OPTIONS]', *arguments])}`"
            yield ""
        options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
        if set(RANK_FLAGS) <= {flag for each in options for flag in each.opts}:
            yield "Options: the settings in [Configuration](configuration.md), and `--config FILE`, a TOML file with settings."
        else:
            with click.Context(command, info_name=name, **command.context_settings) as context:
                yield from (_option_line(each, context) for each in options if "--debug" not in each.opts)
        yield ""


def _option_line(option: click.Option, context: click.Context) -> str:
    """An option, its bounds and its default, as its help has them."""
    names = " / ".join(filter(None, (", ".join(option.opts), ", ".join(option.secondary_opts))))
    value = "" if option.is_flag else f" {option.make_metavar(context)}"
    text, _, default = (option.help or "").partition("  [default: ")
    shown = option.get_help_extra(context)
    default = default.rstrip("]") or shown.get("default", "")
    more = [shown.get("required", ""), f"default `{default}`" if default else "", shown.get("range", "")]
    bounds = "; ".join(filter(None, more))
    return f"* `{names}{value}`: {' '.join(text.split())}" + (f" [{bounds}]" if bounds else "")


# -- pages -------------------------------------------------------------------------------------------------------------

GENERATORS: Mapping[str, Callable[..., Iterator[str]]] = {
    function.__name__: function
    for function in (
        manager_settings, rank_settings, integration_settings, shaping_rows, limits,
        connection_states, receive_states, writer_states, send_states, messages,
        bounds, presets, sides, across_engines, real_models, described, refused, block, source, work_requests,
        command_line, converted, sglang_recipes, sglang_load, sglang_rows, vllm_bullets, vllm_deaths, vllm_drains,
        vllm_drafts, vllm_first_tokens, vllm_fp8, vllm_loads, vllm_moves, vllm_recipes, vllm_steps, vllm_turns,
    )
}  # fmt: skip


def current(text: str) -> str:
    """A page with current generated parts. Raises `KeyError` for an unknown name."""

    def fill(found: re.Match[str]) -> str:
        name, *arguments = found[2].split()
        return found[1] + "\n" + "\n".join(GENERATORS[name](*arguments)) + "\n\n" + found[3]

    return BLOCK.sub(fill, text)


def outdated() -> list[Path]:
    """Pages whose generated parts are not current."""
    return [page for page in PAGES if current(page.read_text()) != page.read_text()]


def main() -> None:
    if "--pictures" in sys.argv:
        from scripts.docs_pictures import draw

        draw(ROOT / "docs" / "images")
    if "--pictures" in sys.argv or "--charts" in sys.argv:
        from scripts.docs_charts import draw_charts

        draw_charts(ROOT)
    found = outdated()
    for page in found:
        if "--check" not in sys.argv:
            page.write_text(current(page.read_text()))
        print(f"{'outdated' if '--check' in sys.argv else 'written'}: {page.relative_to(ROOT)}")
    sys.exit(1 if found and "--check" in sys.argv else 0)


if __name__ == "__main__":
    main()
