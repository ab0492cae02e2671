"""Every command: help with examples, and errors in one sentence, with a traceback only under `--debug`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click
import pytest

from disagg.commands.bench.command import bench
from disagg.commands.rank.rank import RankConfig
from disagg.commands.shell import errors
from disagg.commands.shell.group import COMMANDS, disagg
from disagg.core.errors import DisaggError
from disagg.settings import settings

DOCS = Path(__file__).parents[2] / "docs"
ALL: dict[str, click.Command] = {"disagg": disagg, "disagg-bench": bench}
ALL |= {f"disagg {name}": command for name in COMMANDS if (command := disagg.get_command(click.Context(disagg), name))}


def ended(capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> tuple[object, str, str]:
    """Status, output and errors of a command, run in this process."""
    program, *words = name.split()
    before, sys.argv = sys.argv, [program, *words, *arguments]
    try:
        with pytest.raises(SystemExit) as caught:
            errors.main(ALL[program], program)
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    return caught.value.code, out, err


@pytest.mark.parametrize("name", ALL)
def test_the_help_has_examples_of_the_command(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, err = ended(capsys, name, "--help")
    assert (status, err) == (0, "")
    examples = out[re.search(r"Examples?[,:]", out).start() :]  # type: ignore[union-attr]
    assert len(re.findall(rf"^ *{name} +", examples, re.MULTILINE)) >= 1, examples
    assert name == "disagg" or "--debug" in out
    for parameter in ALL[name].params:
        names = [parameter.metavar] if isinstance(parameter, click.Argument) else parameter.opts
        assert getattr(parameter, "hidden", False) or all(str(each) in out for each in names)


@pytest.mark.parametrize("name", ALL)
def test_a_wrong_option_is_one_sentence(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, err = ended(capsys, name, "--no-such-option")
    assert (status, out) == (2, "")
    (sentence,) = err.splitlines()
    assert sentence.startswith(f"{name}: ")
    assert "no-such-option" in sentence
    assert sentence.endswith(f"; see {name} --help")


@pytest.mark.parametrize(
    ("name", "option", "kind"),
    [
        ("disagg explain", "--tokens", "integer"),
        ("disagg-bench", "--tokens", "integer"),
        ("disagg-bench", "--repeat", "integer"),
        ("disagg doctor", "--watch", "float"),
    ],
)
def test_a_word_for_a_number_is_named(capsys: pytest.CaptureFixture[str], name: str, option: str, kind: str) -> None:
    _, _, err = ended(capsys, name, option, "x")
    assert err == f"{name}: Invalid value for '{option}': 'x' is not a valid {kind}; see {name} --help\n"


@pytest.mark.parametrize(("word", "meant"), [("prefil", "prefill"), ("dekode", "decode"), ("zzzz", None)])
def test_a_misspelt_command_is_one_sentence_with_those_that_may_be_meant(
    capsys: pytest.CaptureFixture[str], word: str, meant: str | None
) -> None:
    status, out, err = ended(capsys, "disagg", word)
    assert (status, out) == (2, "")
    hint = f" (did you mean {meant!r}?)" if meant else ""
    assert err == f"disagg: No such command {word!r}{hint}; see disagg --help\n"


@pytest.mark.parametrize(
    "line",
    [
        "* `--tokens INTEGER RANGE`: Length of the request. [required; x>=1]",
        "* `--interval SECONDS`: Time between two readings. [default `2.0`; 0.1<=x<=1000000]",
        "* `--engines / --no-engines`: Start engines in child processes and measure them. [default `engines`]",
        "* `--shm PATH`: The shared-memory mount to examine. [default `/dev/shm`]",
    ],
)
def test_the_page_of_commands_has_bounds_and_defaults_as_the_help_does(line: str) -> None:
    assert line in (DOCS / "commands.md").read_text().splitlines()


def test_every_option_of_a_rank_is_on_the_page_of_settings() -> None:
    page = (DOCS / "configuration.md").read_text()
    flags = [setting.flag for setting in settings(RankConfig) if setting.key != "role"]
    assert len(flags) > 30
    assert [flag for flag in flags if page.count(f"| `{flag}` |") != 1] == []


FAILING = {
    "disagg prefill": ("--model", "tiny", "--side", "tp=x"),
    "disagg decode": ("--config", "/nowhere/rank.toml"),
    "disagg explain": ("--model", "/nowhere.json", "--tokens", "8", "--prefill", "tp=1", "--decode", "tp=1"),
    "disagg doctor": ("--no-engines", "--peer", "nowhere"),
    "disagg top": ("file:///etc/hostname",),
    "disagg keygen": ("--out", "/dev/null/keys"),
    "disagg-bench": ("--compare", "/nowhere.json", "/nowhere.json"),
}


def test_a_failure_is_tested_for_every_command() -> None:
    assert FAILING.keys() == ALL.keys() - {"disagg"}


@pytest.mark.parametrize("name", FAILING)
def test_a_failure_is_one_sentence_or_an_exception_with_debug(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, _, err = ended(capsys, name, *FAILING[name])
    assert status in (1, 2)
    (sentence,) = err.splitlines()
    assert sentence.startswith(f"{name}: ")
    with pytest.raises((DisaggError, OSError)):  # nothing catches it: Python prints its traceback
        ended(capsys, name, *FAILING[name], "--debug")
