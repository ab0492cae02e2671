"""Compiled core of disagg (`csrc/`): functions on integer columns, which let go of the GIL while they work,
but for work that is over sooner than it takes to get it back.

Arrays must be contiguous, 1-D unless said otherwise, and of exactly the type given: anything else is a `TypeError`, never
a copy. Addresses are of this process: memory must be mapped and destinations disjoint, which nothing checks here.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Ids = npt.NDArray[np.int64] | npt.NDArray[np.int32]
_Addresses = npt.NDArray[np.uint64]
_Ints = npt.NDArray[np.int64]

Fault = tuple[int, bool, int, int]
"""`(side, listed, token, row)`: the first needed token of side 0 (source) or 1 that is in no listed page, or in page `row`,
which is outside the pool. Exists for type checkers only."""

def group_concurrent_contiguous(
    source: _Ids, destination: _Ids
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Maximal runs in which both lists step by one: `(source_starts, destination_starts, lengths)`.

    A pair with a negative id is in no run; empty on either side gives no runs. Raises `ValueError` where lengths differ.
    """

class PageList:
    """One side's pages of a request: `ids[i]` is page `first_page + i` of the tokens it owns, in a pool of `num_rows`.

    The tokens owned are the intervals whose `start, stop` are in `edges`, held one behind the other in that order; or, with
    a `period` above 0, the one interval there and its repetitions every `period` tokens.
    """

    def __init__(
        self,
        ids: npt.NDArray[np.int32],
        *,
        first_page: int,
        page_size: int,
        num_rows: int,
        edges: npt.NDArray[np.int64],
        period: int,
    ) -> None: ...

def token_runs(
    start: int, stop: int, granule: int, source: PageList, destination: PageList
) -> tuple[npt.NDArray[np.int64], Fault | None]:
    """Where the positions (`granule` tokens each) of tokens `[start, stop)` that both sides own lie.

    An int64 table `[runs, 5]`, one row for each maximal run inside one page on each side, in ascending order:
    `source_row, source_offset, destination_row, destination_offset, length`, offsets and lengths in positions. With a fault
    there are no runs. Costs what there are pages and runs. Raises `ValueError` for what is no range, page size or ownership.
    """

class Span:
    """Copies of one shape: for each pair of bases, each token run, and each step of `dims`, one run of `nbytes`.

    Strides are pairs `(source, destination)` in bytes; `dims` are `(count, source_stride, destination_stride)`, outermost
    first. A token run of `n` positions is one run of `n * nbytes` where `dense`, else `n` runs, `token_strides` apart.
    Immutable. Raises `ValueError` for columns of different lengths.
    """

    def __init__(
        self,
        layers: npt.NDArray[np.int64],
        source_bases: _Addresses,
        destination_bases: _Addresses,
        *,
        row_strides: tuple[int, int],
        token_strides: tuple[int, int],
        dims: Sequence[tuple[int, int, int]],
        nbytes: int,
        dense: bool,
    ) -> None: ...

class Columns:
    """Memory of three uint64 columns that grows and is used again; by one thread at a time."""

    def __init__(self) -> None: ...
    @property
    def capacity(self) -> int:
        """Entries that there is room for."""

def expand(
    spans: Sequence[Span],
    runs: Sequence[npt.NDArray[np.int64]],
    layers: npt.NDArray[np.int64] | None,
    num_threads: int,
    out: Columns,
) -> tuple[_Addresses, _Addresses, _Addresses]:
    """The copies of `spans[i]` over the token runs `runs[i]`, in `layers` where given: `(source, destination, nbytes)`.

    In order of spans, bases, runs and dims; neighbours are joined where both sides go on. The columns are read-only views
    of `out`: they hold its memory, but its next use may change what is in it. Up to `num_threads` threads where there are
    many. Raises `ValueError` for lists of different lengths, runs that are empty, more than 2**31 copies, or `out` in use.
    """

