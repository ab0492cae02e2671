"""Requests that have ended, whose blocks this server keeps for another one that continues them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request, RequestStatus

from disagg.integrations.handoff import MAX_BEGINNINGS, HandOff, Place, problem_of_id
from disagg.integrations.options import Options
from disagg.integrations.vllm.groups import Group, Kind, kind_of
from disagg.integrations.vllm.metadata import ENGINE, BlockIds, Chunk, Finish, Opening, StepMetadata
from disagg.integrations.vllm.prompts import Prompts
from disagg.manager import new_request_id

logger = logging.getLogger(__name__)

KINDS = frozenset({Kind.FULL, Kind.WINDOW, Kind.LATENT, Kind.STATE})
"""Other kinds of state were tried at the end of a prompt only."""


def touch(manager: KVCacheManager, req_id: str) -> list[Any]:
    """A request's blocks, held until `give_back`."""
    blocks = [block for group in manager.get_blocks(req_id).blocks for block in group if not block.is_null]
    manager.block_pool.touch(blocks)
    return blocks


def give_back(manager: KVCacheManager, blocks: Sequence[Any]) -> None:
    manager.block_pool.free_blocks(reversed(blocks))


@dataclass
class Kept:
    """`num_ranks` may still read its blocks. `is_stopped`: it was stopped to move, and does not count against the bound.
    `is_given_up`: nobody may take it any more.
    """

    hand_off: HandOff
    blocks: list[Any]
    num_ranks: int
    is_stopped: bool = False
    is_given_up: bool = False


class KeptRequests:
    """At most `max_blocks` blocks are kept, without those of stopped requests. A shared block counts for each request.
    Nothing here frees a block.
    """

    def __init__(self, *, max_blocks: int, num_ranks: int) -> None:
        self._max_blocks, self._num_ranks = max_blocks, num_ranks
        self._requests: dict[str, Kept] = {}
        """The oldest comes first."""

    def reason_against(self, req_id: str, hand_off_id: str, num_blocks: int, *, is_stopped: bool = False) -> str:
        """Why a request cannot be kept, if so."""
        if req_id in self._requests:
            return "another request of the same id is kept"
        if num_blocks > self._max_blocks and not is_stopped:
            return f"expected at most {self._max_blocks} blocks (kept_share), found {num_blocks}"
        if any(kept.hand_off.remote_request_id == hand_off_id for kept in self._requests.values()):
            return f"another request is kept by the id {hand_off_id}"
        return ""

    def add(self, req_id: str, hand_off: HandOff, blocks: list[Any], *, is_stopped: bool = False) -> list[HandOff]:
        """Keep a request. Returns those that are given up for it."""
        others = [kept for kept in self._requests.values() if not (kept.is_stopped or kept.is_given_up)]
        num_blocks = len(blocks) + sum(len(kept.blocks) for kept in others) - self._max_blocks
        ended = [] if is_stopped else _give_up(others, num_blocks)
        self._requests[req_id] = Kept(hand_off, blocks, self._num_ranks, is_stopped)
        return ended

    def __len__(self) -> int:
        return len(self._requests)

    def find(self, hand_off_id: str) -> HandOff | None:
        for kept in self._requests.values():
            if kept.hand_off.remote_request_id == hand_off_id and not kept.is_given_up:
                return kept.hand_off
        return None

    def give_up(self, num_blocks: int) -> list[HandOff]:
        return _give_up([kept for kept in self._requests.values() if not kept.is_given_up], num_blocks)

    def make_free(self, num_blocks: int, *, num_free: int) -> list[HandOff]:
        given_up = sum(len(kept.blocks) for kept in self._requests.values() if kept.is_given_up)
        return self.give_up(num_blocks - num_free - given_up)

    def end(self, ended: Mapping[str, int]) -> Iterator[list[Any]]:
        """Forget requests that every rank has ended, and return their blocks. `ended` says how many more ranks have ended
        each.
        """
        for req_id, num_ranks in ended.items():
            kept = self._requests.get(req_id)
            if kept is not None:
                kept.num_ranks -= num_ranks
                if kept.num_ranks <= 0:
                    yield self._requests.pop(req_id).blocks


def _give_up(requests: Iterable[Kept], num_blocks: int) -> list[HandOff]:
    """Give up the first requests that together have so many blocks."""
    ended = []
    for kept in requests:
        if num_blocks <= 0:
            break
        kept.is_given_up = True
        num_blocks -= len(kept.blocks)
        ended.append(kept.hand_off)
    return ended


