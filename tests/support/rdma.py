"""The guest's RDMA devices: what engines are given to use them, and how many packets they have sent."""

from __future__ import annotations

from pathlib import Path

from disagg.backends.base import BackendOptions, Transport
from harness.rdma.link import RdmaLink

DEVICES = {"nixl": "rxe0", "mooncake": "rxe1"}
"""Each engine has a device of its own, so that tests of both may run at once and their packets are told apart."""
DOWN = "rxe2"
"""A device whose port is down."""
HOSTS = {"nixl": "10.99.0.1", "mooncake": "10.99.1.1"}
LINK_NUMBERS = {"nixl": 1, "mooncake": 2}
"""Each engine's link. `tests/rdma/conftest.py` creates both; tests add and remove no devices."""
RAILS = 2
"""Devices on each side of these links."""
MTU = 4096
"""Maximum bytes of payload in one packet."""


def device_names(backend: str) -> tuple[str, ...]:
    """The value of `devices` for `backend`: UCX's names of devices have a port."""
    return (f"{DEVICES[backend]}:1" if backend == "nixl" else DEVICES[backend],)


def rdma_options(backend: str) -> BackendOptions:
    """Options under which `backend` uses its device and nothing else."""
    return BackendOptions(host=HOSTS[backend], require=Transport.RDMA, devices=device_names(backend))


def link_options(backend: str, link: RdmaLink, side: int) -> BackendOptions:
    """Options under which `backend` uses the devices of that side of a link and nothing else."""
    names = tuple(f"{device.name}:1" if backend == "nixl" else device.name for device in link.side(side))
    return BackendOptions(host="127.0.0.1", require=Transport.RDMA, devices=names)


def sent_packets(backend: str) -> int:
    """Packets that the engine's device has sent so far, acknowledgements among them."""
    return int(Path(f"/sys/class/infiniband/{DEVICES[backend]}/ports/1/hw_counters/sent_pkts").read_text())


def assert_sent(backend: str, num_packets: int, *, since: int) -> None:
    """Fails unless the engine's device has sent that many packets since it had sent `since`."""
    sent = sent_packets(backend) - since
    assert sent >= num_packets, f"{DEVICES[backend]} sent {sent} packets, expected {num_packets} or more: bytes went elsewhere"