def num_copies(spans: Sequence[Span], runs: Sequence[npt.NDArray[np.int64]], layers: npt.NDArray[np.int64] | None) -> int:
    """How many copies `expand` would give, but for neighbours in different layers or spans, which it joins."""

class Stream:
    """One side's bytes of a request, in an order that both sides know: spans, layers, token runs and dims, as in `expand`.

    Holds one layer's pieces of each shape, joined where they touch on this side, and never a list of all. Memory must be
    mapped, and nothing may overlap the staging: nothing checks that here.
    """

    def __init__(self, *, source: bool) -> None: ...
    @property
    def total(self) -> int:
        """Bytes of the stream."""

    @property
    def num_pieces(self) -> int:
        """Copies that gathering or scattering all of it takes, not counting those that cuts add."""

    def append(
        self, spans: Sequence[Span], runs: Sequence[npt.NDArray[np.int64]], layers: npt.NDArray[np.int64] | None
    ) -> None:
        """Add `spans[i]` over the token runs `runs[i]`, in `layers` where given. By one thread, before the stream is used.

        Raises `ValueError` as `expand` does, with nothing added.
        """

    def gather(self, offset: int, nbytes: int, staging_address: int, num_threads: int = 1) -> None:
        """Copy the stream's bytes `[offset, offset + nbytes)` to `staging_address` on; up to `num_threads` threads.

        Raises `IndexError` where the stream does not have them, with nothing copied.
        """

    def scatter(self, offset: int, nbytes: int, staging_address: int, num_threads: int = 1) -> None:
        """Copy what lies from `staging_address` on to the stream's bytes `[offset, offset + nbytes)`.

        Many bytes are written past the caches, but for short pieces. Raises as `gather` does.
        """

    def copies(self, offset: int, nbytes: int, staging_address: int) -> tuple[_Addresses, _Addresses, _Addresses]:
        """The copies that `gather` or `scatter` would make, in order: `(source, destination, nbytes)`; one for each piece, or
        for the part of it that is in the range. Raises as `gather` does.
        """

class Regions:
    """Regions of memory `[starts[k], stops[k])`, on the devices of these numbers; `starts` ascend. Immutable."""

    def __init__(self, starts: _Addresses, stops: _Addresses, devices: _Addresses) -> None: ...
    def locate(self, addresses: _Addresses, nbytes: _Addresses, out: npt.NDArray[np.int64]) -> int:
        """Write to `out` which region holds each of `[addresses[i], + nbytes[i])` whole.

        Returns how many come before the first that no region holds: from there on nothing is written. Raises `ValueError`
        for columns of different lengths.
        """

    def describe(self, addresses: _Addresses, nbytes: _Addresses, out: _Addresses) -> int:
        """As `locate`, but `out` is `[ranges, 3]` and gets `address, length, device number`."""

    def count_held(self, addresses: _Addresses, nbytes: _Addresses) -> int:
        """How many ranges come before the first that no region holds whole. Raises as `locate` does."""

    def place_blocks(
        self,
        addresses: _Addresses,
        nbytes: _Addresses,
        block: int,
        per_list: int,
        firsts: _Addresses,
        lists: npt.NDArray[np.int32],
        indices: npt.NDArray[np.int32],
    ) -> int:
        """Whether each of `[addresses[i], + nbytes[i])` is one of the blocks of `block` bytes that the regions are cut into,
        from their starts on, and which are counted from `firsts[k]` in region `k`.

        If so, the block's number divided by `per_list` goes to `lists` and the rest to `indices`, and the highest of `lists`
        comes back; -1 if not, and both are undefined. Raises `ValueError` for columns of different lengths, a `block` of 0, a
        `per_list` that is not in 1 to 2**31 - 1, and more lists than an int32 counts.
        """

def total_nbytes(nbytes: _Addresses) -> int:
    """The sum, modulo 2**64."""