class Keeper:
    def __init__(
        self, config: VllmConfig, groups: Sequence[Group], prompts: Prompts, options: Options, manager: KVCacheManager
    ) -> None:
        self._groups, self._prompts, self._options, self.manager = groups, prompts, options, manager
        self._is_exact = not all(group.is_incremental for group in groups)
        self._has_states = any(group.kind is Kind.STATE for group in groups)
        self._num_drafted = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
        self.reason = _reason_against(config, groups, has_states=self._has_states)
        """Why this server keeps no request, if so."""
        max_blocks = int(options.kept_share * manager.block_pool.num_gpu_blocks)
        self._requests = KeptRequests(max_blocks=max_blocks, num_ranks=config.parallel_config.world_size)

    @property
    def keeps(self) -> bool:
        """Whether blocks of an ended request are held."""
        return len(self._requests) > 0

    def keep(
        self, request: Request, blocks: BlockIds, place: Place, step: StepMetadata, *, move_id: str = ""
    ) -> dict[str, Any] | None:
        """Keep a request that ended normally, if it asks for that (`keep`) or was stopped to move as `move_id`. Returns
        `kv_transfer_params` for its answer, unless the proxy chose the id and asks later.
        """
        given = move_id or (request.kv_transfer_params or {}).get("keep")
        if not given or request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            return None
        num_tokens = request.num_tokens - 1  # the last one was drawn, and not computed
        request_id = new_request_id().hex() if given is True else str(given)
        num_blocks = sum(block != 0 for ids in blocks for block in ids)  # not those that windows have left
        reason = self.reason or self._problem(request, blocks, num_tokens) or problem_of_id(request_id, "keep")
        if reason := reason or self._requests.reason_against(
            request.request_id, request_id, num_blocks, is_stopped=bool(move_id)
        ):
            logger.warning("request %s: it is not kept: %s", request.request_id, reason)
            return None
        digests = [] if self._is_exact else [digest for _, digest in self._prompts.beginnings(request, num_tokens)]
        hand_off = HandOff(
            **msgspec.structs.asdict(place),
            remote_request_id=request_id,
            remote_num_tokens=num_tokens,
            remote_prompt=self._prompts.digest(request, num_tokens),
            remote_beginnings="".join(digests[:MAX_BEGINNINGS]),
            remote_keep_s=self._options.keep_s,
        )
        held = touch(self.manager, request.request_id)
        given_up = self._requests.add(request.request_id, hand_off, held, is_stopped=bool(move_id))
        step.given_up += [each.request_id for each in given_up]
        self._send(request.request_id, hand_off, blocks, step)
        return {"kept": hand_off.params()} if given is True else None

    def answer(self, request: Request) -> dict[str, Any] | None:
        """The hand-off for a request that asks for it (`kept_request_id`), or that stopped the kept one."""
        params = request.kv_transfer_params or {}
        hand_off = self._requests.find(str(params.get("kept_request_id") or params.get("stop_request_id", "")))
        return None if hand_off is None else {"kept": hand_off.params()}

    def make_room(self, num_tokens: int, step: StepMetadata, *, num_requests: int = 1) -> None:
        """Give up requests until `num_requests` others, with `num_tokens` more tokens each, have free blocks. Blocks that
        vLLM's prefix cache has for them count too: they are free until it takes them.
        """
        num_blocks = num_requests * sum(
            -(-num_tokens // group.block_size) + -(-self._num_drafted // group.block_size) + group.num_scratch
            for group in self._groups
        )
        num_free = self.manager.block_pool.get_num_free_blocks()
        step.given_up += [each.request_id for each in self._requests.make_free(num_blocks, num_free=num_free)]

    def end(self, ended: Mapping[str, int]) -> None:
        for blocks in self._requests.end(ended):
            give_back(self.manager, blocks)

    def _problem(self, request: Request, blocks: BlockIds, num_tokens: int) -> str:
        """Why the state of `num_tokens` tokens is not whole, if so."""
        if request.prompt_embeds is not None:
            return "prompts of embeddings cannot be compared with longer ones"
        if problem := self._prompts.problem(request):
            return problem
        if not self._prompts.is_known(request):
            return "its adapter is still being read"
        if not 0 < num_tokens <= request.num_computed_tokens:
            return f"expected the state of {num_tokens} tokens, found that of {request.num_computed_tokens}"
        if self._has_states and request.num_computed_tokens != num_tokens:
            return "a step that was under way when the answer ended changes its recurrent state (asynchronous scheduling)"
        for group, ids in zip(self._groups, blocks, strict=True):
            start, stop = group.needed(0, num_tokens)
            needed = group.covering(ids, start, stop)
            if group.kind is not Kind.STATE and (not all(needed) or len(ids) * group.block_size < stop):
                return f"vLLM has freed blocks of KV cache group {group.index}"
        return ""

    def _send(self, req_id: str, hand_off: HandOff, blocks: BlockIds, step: StepMetadata) -> None:
        payload = hand_off.payload(ENGINE)
        if any(group.is_incremental for group in self._groups):
            chosen = tuple(group.covering(ids, 0, payload.num_tokens) for group, ids in zip(self._groups, blocks, strict=True))
            step.chunks.append(Chunk(req_id, hand_off.request_id, 0, chosen, 0, payload.num_tokens))
        step.openings.append(Opening(req_id, hand_off.request_id, 0))  # the same step may give it up
        step.finishes.append(Finish(req_id, hand_off.request_id, 0, blocks, payload.encode()))
        step.kept.append(req_id)


def _reason_against(config: VllmConfig, groups: Sequence[Group], *, has_states: bool) -> str:
    """Why this server keeps no request, if so."""
    others = sorted({kind.value for group in groups for kind in _kinds(group) - KINDS})
    if others:
        return f"states of kind {', '.join(others)} were not tried after an answer"
    if any(getattr(spec, "non_causal", False) for group in groups for spec in group.specs.values()):
        return "prompt tokens attend to later ones too, so a longer prompt changes the states of all of them"
    if has_states and config.speculative_config is not None:
        return "with speculative decoding a recurrent state may be of tokens that were rejected"
    if has_states and config.cache_config.mamba_cache_mode != "none":
        return f"recurrent states in blocks of a prefix cache (mamba_cache_mode {config.cache_config.mamba_cache_mode!r})"
    return ""


def _kinds(group: Group) -> set[Kind]:
    return {kind_of(spec, name) for name, spec in group.specs.items()}
