"""The compiled core of disagg (`csrc/`): functions on integer columns.

Functions release the GIL while they work, except for work that takes less time than taking the GIL back.

Arrays must be contiguous, 1-D unless documented otherwise, and of exactly the type given: anything else raises `TypeError`;
nothing is converted. Addresses belong to this process. Memory must be mapped and destinations disjoint, which is not checked.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Ids = npt.NDArray[np.int64] | npt.NDArray[np.int32]
_Addresses = npt.NDArray[np.uint64]
_Ints = npt.NDArray[np.int64]

Fault = tuple[int, bool, int, int]
"""`(side, listed, token, row)`: the first needed token of side 0 (source) or 1 (destination) that has no page in the list or,
where `listed`, whose page `row` is outside the pool. For type checkers only.
"""

def group_concurrent_contiguous(
    source: _Ids, destination: _Ids
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Maximal runs in which both lists step by one: `(source_starts, destination_starts, lengths)`.

    Pairs with a negative id belong to no run. If either side is empty there are no runs. Raises `ValueError` if the lengths of
    two non-empty lists differ.
    """

class PageList:
    """One side's pages of a request: `ids[i]` is page `first_page + i` of the tokens it owns, in a pool of `num_rows`.

    `edges` are pairs `start, stop` of the intervals of tokens that the side owns, in the order in which it holds them. With a
    `period` above 0 there is one interval, which repeats every `period` tokens.
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
    """The positions (`granule` tokens each) of tokens `[start, stop)` that both sides own, as runs.

    Returns an int64 table `[runs, 5]` with one row for each maximal run inside one page on each side, in ascending order:
    `source_row, source_offset, destination_row, destination_offset, length`, offsets and lengths in positions. With a fault the
    table is empty. Takes time in proportion to the number of pages and runs. Raises `ValueError` for an invalid range, page
    size or ownership.
    """

class Span:
    """Copies of one shape: one run of `nbytes` for each pair of bases, each token run, and each step of `dims`.

    Strides are pairs `(source, destination)` in bytes; `dims` are `(count, source_stride, destination_stride)`, outermost
    first. A token run of `n` positions is one run of `n * nbytes` if `dense`; otherwise it is `n` runs, `token_strides` apart.
    With `formats`, a stream of the source converts: `(source dtype, destination dtype, rounding)`, as in `disagg.core.formats`.
    `nbytes` and `dense` are then those of the destination, and each layer has a scale in `scales`, by which numbers are divided
    on their way into a format of 8 bits, and multiplied on their way out of one. Immutable. Raises `ValueError` for columns of
    different lengths, formats without a rule between them, and `nbytes` that are not whole elements.
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
        formats: tuple[str, str, str] | None = None,
        scales: Sequence[float] = (),
    ) -> None: ...

class Columns:
    """Growing, reusable memory of three uint64 columns. One thread at a time may fill it."""

    def __init__(self) -> None: ...
    @property
    def capacity(self) -> int:
        """The number of entries that fit without growth."""

def expand(
    spans: Sequence[Span],
    runs: Sequence[npt.NDArray[np.int64]],
    layers: npt.NDArray[np.int64] | None,
    num_threads: int,
    out: Columns,
) -> tuple[_Addresses, _Addresses, _Addresses]:
    """The copies of `spans[i]` over the token runs `runs[i]`: `(source, destination, nbytes)`.

    If `layers` is given, includes only these layers. Copies are ordered by spans, bases, runs and dims; those that are adjacent
    on both sides are joined. The columns are read-only views of `out`: they keep its memory alive, but its next use may change
    their content. Large batches use up to `num_threads` threads. Raises `ValueError` for lists of different lengths, empty
    runs, more than 2**31 copies, or while another thread fills `out`.
    """

def num_copies(spans: Sequence[Span], runs: Sequence[npt.NDArray[np.int64]], layers: npt.NDArray[np.int64] | None) -> int:
    """The number of copies that `expand` would give if it did not join copies of different layers or spans."""