def copy_batch(source: _Addresses, destination: _Addresses, nbytes: _Addresses, num_threads: int = 1) -> int:
    """Copy `nbytes[i]` bytes from address `source[i]` to address `destination[i]`; returns the bytes copied.

    Up to `num_threads` threads share the bytes evenly; small batches take fewer. Raises `ValueError` for columns of
    different lengths, a sum of 2**64 and more, or `num_threads` below 1, with nothing copied.
    """

def copy_between_processes(
    pid: int, local: _Addresses, remote: _Addresses, nbytes: _Addresses, *, write: bool, num_threads: int = 1
) -> int:
    """Copy `nbytes[i]` bytes between address `local[i]` of this process and `remote[i]` of process `pid` of this machine, both
    of host memory: to it, or from it.

    Returns 0 or the system's error number (3: no such process; 14: memory that is not mapped), with any part copied; in either
    case nothing is under way any more. Raises `ValueError` for columns of different lengths, a sum of 2**64 and more, or
    `num_threads` below 1, with nothing copied.
    """

def digest(
    layers: npt.NDArray[np.int64],
    bases: _Addresses,
    runs: npt.NDArray[np.int64],
    axes: Sequence[tuple[int, int, int]],
    *,
    row_stride: int,
    token_stride: int,
    itemsize: int,
    seed: int,
    num_threads: int = 1,
    by_layer: _Addresses | None = None,
    by_row: _Addresses | None = None,
) -> int:
    """The sum modulo 2**64 of every element of a box times one odd weight for each of its global coordinates.

    `layers[i]` begins at address `bases[i]`, offsets of the box included. `runs` is a table as of `token_runs`: source row
    and offset say where positions lie, `destination_offset` is the first one's global number (against a `PageList` of one
    page that holds everything, `token_runs` gives just that). `axes` are `(count, stride, global start)`, in bytes, in an
    order that both sides agree on: an axis is known by its place. An element is its bytes as a little-endian integer; one of
    8 bytes is two. `seed`: the same for the same component and role only. Equal content gives equal sums wherever it lies;
    sums of disjoint boxes add up. What layer `i` and destination row `j` contribute is added to `by_layer[i]` and `by_row[j]`.
    Raises `ValueError` for columns of different lengths, empty runs, a layer or row without its place, another `itemsize`
    than 1, 2, 4 or 8, or more than 2**48 bytes; then nothing was added.
    """

class SpanSizes:
    """How much one position of each span class moves: runs of bytes in one position (or token run, where `dense`), their
    length, pairs of bases.
    """

    def __init__(self, steps: _Addresses, nbytes: _Addresses, num_bases: _Addresses, dense: npt.NDArray[np.bool_]) -> None: ...

class WorkList:
    """A request over span classes, in parts: the number of a class, those of its bases (`None`: all), and token runs.

    Raises `ValueError` for a span class that there is not, a run without a position, or 2**64 bytes.
    """

    def __init__(self, sizes: SpanSizes, parts: Sequence[tuple[int, _Ints | None, _Ints]]) -> None: ...
    @property
    def num_pieces(self) -> int: ...
    @property
    def total_nbytes(self) -> int: ...
    @property
    def num_words(self) -> int:
        """Words of 8 bytes that `encode` writes, at most."""

    def encode(self, at: _Ints, tile: int, out: _Addresses) -> int:
        """Write it as the kernel reads it, in tiles of `tile` bytes; `at` are the words at which span classes begin.

        Returns the bytes written. Raises `ValueError` where `out` or `at` is too short, or for more pieces of a layer, or
        tiles, than the kernel counts.
        """

    def tiles(self, low: int, high: int) -> tuple[int, int]:
        """The tiles `[first, end)` that hold bytes `[low, high)` of the stream. Raises `ValueError` where it has none of
        them, or was not encoded.
        """

