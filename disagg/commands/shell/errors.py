"""How commands end: what went wrong, in one sentence."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from disagg.core.errors import ConfigError, DisaggError


def main(command: click.Command, name: str) -> NoReturn:
    """Run a command as the program `name`, and end: a wrong option is said in one sentence too."""
    try:
        status = command.main(prog_name=name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else name
        print(f"{path}: {error.format_message().rstrip('.')}; {path} --help shows what there is", file=sys.stderr)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)


def one_sentence(command: Callable[..., None]) -> Callable[..., None]:
    """The command, ending with a sentence where it raised one of this library's errors, or could not use a file.

    Exit status 2 for settings that cannot be, 1 for all else. With its flag `--debug` the error is raised as it is.
    """

    @functools.wraps(command)
    def guarded(*, debug: bool = False, **options: Any) -> None:
        try:
            command(**options)
        except (DisaggError, OSError) as error:
            if debug:
                raise
            print(f"{click.get_current_context().command_path}: {sentence(error)}", file=sys.stderr)
            sys.exit(2 if isinstance(error, ConfigError) else 1)
        except KeyboardInterrupt:
            sys.exit(130)

    return guarded


def sentence(error: Exception) -> str:
    """What went wrong; for a file, which one."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
