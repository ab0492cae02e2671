"""What a driver says to a resident rank, and what it answers: MessagePack of tagged types, one reply per command.

Times are `time.monotonic()` of the rank's machine, in seconds; `Description.now` and `boot_id` let a driver compare them.
"""

from __future__ import annotations

import enum

import msgspec


class Fault(enum.Enum):
    """A deliberate mistake of a sending rank, to see that it is found."""

    BYTE = "byte"
    """One byte of a request is wrong in the rank's memory."""
    PAGES = "pages"
    """A request's first two pages are sent in each other's place."""
    KILL = "kill"
    """The process ends by SIGKILL once a run has begun."""


class Direction(enum.Enum):
    SEND = "send"
    RECEIVE = "receive"


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request as one rank has it. `needs` says, by component, which of its `tokens` this rank's memory must hold;
    `rows` are its pages, from the page that holds token `needs[0]` on, or its one slot or ring. `group` is the peer's
    (receiving); `request_id` is another one in every run.
    """

    number: int
    tokens: int
    needs: dict[str, tuple[int, int]]
    rows: dict[str, tuple[int, ...]]
    group: int = 0
    request_id: bytes = b""


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`nbytes` contiguous bytes, from an offset in this rank's arena to an address of rank `rank` of the peer."""

    rank: int
    source_offset: int
    destination: int
    nbytes: int


class Command(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of commands."""


class Describe(Command, frozen=True):
    """Who are you?"""


class Peer(Command, frozen=True):
    """Know a peer instance by its leader's control address."""

    name: str
    address: str


class WaitReady(Command, frozen=True):
    """Wait until every rank of the peer is ready."""

    name: str
    timeout_s: float


class Fill(Command, frozen=True):
    """Canary everywhere, but all that `items` have here, as the reference has it."""

    items: tuple[Item, ...]
    fault: Fault | None = None


class Clear(Command, frozen=True):
    """Canary everywhere."""


class Start(Command, frozen=True):
    """Begin to send or receive `items` in order, at most `window` at a time; answered once the first ones are on their way.

    A sender sends chunks of `chunk_tokens` tokens, or all at once where it is 0. Nothing begins before `at`, so that
    several ranks begin together.
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
    """Wait for the end of what `Start` began."""


class Check(Command, frozen=True):
    """Compare the whole pools with the reference: `items` in their places, canary everywhere else."""

    items: tuple[Item, ...]


class Move(Command, frozen=True):
    """Copy blocks to ranks of `peer`, all at once, by the engine alone, not before `at`."""

    peer: str
    blocks: tuple[Block, ...]
    timeout_s: float
    at: float = 0.0


class Raw(enum.Enum):
    """What an engine's transport rests on."""

    WRITEV = "process_vm_writev"
    SOCKET = "socket"


class Listen(Command, frozen=True):
    """Take blocks `(address, nbytes)` of this rank's memory from plain sockets, a connection each."""

    host: str
    blocks: tuple[tuple[int, int], ...]
    timeout_s: float


class MoveRaw(Command, frozen=True):
    """As `Move`, without an engine: block `i` to process `pids[i]`, or as number `numbers[i]` to a socket."""

    blocks: tuple[Block, ...]
    timeout_s: float
    pids: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    at: float = 0.0


class AskCpu(Command, frozen=True):
    """How much has the process computed?"""


class Memcpy(Command, frozen=True):
    """Copy `nbytes` within this rank's memory, by one thread."""

    nbytes: int


class AskHealth(Command, frozen=True):
    """How are you?"""


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
    | AskCpu
    | AskHealth
    | Exit
)


class Reply(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of replies."""


class Done(Reply, frozen=True):
    """It is done."""


class Failed(Reply, frozen=True):
    """The command failed, and the rank goes on."""

    error: str


class Description(Reply, frozen=True):
    """A rank. `rows` are those of its pools by component, `table` its instance's layout table, `placements` say where its
    rows lie; the arena is the memory of all its pools. `thresholds` say below which size pieces travel packed to each rank
    that is connected, by whence that is known.
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
    boot_id: str
    now: float
    versions: dict[str, str]
    thresholds: dict[str, list[int]] = {}


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one request ended here. `start`: when it was handed to the manager; `end`: when its event came."""

    number: int
    ok: bool
    error: str
    start: float
    end: float


class RunReport(Reply, frozen=True):
    """What became of a run: one result per request, and what the manager has counted meanwhile: `ways` are bytes by way,
    `posts` what the engine was given.
    """

    results: tuple[Result, ...]
    nbytes: int
    posts: int
    seconds: dict[str, float]
    ways: dict[str, int]


class Difference(Reply, frozen=True):
    """Where memory first differs from the reference, in words; `None` where it does not."""

    where: str | None


class Moved(Reply, frozen=True):
    """When the first block was posted, and when the last one had ended."""

    start: float
    end: float


class Listening(Reply, frozen=True):
    """Where blocks are awaited."""

    port: int


class Copied(Reply, frozen=True):
    """How fast a copy in memory was, in GB/s (1e9)."""

    gbps: float


class Cpu(Reply, frozen=True):
    """What all threads of the process have computed since it began, in seconds."""

    seconds: float


class HealthReport(Reply, frozen=True):
    """What `KVManager.health` says, in words; `problem` is empty while all is well."""

    problem: str
    peers: dict[str, str]
    quarantined: dict[str, int]


AnyReply = Done | Failed | Description | RunReport | Difference | Moved | Listening | Copied | Cpu | HealthReport