class CudaQueue:
    """What starting a kernel takes of the CUDA driver, in one call. Handles are the driver's, as numbers.

    Each method gives the driver's call that was made last and its status: 0 where all went well.
    """

    def __init__(self, library: str, context: int, stream: int, uploads: int, *, holds_gil: bool = False) -> None:
        """For one stream of a context, and another for uploads. `holds_gil`: its calls do not let go of it. Raises
        `RuntimeError` where `library` is no CUDA driver.
        """

    def upload(self, device: int, host: int, nbytes: int, uploaded: int) -> tuple[str | None, int]:
        """Copy `nbytes` bytes from address `host` to address `device`, on the stream for uploads; what is launched next waits
        for that, by the event `uploaded`.
        """

    def launch(
        self, kernel: int, arguments: Sequence[int], blocks: int, threads: int, shared: int, done: int
    ) -> tuple[str | None, int]:
        """Start a kernel whose parameters are all words of 64 bits, with `shared` bytes of shared memory for each block, and
        record the event `done` behind it (0: none).
        """

    def query(self, event: int) -> tuple[str | None, int]:
        """The status is that of the event: 0 where all before it is done, 600 where it is not, an error otherwise."""

def is_readable(descriptor: int) -> bool:
    """Whether a descriptor is readable, or over. Keeps the interpreter."""

def send(socket: int, packet: bytes) -> None:
    """Send a packet at once, keeping the interpreter. Raises `OSError` where that cannot be, and `BlockingIOError` for want of
    room.
    """

class Flag:
    """Set once, by any thread."""

    def __init__(self) -> None: ...
    def set(self) -> None: ...
    def yield_to_waiter(self) -> None:
        """Let whoever lingers for it, once it is set, have the interpreter first, as far as that is taken within 20 us."""

    def busy_poll(self, seconds: float) -> bool:
        """Wait for it for so long, without sleeping; other threads have the interpreter meanwhile. Whether it is set."""

class CudaEvent:
    """An event that is recorded on a queue's stream."""

    def __init__(self, queue: CudaQueue, event: int) -> None: ...

class CompletionWord:
    """A word of memory that another process may write, and the value that it is to have. `board` is uint64 `[words]`, and is
    kept; it may be read-only. Raises `IndexError` where it has no word `index`.
    """

    def __init__(self, board: npt.NDArray[np.uint64], index: int, value: int) -> None: ...
    def is_set(self) -> bool:
        """Whether the word has that value."""

class CompletionSignal:
    """A sign, and the word of `board` that is given `value` once the sign shows; one of what has failed gives none."""

    def __init__(self, sign: Flag | CudaEvent, board: npt.NDArray[np.uint64], index: int, value: int) -> None: ...
    def signal(self) -> None:
        """Give the word its value now."""

Completion = Flag | CudaEvent | CompletionWord | CompletionSignal
"""What can be asked for without the interpreter. Exists for type checkers only."""

def enlist_thread() -> None:
    """The calling thread is one of this library from now on: others give way to it."""

def busy_poll(seconds: float, descriptors: npt.NDArray[np.int32] | None = None, signs: list[Completion] = ...) -> bool:
    """In a thread of this library, which has work when this returns: wait for so long without sleeping, as waking up takes
    longer, or until a descriptor is readable or over, a flag is set, the work before an event is over, or a word has its value;
    notices are given meanwhile. Other threads have the interpreter. Whether one of these is so.
    """

def sleep(seconds: float, descriptors: npt.NDArray[np.int32] | None = None) -> None:
    """As `linger`, sleeping: for so long, an hour at most, or until a descriptor is readable or over."""

class Alarm:
    """What a thread of this library sleeps for, as in `sleep`, until another one has it wake up."""

    def __init__(self) -> None: ...
    def set(self) -> None:
        """Have the one that waits, or waits next, wake up."""

    def wait(self, seconds: float) -> bool:
        """Sleep for so long, an hour at most, or until it is set, which it is no more then; whether it was."""

def yield_gil() -> None:
    """In any other thread: let those of this library that have work have the interpreter until all of them wait again, for
    100 us, and not again in 200.
    """
