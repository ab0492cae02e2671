"""RDMA devices of this host on two sides of a switch, so that packets can be lost and devices go down (in the guest, as root).

Soft-RoCE hands packets between two queue pairs of one device over inside the kernel, and the kernel delivers packets to its
own addresses without sending them. Devices over veth pairs send them, with rules that route by the sending device
(`devices.sh` has the kernel consult the routes to its own addresses later).
"""

from __future__ import annotations

import ipaddress
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

TABLE = 1000
"""Routing tables from here on are the devices' own."""
MAX_RAILS = 8
GID_INDEX = 1
"""Where a device has its IPv4 address as a GID (`devices.sh` has the engines use this index)."""
USABLE_S = 30.0
"""How long after its network device a port and its GID may take to come up."""


class DeviceError(Exception):
    """A device cannot be used, although its network device is up."""


@dataclass(frozen=True)
class Device:
    """An RDMA device, its network device and its IPv4 address. `table` has its routes."""

    name: str
    interface: str
    address: str
    table: int

    @property
    def sent_packets(self) -> int:
        """Packets that it has sent so far, acknowledgements among them."""
        return int(self._read("hw_counters/sent_pkts"))

    @property
    def problem(self) -> str:
        """What an engine lacks to use the device; empty if nothing."""
        expected = ipaddress.IPv6Address(f"::ffff:{self.address}").exploded
        if "ACTIVE" not in (state := self._read("state")):
            return f"expected an active port, found state {state!r}"
        if (found := self._read(f"gids/{GID_INDEX}")) != expected:
            return f"expected GID {expected} at index {GID_INDEX}, found {found}"
        return ""

    def _read(self, name: str) -> str:
        return Path(f"/sys/class/infiniband/{self.name}/ports/1/{name}").read_text().strip()


class RdmaLink:
    """Link `number`, from 0 on, with `rails` devices on each of two sides; every device reaches all of the other side.

    Once it is created, a link of the same number with fewer rails is a part of it.
    Create and close links while no process opens an engine: UCX reads routes only once, and a process that lists the RDMA
    devices while another one is removed may miss a device. Commands that the kernel refuses raise
    `subprocess.CalledProcessError`, with the kernel's words and the state of all network devices as a note.
    """

    def __init__(self, number: int, *, rails: int = 1) -> None:
        self._bridge = f"link{number}"
        self._sides = tuple(tuple(_device(number, side, rail) for rail in range(rails)) for side in (0, 1))

    def create(self) -> None:
        """Make the network devices, the routes between them, and the RDMA devices. Raises `DeviceError`."""
        _run(f"ip link add {self._bridge} type bridge")
        _run(f"ip link set {self._bridge} up")
        try:
            for device in self.devices:
                self._plug(device)
            for device in self.devices:
                self._route(device)
                _run(f"rdma link add {device.name} type rxe netdev {device.interface}")
            self._await_usable()
        except BaseException:
            self.close()
            raise

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of both sides."""
        return self._sides[0] + self._sides[1]

    def side(self, number: int) -> tuple[Device, ...]:
        """The devices of side 0 or 1."""
        return self._sides[number]

    @property
    def sent_packets(self) -> int:
        """Packets that all devices have sent so far."""
        return sum(device.sent_packets for device in self.devices)

    @property
    def lost_packets(self) -> int:
        """Packets that were dropped since `lose` was called."""
        shown = [_run(f"tc -s qdisc show dev {device.interface}") for device in self.devices]
        return sum(int(text.partition("dropped ")[2].split(",")[0]) for text in shown if "netem" in text)

    def lose(self, percent: float) -> None:
        """Lose that share of the packets of all devices, until `mend`."""
        for device in self.devices:
            _run(f"tc qdisc replace dev {device.interface} root netem loss {percent}%")

    def take_down(self, *devices: Device) -> None:
        """Take the network devices below these RDMA devices down, and so their ports, until `mend`."""
        for device in devices:
            _run(f"ip link set {device.interface} down")

    def mend(self) -> None:
        """Lose no packets, bring all devices up, and wait until engines can use them. Raises `DeviceError`."""
        for device in self.devices:
            _run(f"tc qdisc replace dev {device.interface} root pfifo")
            _run(f"ip link set {device.interface} up")
        for device in self.devices:
            self._route(device)
        self._await_usable()

    def close(self) -> None:
        """Remove the devices, which must not be in use."""
        for device in self.devices:
            for command in (
                f"rdma link delete {device.name}",
                f"ip link delete {device.interface}",
                f"ip rule delete lookup {device.table}",
            ):
                subprocess.run(command.split(), capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True, check=False)

    def _await_usable(self) -> None:
        deadline = time.monotonic() + USABLE_S
        for device in self.devices:
            while problem := device.problem:
                if time.monotonic() > deadline:
                    raise DeviceError(f"RDMA device {device.name}, {USABLE_S:g} s after it came up: {problem}")
                time.sleep(0.01)

    def _plug(self, device: Device) -> None:
        end = device.interface
        _run(f"ip link add {end} mtu 9000 type veth peer name {end}-p mtu 9000")
        _run(f"ip link set {end}-p master {self._bridge} up")
        for name, value in (("accept_local", "1"), ("rp_filter", "0")):
            Path(f"/proc/sys/net/ipv4/conf/{end}/{name}").write_text(value)
        _run(f"ip address add {device.address}/24 dev {end}")
        _run(f"ip link set {end} up")
        _run(f"ip rule add pref 100 oif {end} lookup {device.table}")

    def _route(self, device: Device) -> None:
        """Route packets to the other side over this device. A device that goes down loses its routes."""
        for other in self._sides[1] if device in self._sides[0] else self._sides[0]:
            hardware = Path(f"/sys/class/net/{other.interface}/address").read_text().strip()
            _run(f"ip route replace {other.address} dev {device.interface} table {device.table}")
            _run(f"ip neighbour replace {other.address} lladdr {hardware} dev {device.interface} nud permanent")


def _device(number: int, side: int, rail: int) -> Device:
    interface = f"link{number}{'ab'[side]}{rail}"
    host = 1 + side + 2 * rail
    return Device(f"rxe-{interface}", interface, f"10.97.{number}.{host}", TABLE + 2 * MAX_RAILS * number + host)


def _run(command: str) -> str:
    try:
        return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=False).stdout
        error.add_note(f"{error.stderr}{links}")
        raise
