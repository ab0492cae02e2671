"""Commands from a driver to a resident rank, and the replies: MessagePack of tagged types, one reply per command. Times are
`time.monotonic()` of the rank's machine, in seconds; a driver compares clocks by `Description.now` and `boot_id`.
"""

from __future__ import annotations

import enum

import msgspec


class Fault(enum.Enum):
    """A deliberate fault of a sending rank."""

    BYTE = "byte"
    """One wrong byte in the rank's memory."""
    PAGES = "pages"
    """A request's first two pages are swapped."""
    KILL = "kill"
    """SIGKILL once a run has begun."""


class Direction(enum.Enum):
    SEND = "send"
    RECEIVE = "receive"


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request on one rank. `needs`: the range of its `tokens` that this rank's memory must hold, by component. `rows`:
    its pages, from the page with token `needs[0]` on, or its one slot or ring. `group`: the peer's, if this rank receives.
    `arrival_s`: after the start of the run.
    """

    number: int
    tokens: int
    needs: dict[str, tuple[int, int]]
    rows: dict[str, tuple[int, ...]]
    group: int = 0
    request_id: bytes = b""
    arrival_s: float = 0.0


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes from an offset in this rank's arena to an address of rank `rank` of the peer."""

    rank: int
    source_offset: int
    destination: int
    nbytes: int


class Command(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of commands."""


class Describe(Command, frozen=True):
    """Ask for `Description`."""


class Peer(Command, frozen=True):
    """Add a peer by its leader's control address, with the public key in the rank's settings."""

    name: str
    address: str


class WaitReady(Command, frozen=True):
    name: str
    timeout_s: float


class Fill(Command, frozen=True):
    """Write the reference's contents of `items`, and the canary everywhere else."""

    items: tuple[Item, ...]
    fault: Fault | None = None


class Clear(Command, frozen=True):
    """Fill all memory with the canary."""


class Start(Command, frozen=True):
    """Send or receive `items` in order, up to `window` at a time, from the time `at`. The reply comes once the first have
    started.
    """

    direction: Direction
    peer: str
    items: tuple[Item, ...]
    window: int
    deadline_s: float
    chunk_tokens: int = 0
    fault: Fault | None = None
    at: float = 0.0


class Collect(Command, frozen=True):
    """Wait until all requests of the last `Start` have ended."""


class Check(Command, frozen=True):
    """Compare the whole pools with the reference. `kv`: the dtype in which the sending side has K and V, if it has chosen
    one.
    """

    items: tuple[Item, ...]
    kv: str | None = None


class Move(Command, frozen=True):
    """Copy blocks, all at once, with the engine alone."""

    peer: str
    blocks: tuple[Block, ...]
    timeout_s: float
    at: float = 0.0


class Raw(enum.Enum):
    """The system's mechanism below an engine's transport."""

    WRITEV = "process_vm_writev"
    SOCKET = "socket"


class Listen(Command, frozen=True):
    """Receive blocks `(address, nbytes)` of this rank's memory from plain sockets, one connection each."""

    host: str
    blocks: tuple[tuple[int, int], ...]
    timeout_s: float


class MoveRaw(Command, frozen=True):
    """`Move` without an engine: block `i` to process `pids[i]`, or to a socket as its block `numbers[i]`."""

    blocks: tuple[Block, ...]
    timeout_s: float
    pids: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    at: float = 0.0


class ReadCpu(Command, frozen=True):
    """Ask for `Cpu`."""


class Memcpy(Command, frozen=True):
    nbytes: int


class ReadHealth(Command, frozen=True):
    """Ask for `HealthReport`."""


class Exit(Command, frozen=True):
    """End the process."""


AnyCommand = (
    Describe
    | Peer
    | WaitReady
    | Fill
    | Clear
    | Start
    | Collect
    | Check
    | Move
    | MoveRaw
    | Listen
    | Memcpy
    | ReadCpu
    | ReadHealth
    | Exit
)


class Reply(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of replies."""


class Done(Reply, frozen=True):
    """The command succeeded."""


class Failed(Reply, frozen=True):
    """The command failed; the rank goes on."""

    error: str


class Description(Reply, frozen=True):
    """`rows`: of its pools, by component. `table`: its instance's layout. `arena`: address and bytes of all its pools.
    `thresholds`: packing thresholds in bytes, by origin. `process`: equal for ranks that are threads of one process.
    """

    name: str
    role: str
    rank: int
    side: str
    model: str
    num_layers: int
    rows: dict[str, int]
    device: str
    address: str
    backend: str
    transport: str
    arena: tuple[int, int]
    table: bytes
    placements: bytes
    pid: int
    process: str
    boot_id: str
    pid_namespace: str
    now: float
    versions: dict[str, str]
    thresholds: dict[str, list[int]] = {}


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one request ended on this rank. `start`: when the manager got it, `queued_s` after its arrival; `end`: when its
    event came. `phases`: seconds, from `opened_at` on (`disagg.core.timeline`).
    """

    number: int
    ok: bool
    error: str
    start: float
    end: float
    queued_s: float = 0.0
    opened_at: float = 0.0
    phases: dict[str, float] = {}


class RunReport(Reply, frozen=True):
    """`ways`: bytes by path. `posts`: descriptors for the engine. `cpu_s`: of the rank's process, from the start of
    the rank's run to its last event.
    """

    results: tuple[Result, ...]
    nbytes: int
    posts: int
    seconds: dict[str, float]
    ways: dict[str, int]
    cpu_s: float = 0.0


class Difference(Reply, frozen=True):
    """The first difference of memory from the reference, in words."""

    where: str | None


class Moved(Reply, frozen=True):
    """When the first block was submitted, and when the last one had finished."""

    start: float
    end: float


class Listening(Reply, frozen=True):
    port: int


class Copied(Reply, frozen=True):
    gbps: float


class Cpu(Reply, frozen=True):
    """CPU seconds of all threads since the process began."""

    seconds: float


class HealthReport(Reply, frozen=True):
    """`KVManager.health` in words; `problem` is empty while all is well."""

    problem: str
    peers: dict[str, str]
    quarantined: dict[str, int]


AnyReply = Done | Failed | Description | RunReport | Difference | Moved | Listening | Copied | Cpu | HealthReport
