"""What the server's log filters and handlers raise ends no thread of the manager."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from disagg.core.thread_log import ThreadLog

NAME = "tests.thread_log"


@pytest.fixture
def refuse() -> Iterator[Callable[[type[BaseException]], None]]:
    """Has a filter of the logger raise an error."""
    logger = logging.getLogger(NAME)

    def add(error: type[BaseException]) -> None:
        def fail(_: logging.LogRecord) -> bool:
            raise error

        logger.addFilter(fail)

    yield add
    logger.filters.clear()


def test_records_are_those_of_the_plain_logger(caplog: pytest.LogCaptureFixture) -> None:
    log = ThreadLog(NAME)
    log.debug("%s is not enabled", NAME)
    log.warning("lost %s", "prefill-0/0", extra={"request": {"attempt": 2}})
    error = ValueError("a command")
    try:
        raise error
    except ValueError:
        log.exception("failed")
    first, second = caplog.records
    assert (first.getMessage(), first.name, first.levelname) == ("lost prefill-0/0", NAME, "WARNING")
    assert vars(first)["request"] == {"attempt": 2}
    assert second.exc_info is not None
    assert second.exc_info[1] is error
    here = (__file__.rpartition("/")[2], "test_records_are_those_of_the_plain_logger")
    assert [(record.filename, record.funcName) for record in caplog.records] == [here, here]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_only_the_main_thread_hears_of_a_filter_that_raises(
    error: type[BaseException], refuse: Callable[[type[BaseException]], None]
) -> None:
    refuse(error)
    log, passed = ThreadLog(NAME), threading.Event()

    def run() -> None:
        log.warning("in a thread of the manager")
        passed.set()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert passed.is_set()
    with pytest.raises(error):
        log.warning("in the main thread")


def test_what_a_peer_says_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    ThreadLog(NAME).warning("lost %s after %d: %s", "a\nERROR b", 3, ValueError("\x1b[2Jgone"))
    (record,) = caplog.records
    assert record.getMessage() == "lost a\\nERROR b after 3: \\x1b[2Jgone"
