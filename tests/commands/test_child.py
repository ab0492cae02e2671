"""Children with lines on their standard input and output."""

from __future__ import annotations

import sys
import tempfile

import pytest

from disagg.commands.shell.child import ChildEnded, ChildProcess

ECHO = """
import sys
for line in sys.stdin:
    sys.stdout.write(line)
    sys.stdout.flush()
"""
STUBBORN = (
    "import signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(600)"
)


def python(code: str, *, errors: object = None) -> ChildProcess:
    return ChildProcess([sys.executable, "-c", code], **({} if errors is None else {"errors": errors}))  # type: ignore[arg-type]


def test_lines_come_back_whole_and_it_ends_with_its_input() -> None:
    lines = ["one", "", "ü" * 100_000, "two"]
    with python(ECHO) as child:
        for line in lines:
            child.send(line)
            assert child.receive(timeout_s=30.0) == line
        assert child.wait(timeout_s=0.0) is None
        child.end(timeout_s=30.0)
    assert child.ending == "exit status 0"
    child.kill()


def test_lines_written_at_once_are_received_one_by_one() -> None:
    with python("print('one\\ntwo\\nthree')") as child:
        assert [child.receive(timeout_s=30.0) for _ in range(3)] == ["one", "two", "three"]
        with pytest.raises(ChildEnded, match="exit status 0"):
            child.receive(timeout_s=30.0)


def test_a_child_that_writes_more_than_a_pipe_holds_goes_on_while_it_is_read() -> None:
    """Engines log to the standard output of their process."""
    with python("import sys\nprint('up\\n' + 'x' * (1 << 20), flush=True)\nsys.stdin.readline()\nprint('on')") as child:
        assert child.receive(timeout_s=30.0) == "up"
        found = b""
        while len(found) <= 1 << 20:
            found += child.read()
        assert found == b"x" * (1 << 20) + b"\n"
        child.send("")
        assert child.receive(timeout_s=30.0) == "on"


def test_no_line_is_a_timeout_and_the_child_runs_on() -> None:
    with python(ECHO) as child:
        with pytest.raises(TimeoutError, match=r"no line within 0\.05 s"):
            child.receive(timeout_s=0.05)
        child.send("later")
        assert child.receive(timeout_s=30.0) == "later"


@pytest.mark.parametrize(
    ("code", "ending"),
    [("import sys; sys.exit(3)", "exit status 3"), ("import os; os.kill(os.getpid(), 9)", "signal SIGKILL")],
)
def test_the_ending_is_named(code: str, ending: str) -> None:
    with python(code) as child:
        with pytest.raises(ChildEnded, match=ending):
            child.receive(timeout_s=30.0)
        with pytest.raises(ChildEnded, match=ending):
            child.send("line")
        assert child.wait(timeout_s=30.0) == child.ending == ending


def test_a_child_that_ignores_the_end_of_its_input_is_killed() -> None:
    child = python(STUBBORN)
    assert child.receive(timeout_s=30.0) == "ready"
    assert child.wait(timeout_s=0.05) is None
    child.end(timeout_s=0.05)
    assert child.ending == "signal SIGKILL"


def test_standard_error_goes_where_it_is_sent() -> None:
    with tempfile.TemporaryFile() as errors:
        with python("import sys; sys.stderr.write('trouble')", errors=errors) as child:
            child.wait(timeout_s=30.0)
        errors.seek(0)
        assert errors.read() == b"trouble"
