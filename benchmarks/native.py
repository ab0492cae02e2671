"""The speed of the compiled core on this machine: `python -m benchmarks.native`. Takes half a minute and prints a table.

Times are medians. Compared functions take turns, so that a busy machine slows all of them: a figure beside `memcpy` or `copy`
is from the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle

import numpy as np
import numpy.typing as npt

from disagg.core import _native
from disagg.core.copies import Columns
from disagg.core.rows import Pages
from disagg.layout.binding import Stream, bind, bind_rows
from disagg.layout.ownership import EVERYTHING
from disagg.layout.plan import ComponentPlan, RowSpace, SpanClass
from disagg.state.align import group_concurrent_contiguous
from harness.reference_core import bind_numpy

Addresses = npt.NDArray[np.uint64]
POOL_NBYTES = 1 << 29
RNG = np.random.default_rng(0)


def medians_s(*functions: Callable[[], object], rounds: int = 15) -> list[float]:
    """The median time of each function. The functions take turns."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, found in zip(functions, times, strict=True):
            started = time.perf_counter()
            function()
            found.append(time.perf_counter() - started)
    return [sorted(found)[rounds // 2] for found in times]


def head_plan(*, page_size: int, num_layers: int, num_pages: int) -> ComponentPlan:
    """K and V of one of the source's two heads of 256 bytes: TP 4 to TP 8 with 8 heads."""
    nbytes = 256

    def bases(start: int) -> Addresses:
        return np.uint64(start) + np.arange(num_layers, dtype=np.uint64) * np.uint64(1 << 30)

    spans = tuple(
        SpanClass(
            layers=np.arange(num_layers),
            source_bases=bases(1 << 40 + number),
            destination_bases=bases(1 << 50 + number),
            row_strides=(page_size * nbytes * 2, page_size * nbytes),
            token_strides=(nbytes * 2, nbytes),
            granule=1,
            dims=(),
            nbytes=nbytes,
            dense=False,
        )
        for number in range(2)
    )
    space = RowSpace(page_size, num_pages, EVERYTHING)
    return ComponentPlan("kv", space, space, spans)


def bind_table() -> None:
    print("bind: K and V of one head, 36 layers, pages of 64 in random order, reused buffers")
    plan, out = head_plan(page_size=64, num_layers=36, num_pages=4096), Columns()
    for num_tokens in (1024, 4096, 16384, 65536):
        source, destination = (Pages(RNG.permutation(4096)[: num_tokens // 64]) for _ in range(2))

        def run(num_threads: int, tokens: tuple[int, int], rows: tuple[Pages, Pages]) -> object:
            return bind(plan, source=rows[0], destination=rows[1], tokens=tokens, out=out, num_threads=num_threads)

        def stream(tokens: tuple[int, int], rows: tuple[Pages, Pages]) -> None:
            bind_rows(plan, source=rows[0], destination=rows[1], tokens=tokens).append_to(Stream(source=True))

        tokens, rows = (0, num_tokens), (source, destination)
        count = 2 * 36 * num_tokens
        words = np.zeros(3 * count, dtype=np.uint64)
        copy = np.zeros_like(words)
        found = medians_s(
            lambda: run(1, tokens, rows),  # noqa: B023 - called within the iteration
            lambda: run(2, tokens, rows),  # noqa: B023
            lambda: np.copyto(copy, words),  # noqa: B023
            lambda: stream(tokens, rows),  # noqa: B023
        )
        (in_numpy,) = medians_s(
            lambda: bind_numpy(plan, source=source, destination=destination, tokens=tokens),  # noqa: B023
            rounds=3,
        )
        print(
            f"  {num_tokens:6} tokens {count:9,} descriptors  {found[0] * 1e3:7.3f} ms = {found[0] / count * 1e9:5.2f} ns each"
            f"   two threads {found[1] * 1e3:7.3f} ms   memcpy of the columns {found[2] * 1e3:7.3f} ms"
            f"   NumPy {in_numpy * 1e3:8.2f} ms   as a stream {found[3] * 1e3:7.3f} ms"
        )


def pack_table() -> None:
    print("pack: random pieces of a pool of 512 MiB, GB/s (1e9)")
    pool = np.ones(POOL_NBYTES, dtype=np.uint8)
    for total in (1 << 18, 1 << 25):
        staging, other = (np.ones(total, dtype=np.uint8) for _ in range(2))
        for piece in (64, 256, 512, 1024, 4096, 16384, 65536):
            streams = cycle([streams_of(pool, piece=piece, count=total // piece) for _ in range(8)])
            where = staging.ctypes.data
            found = medians_s(
                lambda: next(streams)[0].gather(0, total, where),  # noqa: B023
                lambda: next(streams)[1].scatter(0, total, where),  # noqa: B023
                lambda: next(streams)[0].gather(0, total, where, 2),  # noqa: B023
                lambda: next(streams)[1].scatter(0, total, where, 2),  # noqa: B023
                lambda: np.copyto(other, staging),  # noqa: B023
                rounds=9,
            )
            names = ("gather", "scatter", "gather, two threads", "scatter, two threads", "memcpy")
            rates = "   ".join(f"{name} {total / s / 1e9:5.1f}" for name, s in zip(names, found, strict=True))
            print(f"  {total >> 10:6} KiB in pieces of {piece:6}: {rates}")


def streams_of(pool: npt.NDArray[np.uint8], *, piece: int, count: int) -> tuple[Stream, Stream]:
    """Streams from and to `count` disjoint pieces of the pool, in random order."""
    numbers = RNG.permutation(POOL_NBYTES // piece - 1)[:count]
    runs = np.stack((numbers, 0 * numbers, numbers, 0 * numbers, 0 * numbers + 1), axis=1)
    base = np.array([pool.ctypes.data], dtype=np.uint64)
    span = _native.Span(
        np.zeros(1, np.int64),
        base,
        base,
        row_strides=(piece, piece),
        token_strides=(piece, piece),
        dims=(),
        nbytes=piece,
        dense=True,
    )
    made = Stream(source=True), Stream(source=False)
    for stream in made:
        stream.append([span], [runs], None)
    return made


def group_table() -> None:
    print("group_concurrent_contiguous, compared with copying its input and output")
    for size in (16_384, 1_000_000):
        for dtype in (np.int64, np.int32):
            for run in (1, 4, 16, 1000):
                source, destination = (index_runs(size, run).astype(dtype) for _ in range(2))
                columns = (source, destination, *group_concurrent_contiguous(source, destination))
                group, copy = medians_s(
                    lambda: group_concurrent_contiguous(source, destination),  # noqa: B023
                    lambda: [column.copy() for column in columns],  # noqa: B023
                )
                print(
                    f"  {size:9,} {dtype.__name__} in runs of {run:4}: {group * 1e6:8.1f} us"
                    f"   copy {copy * 1e6:8.1f} us   ratio {group / copy:4.2f}"
                )


def index_runs(size: int, run: int) -> npt.NDArray[np.int64]:
    starts = RNG.permutation(size // run) * (run + 1)
    return (starts[:, None] + np.arange(run)).ravel()


def digest_table() -> None:
    print("digest: pages of 16 tokens, 8 heads, in random order, one core, GB/s (1e9)")
    num_pages, num_layers = 256, 8
    everything = {"first_page": 0, "edges": np.array([0, 1]), "period": 1}
    order = RNG.permutation(num_pages).astype(np.int32)
    listed = _native.PageList(order, page_size=16, num_rows=num_pages, **everything)  # type: ignore[arg-type]
    globally = _native.PageList(np.zeros(1, np.int32), page_size=1 << 40, num_rows=1, **everything)  # type: ignore[arg-type]
    runs, _ = _native.token_runs(0, num_pages * 16, 1, listed, globally)
    for itemsize in (1, 2, 4, 8):
        token = 8 * 128 * itemsize
        pool = RNG.integers(0, 256, (num_layers, num_pages * 16 * token), dtype=np.uint8)
        bases = np.uint64(pool.ctypes.data) + np.arange(num_layers, dtype=np.uint64) * np.uint64(pool.strides[0])

        def run(name: str, axes: list[tuple[int, int, int]]) -> Iterator[str]:
            one, two = medians_s(
                *(
                    lambda threads=threads: _native.digest(
                        np.arange(num_layers),
                        bases,  # noqa: B023
                        runs,
                        axes,
                        row_stride=16 * token,  # noqa: B023
                        token_stride=token,  # noqa: B023
                        itemsize=itemsize,  # noqa: B023
                        seed=1,
                        num_threads=threads,
                    )
                    for threads in (1, 2)
                ),
                rounds=5,
            )
            nbytes = num_layers * num_pages * 16 * np.prod([axis[0] for axis in axes]) * itemsize  # noqa: B023
            yield f"{name} {nbytes / one / 1e9:5.1f} (two threads {nbytes / two / 1e9:5.1f})"

        whole = run("all heads", [(8, 128 * itemsize, 0), (128, itemsize, 0)])
        part = run("one head", [(1, 128 * itemsize, 3), (128, itemsize, 0)])
        print(f"  {itemsize} bytes an element: {next(whole)}   {next(part)}")


def main() -> None:
    bind_table()
    pack_table()
    group_table()
    digest_table()


if __name__ == "__main__":
    main()
