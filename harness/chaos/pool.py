"""A rank's page pool: fills pages, and checks every byte.

The content of a page is a function of (request id, attempt, global coordinate), so received bytes are compared with what
they must be, whichever rank sent them. Free pages hold a canary, which is checked before a page is reused: this finds
writes after a lease was released. The page released last is reused first.
"""

from __future__ import annotations

import hashlib
import time

import numpy as np
import numpy.typing as npt

from harness.chaos.jobs import Job, RankSettings

NUM_LAYERS = 2
NUM_KV_HEADS = 4
DIMS = {"k": 8, "v": 6}
CANARY = 0xC0FFEE11
MAX_TOKENS = 256

Words = npt.NDArray[np.uint32]


def content(job: Job, role: str, layer: int, *, heads: range, tokens: range) -> Words:
    """The content of an attempt at these coordinates, `[token, head, dim]`; the same on every rank."""
    seed = hashlib.blake2b(f"{job.request_id}#{job.attempt}".encode(), digest_size=8).digest()
    token, head, dim = np.ix_(np.arange(tokens.start, tokens.stop), np.arange(heads.start, heads.stop), np.arange(DIMS[role]))
    place = (((layer * 2 + (role == "v")) * MAX_TOKENS + token) * NUM_KV_HEADS + head) * 16 + dim
    mixed = place.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.frombuffer(seed, np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(32)).astype(np.uint32)


class PagePool:
    """The memory of one rank and its free pages. `wrong` describes every wrong byte found, `last` who used each page last."""

    def __init__(self, settings: RankSettings) -> None:
        self.page, self.num_pages = settings.page, settings.num_pages
        size = NUM_KV_HEADS // settings.tp
        self.heads = range(settings.tp_rank * size, (settings.tp_rank + 1) * size)
        names = settings.axes.split()
        self.tensors: dict[int, dict[str, Words]] = {}
        self._views: dict[tuple[int, str], Words] = {}
        """Each tensor as `[page, token, head, dim]`."""
        for layer in range(NUM_LAYERS):
            self.tensors[layer] = {}
            for role, dim in DIMS.items():
                sizes = {"page": self.num_pages, "token": self.page, "kv_head": size, "dim": dim}
                tensor = self.tensors[layer][role] = np.full([sizes[name] for name in names], CANARY, dtype=np.uint32)
                self._views[layer, role] = tensor.transpose([names.index(n) for n in ("page", "token", "kv_head", "dim")])
        self.free = list(range(self.num_pages))
        self.last: dict[int, str] = {}
        self.wrong: list[str] = []

    def take(self, job: Job, *, from_token: int) -> list[int] | None:
        """Pages for a job's tokens; `None` if there are too few."""
        count = -(-job.tokens // self.page) - from_token // self.page
        if len(self.free) < count:
            return None
        pages = [self.free.pop() for _ in range(count)]
        self.check_canary(pages)
        return pages

    def check_canary(self, pages: list[int]) -> None:
        """Note every one of these free pages that was written to."""
        for (layer, role), view in self._views.items():
            written = (view[pages] != CANARY).any(axis=(1, 2, 3))
            for page in np.array(pages)[written]:
                user = self.last.get(page)
                self.wrong.append(f"page {page}, layer {layer}, {role}: written after its lease was released: {user}")
                view[page] = CANARY

    def give_back(self, job: Job, pages: list[int]) -> None:
        self.last |= dict.fromkeys(pages, f"{job.direction} {job.request_id}#{job.attempt} with {job.peer}, {time.time():.3f}")
        for view in self._views.values():
            view[pages] = CANARY
        self.free.extend(pages)

    def fill(self, job: Job, pages: list[int]) -> None:
        """Write an attempt's content to its pages."""
        for (layer, role), view in self._views.items():
            at = np.array(pages)[np.arange(job.tokens) // self.page], np.arange(job.tokens) % self.page
            view[at] = content(job, role, layer, heads=self.heads, tokens=range(job.tokens))

    def check(self, job: Job, pages: list[int], when: str) -> None:
        """Note every wrong byte of a successful request: needed tokens hold its content, all others the canary."""
        first = job.first // self.page * self.page
        span = len(pages) * self.page
        for (layer, role), view in self._views.items():
            found = view[pages].reshape(span, *view.shape[2:])
            expected = np.full_like(found, CANARY)
            expected[job.first - first : job.tokens - first] = content(
                job, role, layer, heads=self.heads, tokens=range(job.first, job.tokens)
            )
            if (found != expected).any():
                token = first + int((found != expected).any(axis=(1, 2)).argmax())
                self.wrong.append(
                    f"{job.request_id}#{job.attempt} {when}: layer {layer}, {role}: {int((found != expected).sum())} words "
                    f"wrong, the first of token {token} (needed: [{job.first}, {job.tokens}))"
                )
