"""The log of a command: its level, and lines of text or of JSON."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]


class JsonLines(logging.Formatter):
    """One JSON object a line: `time` (ISO 8601, UTC), `level`, `logger`, `message`, for a request's line its values as
    `request`, and the traceback of an error as `error`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if "request" in vars(record):
            line["request"] = vars(record)["request"]
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def json_line(message: str, *, source: str) -> str:
    """A message that is printed, not logged, in the form of the log's lines. `source` is its `logger`."""
    record = logging.makeLogRecord({"name": source, "levelno": logging.INFO, "levelname": "INFO", "msg": message})
    return JsonLines().format(record)


def configure_logging(level: Level, form: Format = "text") -> None:
    """Log messages of this level and above to standard error. A second call replaces the first."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