class Stream:
    """One side's bytes of a request, in an order that both sides know: spans, layers, token runs and dims, as in `expand`.

    Holds the pieces of one layer for each shape, joined if they are adjacent on this side, and never a list of all pieces.
    Memory must be mapped, and nothing may overlap the staging, which is not checked.
    """

    def __init__(self, *, source: bool) -> None: ...
    @property
    def total(self) -> int:
        """The number of bytes of the stream."""

    @property
    def num_pieces(self) -> int:
        """The number of copies that one pass over the whole stream makes. Passes over parts of it make more."""

    @property
    def converts(self) -> bool:
        """Whether `gather` converts any of it."""

    def append(
        self, spans: Sequence[Span], runs: Sequence[npt.NDArray[np.int64]], layers: npt.NDArray[np.int64] | None
    ) -> None:
        """Add `spans[i]` over the token runs `runs[i]`, in `layers` if given.

        Call it from one thread, before the stream is used. Raises `ValueError` like `expand`, with nothing added.
        """

    def gather(self, offset: int, nbytes: int, staging_address: int, num_threads: int = 1) -> None:
        """Copy bytes `[offset, offset + nbytes)` of the stream to `staging_address`, on up to `num_threads` threads. Spans with
        formats are converted.

        Raises `IndexError`, with nothing copied, if the stream is too short.
        """

    def scatter(self, offset: int, nbytes: int, staging_address: int, num_threads: int = 1) -> None:
        """Copy `nbytes` bytes from `staging_address` to bytes `[offset, offset + nbytes)` of the stream.

        Stores of large copies bypass the caches, except those of short pieces. Raises like `gather`.
        """

    def copies(self, offset: int, nbytes: int, staging_address: int) -> tuple[_Addresses, _Addresses, _Addresses]:
        """The copies that `gather` or `scatter` would make, in order: `(source, destination, nbytes)`.

        There is one for each piece or part of a piece in the range. Raises like `gather`, and `ValueError` if the stream
        converts.
        """

class Regions:
    """Regions of memory `[starts[k], stops[k])` on device number `devices[k]`; `starts` ascend. Immutable."""

    def __init__(self, starts: _Addresses, stops: _Addresses, devices: _Addresses) -> None: ...
    def locate(self, addresses: _Addresses, nbytes: _Addresses, out: npt.NDArray[np.int64]) -> int:
        """Write to `out` the index of the region that contains each range `[addresses[i], addresses[i] + nbytes[i])`.

        Returns the number of ranges before the first that no region contains; nothing is written from there on. Raises
        `ValueError` for columns of different lengths.
        """

    def describe(self, addresses: _Addresses, nbytes: _Addresses, out: _Addresses) -> int:
        """Like `locate`, but `out` is `[ranges, 3]` and gets `address, length, device number`."""

    def count_held(self, addresses: _Addresses, nbytes: _Addresses) -> int:
        """The number of ranges before the first that no region contains. Raises like `locate`."""

def total_nbytes(nbytes: _Addresses) -> int:
    """The sum, modulo 2**64."""

def copy_batch(source: _Addresses, destination: _Addresses, nbytes: _Addresses, num_threads: int = 1) -> int:
    """Copy `nbytes[i]` bytes from address `source[i]` to address `destination[i]`; returns the number of bytes copied.

    Up to `num_threads` threads share the bytes evenly; small batches use fewer. Raises `ValueError`, with nothing copied, for
    columns of different lengths, a sum of 2**64 and more, or `num_threads` below 1.
    """

def copy_between_processes(
    pid: int, local: _Addresses, remote: _Addresses, nbytes: _Addresses, *, write: bool, num_threads: int = 1
) -> int:
    """Copy `nbytes[i]` bytes from address `local[i]` of this process to `remote[i]` of process `pid`, or back.

    Copies back unless `write`. Both are host memory of this machine. Returns 0 or the system's error number (3: no such
    process; 14: memory that is not mapped). After an error any part may have been copied; in either case no copy is still
    running. Raises `ValueError`, with nothing copied, for columns of different lengths, a sum of 2**64 and more, or
    `num_threads` below 1.
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

    `bases[i]` is the address of the box in layer `layers[i]`. `runs` is a table like that of `token_runs`: positions lie at the
    source row and offset, and `destination_offset` is the first position's global number. (`token_runs` gives such a table for
    a destination `PageList` of one page that holds everything.) `axes` are `(count, stride, global start)`, strides in bytes,
    in an order on which both sides agree: the index in the list identifies an axis. An element is its bytes as a little-endian
    integer; one of 8 bytes is two. Use one `seed` for each component and role.

    Equal content gives equal sums, whatever its layout in memory. Sums of disjoint boxes add up. Adds the parts of layer `i`
    and destination row `j` to `by_layer[i]` and `by_row[j]`. Raises `ValueError`, with nothing added, for columns of different
    lengths, empty runs, a layer or row without an entry in these, an `itemsize` other than 1, 2, 4 or 8, or more than 2**48
    bytes.
    """

class SpanSizes:
    """How much one position of each span class moves.

    The columns are the number of byte runs in one position (or in one token run, where `dense`), their length, and the number
    of pairs of bases.
    """

    def __init__(self, steps: _Addresses, nbytes: _Addresses, num_bases: _Addresses, dense: npt.NDArray[np.bool_]) -> None: ...

