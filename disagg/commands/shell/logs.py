"""The log of a command: its level, and lines of text or of JSON."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

import msgspec

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]


class JsonLines(logging.Formatter):
    """One JSON object a line: `time` (ISO 8601, UTC), `level`, `logger`, `message`, a request's values as `request`, an
    error's traceback as `error`.
    """

    def format(self, record: logging.LogRecord) -> str:
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


def json_line(message: str, *, source: str, level: int = logging.INFO) -> str:
    record = logging.makeLogRecord({"name": source, "levelno": level, "levelname": logging.getLevelName(level), "msg": message})
    return JsonLines().format(record)


def error_line(message: str, *, source: str) -> str:
    is_json = any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)
    return json_line(message, source=source, level=logging.ERROR) if is_json else message


def configure_logging(level: Level, form: Format = "text") -> None:
    """To standard error. A second call replaces the first. As JSON, an exception that ends the process is logged too."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    sys.excepthook = _log_uncaught if form == "json" else sys.__excepthook__


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))
