"""The group of subcommands of `disagg`."""

from __future__ import annotations

import importlib

import click

from disagg.settings import did_you_mean

COMMANDS = {
    "prefill": "disagg.commands.rank.command:prefill",
    "decode": "disagg.commands.rank.command:decode",
    "explain": "disagg.commands.explain.command:explain",
    "doctor": "disagg.commands.doctor.command:doctor",
    "top": "disagg.commands.top:top",
    "keygen": "disagg.commands.keygen:keygen",
}
"""`module:name`"""


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        meant = did_you_mean(args[0], COMMANDS)
        if meant and args[0] not in COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r} ({meant})")
        return super().resolve_command(ctx, args)


EPILOG = """\b
Examples:
  disagg doctor
  disagg explain --model llama-3-70b --tokens 4096 --prefill tp=4 --decode tp=2
  disagg keygen --out keys --name prefill
  disagg decode --model tiny --listen tcp://127.0.0.1:7200 --peer prefill=tcp://127.0.0.1:7100
\b
See disagg COMMAND --help for each command, and disagg-bench --help for benchmarks.
"""


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"max_content_width": 120})
@click.version_option(package_name="disagg", message="%(package)s %(version)s")
def disagg() -> None:
    """Move LLM inference state between prefill and decode ranks."""
