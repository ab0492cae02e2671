"""Indices of GIDs that variables name; the other findings about RDMA are tested with the doctor."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.machine.findings import Level, Machine
from disagg.machine.rdma import NO_GID, rdma, rdma_refusal


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with one device, with GIDs at index 0 and 3."""
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    (port / "gids").mkdir(parents=True)
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    (port / "state").write_text("4: ACTIVE")
    for index, gid in enumerate(("fe80::1", NO_GID, NO_GID, "::ffff:0a00:0002")):
        (port / "gids" / str(index)).write_text(gid)
    return tmp_path


@pytest.mark.parametrize("variable", ["MC_GID_INDEX", "UCX_IB_GID_INDEX"])
def test_an_index_without_a_gid_is_found(variable: str, root: Path) -> None:
    machine = Machine(root=root, environ={variable: "2"}, memlock=None)
    (finding,) = [finding for finding in rdma(machine) if variable in finding.cause]
    assert finding.level is Level.WARNING
    assert "on mlx5_0 GIDs are at index 0, 3 only" in finding.cause
    assert f"{variable}='2' is set" in str(rdma_refusal(machine=machine))


@pytest.mark.parametrize("value", ["0", "3", "auto"])
def test_an_index_with_a_gid_is_fine(value: str, root: Path) -> None:
    assert rdma_refusal(machine=Machine(root=root, environ={"UCX_IB_GID_INDEX": value}, memlock=None)) is None


@pytest.mark.parametrize(
    ("counter", "value", "shown"),
    [
        ("counters/port_xmit_data", "31250000", "2 GIDs; 125.0 MB sent"),
        ("hw_counters/sent_pkts", "28876", "2 GIDs; 28876 packets sent"),
        ("counters/port_xmit_data", "N/A", "2 GIDs"),
    ],
)
def test_what_a_device_has_sent_is_shown(counter: str, value: str, shown: str, root: Path) -> None:
    """The kernel counts words of four bytes."""
    file = root / "sys/class/infiniband/mlx5_0/ports/1" / counter
    file.parent.mkdir()
    file.write_text(value)
    (finding,) = [found for found in rdma(Machine(root=root, environ={}, memlock=None)) if "mlx5_0 port 1" in found.cause]
    assert finding.cause.endswith(shown)


def test_a_rank_that_may_use_rdma_reads_few_of_the_gids(root: Path) -> None:
    """Each of a thousand is a file. Listing them all took most of a rank's start on a slow machine."""
    read: list[str] = []

    class Counted(Machine):
        def read(self, path: str) -> str | None:
            read.extend([path] * ("/gids/" in path))
            return super().read(path)

    assert rdma_refusal(machine=Counted(root=root, environ={"UCX_IB_GID_INDEX": "3"}, memlock=None)) is None
    assert sorted(Path(path).name for path in read) == ["0", "3"]
