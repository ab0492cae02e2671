"""`disagg keygen`."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from disagg.commands.keygen import write_pair
from disagg.commands.main import main
from disagg.config import read_keys
from disagg.core.errors import ConfigError
from disagg.runtime.channel import Channel
from disagg.runtime.keys import KeyPair
from disagg.runtime.wire import Inbound
from tests.commands.conftest import said
from tests.manager.test_peers import until


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return said(main, "keygen", *arguments)


def test_a_rank_can_read_the_written_pair(tmp_path: Path) -> None:
    ended = run("--out", str(tmp_path / "keys"), "--name", "prefill")
    assert ended.returncode == 0, ended.stderr
    secret, public = tmp_path / "keys/prefill.toml", tmp_path / "keys/prefill.pub"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    keys = read_keys(str(secret))
    assert keys is not None
    assert ended.stdout.strip() == public.read_text().strip() == keys.public
    assert keys.secret not in ended.stdout + ended.stderr + public.read_text()
    assert sorted(path.name for path in secret.parent.iterdir()) == ["prefill.pub", "prefill.toml"]


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    first = run("--out", str(tmp_path)).stdout
    before = (tmp_path / "disagg.toml").read_bytes()
    ended = run("--out", str(tmp_path))
    assert ended.returncode == 2
    (sentence,) = ended.stderr.splitlines()
    assert "--force" in sentence
    assert "disagg.toml" in sentence
    assert (tmp_path / "disagg.toml").read_bytes() == before
    (tmp_path / "disagg.toml").chmod(0o644)
    again = run("--out", str(tmp_path), "--force")
    assert again.returncode == 0
    assert again.stdout != first
    assert stat.S_IMODE((tmp_path / "disagg.toml").stat().st_mode) == 0o600


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (tmp_path / "disagg.toml").symlink_to(target)
    with pytest.raises(ConfigError, match="would be overwritten"):
        write_pair(KeyPair.generate(), tmp_path, name="disagg", force=False)
    write_pair(KeyPair.generate(), tmp_path, name="disagg", force=True)
    assert not target.exists()
    assert not (tmp_path / "disagg.toml").is_symlink()


@pytest.mark.parametrize("name", ["", "../up", "a/b"])
def test_a_name_is_a_file_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a file name without a folder"):
        write_pair(KeyPair.generate(), tmp_path, name=name, force=False)


def test_two_instances_with_generated_pairs_can_connect(tmp_path: Path) -> None:
    pairs = []
    for name in ("prefill", "decode"):
        write_pair(KeyPair.generate(), tmp_path, name=name, force=False)
        pairs.append(read_keys(str(tmp_path / f"{name}.toml")))
    ours, theirs = pairs
    assert ours is not None
    assert theirs is not None
    server = Channel("tcp://127.0.0.1:0", keys=ours, allow=lambda key: key == theirs.public)
    client = Channel("tcp://127.0.0.1:0", keys=theirs)
    try:
        client.connect(0, server.address, public_key=(tmp_path / "prefill.pub").read_text().strip())
        client.send(0, b"hello")
        client.flush()
        found: list[bytes] = []

        def has_arrived() -> bool:
            found.extend(message.data for message in server.poll(0.1) if isinstance(message, Inbound))
            return bool(found)

        until(has_arrived)
        assert found == [b"hello"]
    finally:
        client.close()
        server.close()


def test_the_help_has_examples_and_an_existing_file_is_named(tmp_path: Path) -> None:
    assert "--peer-key" in run("--help").stdout
    (tmp_path / "file").write_text("")
    ended = run("--out", str(tmp_path / "file" / "keys"))
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert "Traceback" in run("--out", str(tmp_path / "file" / "keys"), "--debug").stderr
