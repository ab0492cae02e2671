"""Indices of GIDs that variables name; the other findings about RDMA are tested with the doctor."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.machine.findings import Level, Machine, ok
from disagg.machine.rdma import NO_GID, rdma, rdma_refusal, watch


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


COUNTED = {
    "words of four bytes": ("counters/port_xmit_data", "counters/port_rcv_data", "125.0 MB sent, 8.0 MB received"),
    "packets": ("hw_counters/sent_pkts", "hw_counters/rcvd_pkts", "31250000 packets sent, 2000000 received"),
}


def count(root: Path, what: str, sent: int | str, received: int | str) -> None:
    """Set a port's counters."""
    for name, value in zip(COUNTED[what][:2], (sent, received), strict=True):
        file = root / "sys/class/infiniband/mlx5_0/ports/1" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{value}\n")


@pytest.mark.parametrize("what", COUNTED)
def test_what_a_device_has_sent_is_shown(what: str, root: Path) -> None:
    count(root, what, 31250000, 2000000)
    (finding,) = [found for found in rdma(Machine(root=root, environ={}, memlock=None)) if "mlx5_0 port 1" in found.cause]
    assert finding.cause.endswith(f"2 GIDs; {COUNTED[what][2]} so far")
    count(root, what, "N/A", 0)
    (finding,) = [found for found in rdma(Machine(root=root, environ={}, memlock=None)) if "mlx5_0 port 1" in found.cause]
    assert finding.cause.endswith("2 GIDs")


@pytest.mark.parametrize("what", COUNTED)
def test_watching_shows_what_a_device_carries_meanwhile(what: str, root: Path) -> None:
    slept: list[float] = []

    def transfer(seconds: float) -> None:
        slept.append(seconds)
        count(root, what, 1000 + 31250000, 50 + 2000000)

    count(root, what, 1000, 50)
    (finding,) = watch(Machine(root=root, environ={}, memlock=None), 5.0, sleep=transfer)
    assert finding == ok("rdma", f"RDMA device mlx5_0 port 1, within 5 s: {COUNTED[what][2]}")
    assert slept == [5.0]


def test_devices_without_counters_cannot_be_watched(root: Path) -> None:
    (finding,) = watch(Machine(root=root, environ={}, memlock=None), 0.0)
    assert finding.level is Level.WARNING
    assert "counts what it sends" in finding.cause


def test_a_rank_that_may_use_rdma_reads_few_of_the_gids(root: Path) -> None:
    """Each of a thousand is a file. Listing them all took most of a rank's start on a slow machine."""
    read: list[str] = []

    class Counted(Machine):
        def read(self, path: str) -> str | None:
            read.extend([path] * ("/gids/" in path))
            return super().read(path)

    assert rdma_refusal(machine=Counted(root=root, environ={"UCX_IB_GID_INDEX": "3"}, memlock=None)) is None
    assert sorted(Path(path).name for path in read) == ["0", "3"]
