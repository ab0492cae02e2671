"""`disagg doctor`: what this machine supports, what is wrong with it and how to fix it."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import click

from disagg.commands.doctor.engines import ENGINES
from disagg.commands.doctor.examination import examine, worst
from disagg.commands.shell.errors import one_sentence
from disagg.commands.shell.files import check_files
from disagg.commands.shell.numbers import MAX_SECONDS, Number
from disagg.commands.shell.text import indented_json
from disagg.core.errors import ConfigError
from disagg.machine.findings import Finding, Level, Machine

EPILOG = """\b
Examples:
  disagg doctor
  disagg doctor --peer 10.0.0.2:7100 --peer tcp://10.0.0.3:7100
  disagg doctor --require rdma --json findings.json
  disagg doctor --engine nixl
  disagg doctor --no-engines                  (files and settings only, fast)
  disagg doctor --no-engines --watch 5        (while ranks run: what each RDMA device carries)
"""


@click.command(epilog=EPILOG, context_settings={"show_default": True, "max_content_width": 120})
@click.option("--peer", "peers", multiple=True, metavar="HOST:PORT", help="A control address that must be reachable from here.")
@click.option(
    "--engine",
    "names",
    multiple=True,
    type=click.Choice(list(ENGINES)),
    help="Examine this engine only, and report an error if it does not work; default: all.",
)
@click.option(
    "--engines/--no-engines", "start_engines", default=True, help="Start engines in child processes and measure them."
)
@click.option("--require", type=click.Choice(["rdma"]), help="Report an error instead of a warning if this is missing.")
@click.option(
    "--watch",
    "watch_s",
    type=Number(0, MAX_SECONDS),
    metavar="SECONDS",
    help="Also show what each RDMA device sends and receives within this time.",
)
@click.option("--shm", type=click.Path(path_type=Path), default="/dev/shm", help="The shared-memory mount to examine.")  # noqa: S108
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the findings as JSON; - for standard output.",
)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@one_sentence
def doctor(
    *,
    peers: tuple[str, ...],
    names: tuple[str, ...],
    start_engines: bool,
    require: str | None,
    watch_s: float | None,
    shm: Path,
    json_file: Path | None,
) -> None:
    """Examine this machine's hardware, limits and settings, start every engine in child processes, and report problems: the
    cause, the consequence, and the command that fixes it. Exit status 1 if there is an error.
    """
    if names and not start_engines:
        raise ConfigError("engine: --no-engines starts none; omit one of both")
    check_files([json_file])
    quiet = str(json_file) == "-"
    findings = []
    examined = examine(
        Machine(shm=shm),
        names=names,
        peers=peers,
        require_rdma=require == "rdma",
        watch_s=watch_s,
        start_engines=start_engines,
    )
    for finding in examined:
        findings.append(finding)
        if not quiet:
            print("\n".join(lines(finding)), flush=True)
    encoded = to_json(findings)
    if quiet:
        sys.stdout.write(encoded.decode())
    elif json_file is not None:
        json_file.write_bytes(encoded)
    if not quiet:
        counts = Counter(finding.level for finding in findings)
        print(f"{counts[Level.ERROR]} errors, {counts[Level.WARNING]} warnings, {counts[Level.OK]} ok")
    sys.exit(1 if worst(findings) is Level.ERROR else 0)


def lines(finding: Finding) -> list[str]:
    found = [f"{finding.level.value:<7}  {finding.topic:<11}  {finding.cause}"]
    if finding.consequence:
        found.append(f"{'':22}so:  {finding.consequence}")
    if finding.fix:
        found.append(f"{'':22}fix: {finding.fix}")
    return found


def to_json(findings: list[Finding]) -> bytes:
    """`{"ok", "findings": [{"topic", "level", "cause", "consequence", "fix"}]}`; `ok` unless one is an error."""
    return indented_json({"ok": worst(findings) is not Level.ERROR, "findings": findings})