class WorkList:
    """A request over span classes, in parts: the index of a class, the indices of its bases (`None`: all), and token runs.

    Raises `ValueError` for an unknown span class, a run without positions, or 2**64 bytes and more.
    """

    def __init__(self, sizes: SpanSizes, parts: Sequence[tuple[int, _Ints | None, _Ints]]) -> None: ...
    @property
    def num_pieces(self) -> int: ...
    @property
    def total_nbytes(self) -> int: ...
    @property
    def num_words(self) -> int:
        """The most words of 8 bytes that `encode` writes."""

    def encode(self, at: _Ints, tile: int, out: _Addresses) -> int:
        """Write the list as the kernel reads it, in tiles of `tile` bytes; span class `i` begins at word `at[i]`.

        Returns the number of bytes written. Raises `ValueError` if `out` or `at` is too short, or if there are more pieces of a
        layer, or more tiles, than the kernel can count.
        """

    def tiles(self, low: int, high: int) -> tuple[int, int]:
        """The tiles `[first, end)` that hold bytes `[low, high)` of the stream.

        Raises `ValueError` if the list has not been encoded, or for an empty range or one outside the stream.
        """

class CudaQueue:
    """Work for one stream of a CUDA context. Each method is one call; handles are the driver's, as integers.

    Each method returns the driver call that failed (None if none did) and its status (0 for success).
    """

    def __init__(self, library: str, context: int, stream: int, uploads: int, *, holds_gil: bool = False) -> None:
        """A queue for `stream`, which uploads on the stream `uploads`. With `holds_gil` its calls do not release the GIL.

        Raises `RuntimeError` if `library` is not a CUDA driver.
        """

    def upload(self, device: int, host: int, nbytes: int, uploaded: int) -> tuple[str | None, int]:
        """Copy `nbytes` bytes from address `host` to address `device` on the upload stream.

        Later launches wait for the copy by the event `uploaded`.
        """

    def launch(
        self, kernel: int, arguments: Sequence[int], blocks: int, threads: int, shared: int, done: int
    ) -> tuple[str | None, int]:
        """Launch a kernel whose parameters are all 64-bit words, and record the event `done` behind it (0: none).

        `shared` is the number of bytes of shared memory for each block.
        """

    def query(self, event: int) -> tuple[str | None, int]:
        """The status of the event: 0 if all work before it is done, 600 if it is not, otherwise an error."""

def is_readable(descriptor: int) -> bool:
    """Whether a descriptor is readable or closed by its peer. Holds the GIL."""

class Flag:
    """A flag that any thread may set, once."""

    def __init__(self) -> None: ...
    def set(self) -> None: ...
    def yield_to_waiter(self) -> None:
        """Let the threads that busy-poll the flag take the GIL first, once it is set. Waits at most 20 us for them."""

    def busy_poll(self, seconds: float) -> bool:
        """Wait up to `seconds` for the flag, without sleeping and without the GIL. Returns whether it is set."""

class CudaEvent:
    """An event that is recorded on a queue's stream. Raises `TypeError` if `queue` is not a `CudaQueue`."""

    def __init__(self, queue: CudaQueue, event: int) -> None: ...

Completion = Flag | CudaEvent
"""What `busy_poll` can wait for. For type checkers only."""

def enlist_thread() -> None:
    """Register the calling thread as one of this library: other threads yield the GIL to it while it has work.

    Includes `allow_calls_during_capture`.
    """

def allow_calls_during_capture() -> None:
    """Let the calling thread use the CUDA driver while another thread captures a CUDA graph.

    Otherwise the driver refuses calls such as `cuEventQuery`, and the capture fails. Does nothing if the process has not
    loaded the driver.
    """

def busy_poll(seconds: float, descriptors: npt.NDArray[np.int32] | None = None, completions: list[Completion] = ...) -> bool:
    """Wait up to `seconds` for work in a thread of this library, without sleeping and without the GIL.

    Ends when a descriptor is readable or closed by its peer, or something has completed: a flag is set, or the work before an
    event is done or has failed. Returns whether any of this happened.
    """

def sleep(seconds: float) -> None:
    """Sleep up to `seconds`, at most an hour."""

class Alarm:
    """Wakes a thread of this library that sleeps in `wait`. From `set` on, that thread counts as one that has work."""

    def __init__(self) -> None: ...
    def fileno(self) -> int:
        """A descriptor that is readable while the alarm is set."""

    def set(self) -> None:
        """Wake the thread that waits, or the next one to wait."""

    def clear(self) -> bool:
        """Take back what was set. Returns whether it was set."""

    def wait(self, seconds: float, descriptors: npt.NDArray[np.int32] | None = None) -> bool:
        """Sleep up to `seconds`, at most an hour, until the alarm is set, or a descriptor is readable or closed by its peer.
        Returns whether the alarm was set, and clears it.
        """

def yield_gil(*, always: bool = False) -> None:
    """Release the GIL until all threads of this library wait, for up to 1 ms. For threads that are not registered.

    Unless `always`, it does nothing for as long after that as it took, so that at least half of the time remains the caller's.
    """
