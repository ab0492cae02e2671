"""How commands end: with one sentence for an error, and an exit status."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from disagg.commands.shell.logs import error_line
from disagg.core.errors import ConfigError, DisaggError


def main(command: click.Command, name: str) -> NoReturn:
    """Run a command and exit. A reader that closes the pipe early, such as `head`, ends it quietly, with status 1."""
    try:
        status = command.main(prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        sys.exit(1)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else name
        message = re.sub(r"(is not a valid (integer|float)) range\b", r"\1", error.format_message())  # click's name of its type
        print(f"{path}: {message.rstrip('.')}; see {path} --help", file=sys.stderr)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)


def one_sentence(command: Callable[..., None]) -> Callable[..., None]:
    """Print one sentence for this library's errors and `OSError`, and exit: status 2 for invalid settings, else 1. `--debug`
    raises the error instead.
    """

    @functools.wraps(command)
    def guarded(*, debug: bool = False, **options: Any) -> None:
        try:
            command(**options)
        except (DisaggError, OSError) as error:
            if debug or isinstance(error, BrokenPipeError):
                raise
            path = click.get_current_context().command_path
            print(error_line(f"{path}: {sentence(error)}", source=__name__), file=sys.stderr)
            sys.exit(2 if isinstance(error, ConfigError) else 1)
        except KeyboardInterrupt:
            sys.exit(130)

    return guarded


def sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
