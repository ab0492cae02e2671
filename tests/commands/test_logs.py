"""Levels and forms of the commands' logs, and keys in all their forms."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from disagg import Config, ConfigError
from disagg.commands.keygen import write_pair
from disagg.commands.shell.logs import JsonLines
from disagg.config import read_keys
from disagg.runtime.keys import KeyPair, hexadecimal


def test_a_record_is_one_line_of_json_with_its_request_and_traceback() -> None:
    with pytest.raises(ValueError, match="invalid literal") as raised:
        int("two\nlines")
    error = (raised.type, raised.value, raised.tb)
    record = logging.LogRecord("disagg.requests", logging.WARNING, __file__, 1, "a %s", ("word\n",), error)
    record.request = {"nbytes": 3, "cause": None, "path": Path("/x")}
    line = JsonLines().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("time").endswith("+00:00")
    assert "ValueError: invalid literal" in found.pop("error")
    assert found == {
        "level": "warning",
        "logger": "disagg.requests",
        "message": "a word\n",
        "request": {"nbytes": 3, "cause": None, "path": "/x"},
    }


def test_keys_are_read_in_every_form(tmp_path: Path) -> None:
    pair = KeyPair.generate()
    write_pair(pair, tmp_path, name="own", force=False, text=hexadecimal)
    assert len((tmp_path / "own.pub").read_text().strip()) == 64
    assert read_keys(tmp_path / "own.toml") == pair
    for text in (pair.public, hexadecimal(pair.public), hexadecimal(pair.public).upper(), f"file:{tmp_path / 'own.pub'}"):
        config = Config(name="a", peers={"b": "tcp://127.0.0.1:1"}, peer_keys={"b": text})
        assert config.manager_arguments()["peer_keys"] == {"b": pair.public}


def test_a_key_in_another_form_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "bad.pub").write_text("feed" * 15)
    for text, where in (("feed" * 15, "peer 'b', public key"), (f"file:{tmp_path / 'bad.pub'}", "bad.pub")):
        with pytest.raises(ConfigError, match="40 Z85 characters or 64 hex digits, found 60") as raised:
            Config(name="a", peers={"b": "tcp://127.0.0.1:1"}, peer_keys={"b": text}).public_keys()
        assert where in str(raised.value)
        assert "feed" not in str(raised.value)
