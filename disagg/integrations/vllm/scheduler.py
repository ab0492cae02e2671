"""The scheduler half of the connector: what each request needs, and which blocks must not be reused yet.

An exception in vLLM's scheduler ends the server. So each hook logs its own, and vLLM computes the request itself.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from disagg.core.rate_limited_log import RateLimitedLog
from disagg.core.rows import TokenRange
from disagg.integrations.handoff import OTHER_PROMPT, HandOff, Payload, Place, transfer_id
from disagg.integrations.options import Options
from disagg.integrations.vllm.bootstrap import Bootstrap, num_replicas
from disagg.integrations.vllm.groups import Group, num_handed_over, read_groups
from disagg.integrations.vllm.kept import Keeper, give_back, touch
from disagg.integrations.vllm.metadata import (
    ENGINE,
    BlockIds,
    Chunk,
    Finish,
    Load,
    Opening,
    RankAddress,
    StepMetadata,
    WorkerReport,
)
from disagg.integrations.vllm.metrics import TransferStats
from disagg.integrations.vllm.moves import Moves
from disagg.integrations.vllm.prompts import Prompts
from disagg.integrations.vllm.queue import Queue
from disagg.manager import new_request_id

logger = logging.getLogger(__name__)

NUM_LOADED = 4096
NUM_SHARED = 1024
HELD_S = 60.0
"""How long vLLM steps although it is idle while blocks of failed loads are held. Those that are held longer may be for good."""
ONE_OF_SEVERAL = re.compile(r"(\d+)_(.+)", re.DOTALL)
"""vLLM's id of one of `n` answers: its number, then the id that they share (`ParentRequest`)."""
LATER_PROMPT = re.compile(r"cmpl-.+-[1-9]\d*-[0-9a-f]{8}", re.DOTALL)
"""vLLM's id of a later prompt of a list. It returns only the first one's `kv_transfer_params`."""
NOTHING = {"do_remote_prefill": False, "do_remote_decode": False}
"""Given `null` instead, some proxies fail, or send decode prefill's parameters."""

Transfer = tuple[str, str, str, int]

Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(otherwise: Callable[[], object]) -> Callable[[Hook], Hook]:
    def wrap(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def call(*args: Any) -> object:
            try:
                return hook(*args)
            except Exception:
                logger.exception("%s failed; vLLM computes the request itself", hook.__name__)
                return otherwise()

        return cast("Hook", call)

    return wrap


@contextlib.contextmanager
def logged(cost: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("%s", cost)


@dataclass
class Prefill:
    """A request for another server to decode. Of its first `num_tokens` tokens `num_done` are computed, and the workers have
    `num_sent`. With `first_token` decode starts from the token drawn after them. `is_ended`: the workers have everything.
    """

    request: Request
    request_id: bytes
    num_tokens: int
    first_token: bool = False
    prompt: str = ""
    attempt: int = 0
    num_sent: int = 0
    num_done: int = 0
    is_ended: bool = False
    is_given_up: bool = False


class SchedulerHalf:
    def __init__(self, config: VllmConfig, kv: KVCacheConfig, options: Options) -> None:
        self._config, self._options = config, options
        self._queue = Queue(options.hold_s)
        self._groups = read_groups(kv, dcp=config.parallel_config.decode_context_parallel_size)
        self._exact = not all(group.is_incremental for group in self._groups)
        self._window_page = math.gcd(*(group.block_size for group in self._groups if group.window is not None)) or 1
        self._prompts = Prompts(config)
        self._leader: RankAddress | None = None
        self._warnings = RateLimitedLog(logger, repeat_s=60.0)
        self._bootstrap: Bootstrap | None = None
        self._keeper: Keeper | None = None
        self._moves = Moves(config)
        self._num_cached: dict[int, dict[str, int]] = {}
        self._step = StepMetadata()
        self._prefills: dict[str, Prefill] = {}
        self._shared: OrderedDict[str, dict[str, Any] | None] = OrderedDict()
        """By prompt id, what all answers to the prompt return to the proxy."""
        self._failed: dict[str, bool] = {}
        """Requests that wait again because their load has failed, and whether vLLM has asked for them in its last step."""
        self._loading: dict[str, Transfer] = {}
        self._to_compute: dict[str, Request] = {}
        """Requests that were loaded, until vLLM computes the rest, about which it does not ask again."""
        self._unplaced: Request | None = None
        """The last request that vLLM asked about in this step, until it has blocks."""
        self._offered: dict[str, TokenRange] = {}
        """What is loaded if vLLM places the request."""
        self._loaded: OrderedDict[Transfer, None] = OrderedDict()
        self._of_others: dict[str, HandOff] = {}
        """Hand-offs of another prompt than the request's."""
        self._stats = TransferStats()
        self._partial: dict[str, list[tuple[Group, int]]] = {}
        """Of requests with blocks that were loaded in part, those and their first loaded tokens (`_partly`)."""
        self._leases: Counter[str] = Counter()
        self._held: dict[str, list[Any]] = {}
        self._held_until_s = 0.0
        self._sent: dict[str, list[Any]] = {}
        """Blocks that are held until the workers have sent the request."""

    def bind(self, manager: KVCacheManager) -> None:
        """Raises `AttributeError` if vLLM counts cached blocks otherwise."""
        self._keeper = Keeper(self._config, self._groups, self._prompts, self._options, manager)
        for group in self._groups:
            if group.window is not None:
                self._num_cached[group.index] = manager.coordinator.single_type_managers[group.index].num_cached_block

    def set_ranks(self, ranks: Mapping[tuple[int, int], RankAddress]) -> None:
        """Raises `ConfigError` if the bootstrap server cannot listen."""
        self._leader = next(iter(ranks.values()), None)
        if self._leader is not None and self._options.bootstrap_port and self._bootstrap is None:
            self._bootstrap = Bootstrap.start(self._config.parallel_config, self._options, str(self._place(self._leader)))

    def close(self) -> None:
        if self._bootstrap is not None:
            self._bootstrap.close()

    @property
    def keeper(self) -> Keeper:
        assert self._keeper is not None, "bind comes first"
        return self._keeper

    def _place(self, leader: RankAddress, *, window_page: int | None = None) -> Place:
        return Place(
            remote_engine_id=leader.engine_id,
            remote_address=leader.address,
            remote_public_key=leader.public_key,
            remote_window_page=window_page or self._window_page,
        )

    def _window_page_of(self, partial: Sequence[tuple[Group, int]], stop: int) -> int:
        """From a multiple of which token on this server has the windows at token `stop`, with blocks loaded in part."""
        starts = ((group.needed(0, stop)[0], first) for group, first in partial)
        return self._window_page if all(start - start % self._window_page >= first for start, first in starts) else 1

    # -- prefill -----------------------------------------------------------------------------------------------------

    @guarded(lambda: None)
    def on_new_request(self, request: Request) -> None:
        """Note a request that will be decoded elsewhere, may move, or was given up by the proxy.

        Windows and states are handed over as they are before the last prompt token. So prefill must not compute it, unless
        decode does not either (`first_token`).
        """
        if not isinstance(request.kv_transfer_params, dict):  # vLLM would end if `vllm_xargs` has another value
            request.kv_transfer_params = None
        params = request.kv_transfer_params or {}
        if "abort_request_id" in params:
            self._give_up(bytes.fromhex(params["abort_request_id"]))
            return
        self._moves.add(request, reason=self.keeper.reason)
        self._give_up_own(request)
        if LATER_PROMPT.fullmatch(_prompt_id(request)):
            _use(request)  # its hand-off is the first prompt's
        self._queue.add(request)
        if not params.get("do_remote_decode") or not self._config.kv_transfer_config.is_kv_producer:
            return
        given = transfer_id(params)
        if not self._is_first(request, given):
            return
        prefill = self._begin(request, given or new_request_id(), first_token=bool(params.get("first_token")))
        if prefill is None:
            if given is not None:  # decode may wait for it
                self._step.given_up.append(given)
            return
        request.max_tokens = 1
        self._prefills[request.request_id] = prefill
        if given is None and (prompt_id := _prompt_id(request)) != request.request_id:
            self._shared[prompt_id] = None
            if len(self._shared) > NUM_SHARED:
                self._shared.popitem(last=False)
        self._step.openings.append(Opening(request.request_id, prefill.request_id, prefill.attempt))

    def _give_up_own(self, request: Request) -> None:
        """Give up a request that this server kept itself: its prefix cache has the blocks, or nothing has."""
        with contextlib.suppress(ValueError):  # logged when vLLM schedules it
            hand_off = HandOff.of(request.kv_transfer_params)
            if hand_off is not None and self._leader is not None and hand_off.remote_engine_id == self._leader.engine_id:
                if hand_off.remote_address != self._leader.address:  # it has restarted, or two servers have one name
                    self._warnings.warning(
                        "requests from engine_id %r at %s are computed here, not loaded: that is also the name of this server; "
                        "give each server an engine_id of its own",
                        hand_off.remote_engine_id, hand_off.remote_address,
                    )  # fmt: skip
                self._step.given_up.append(hand_off.request_id)
                _use(request)

    def _is_first(self, request: Request, given: bytes | None) -> bool:
        """Decode loads only the first of a prompt's answers, and of a list's prompts."""
        prompt_id = _prompt_id(request)
        if LATER_PROMPT.fullmatch(prompt_id):
            return False
        if given is not None:
            return not _is_later_answer(request) and all(each.request_id != given for each in self._prefills.values())
        return prompt_id not in self._shared

    def _begin(self, request: Request, request_id: bytes, *, first_token: bool) -> Prefill | None:
        num_tokens = request.num_prompt_tokens if first_token else num_handed_over(request.num_prompt_tokens)
        if num_tokens == 0 or self._prompts.problem(request):
            return None
        self._prompts.is_known(request)  # starts reading its adapter
        if self._exact and not first_token:
            if request.prompt_token_ids is None or request.prompt_embeds is not None or request.skip_reading_prefix_cache:
                return None  # vLLM's workers compare the lengths of tokens and embeddings
            request.prompt_token_ids = request.prompt_token_ids[:num_tokens]
            del request._all_token_ids[num_tokens:]
            request.num_prompt_tokens = num_tokens
        return Prefill(request, request_id, num_tokens, first_token)

    def _give_up(self, request_id: bytes) -> None:
        """End a request that nobody will decode. vLLM ignores aborts of finished requests, and some others."""
        for prefill in self._prefills.values():
            prefill.is_given_up |= prefill.request_id == request_id
        self._step.given_up.append(request_id)

    def build_metadata(self, output: SchedulerOutput) -> StepMetadata:
        for req_id in output.preempted_req_ids or ():
            with logged(f"request {req_id}: it was preempted, and its transfer goes on"):
                self._end_preempted(req_id)
        step, self._step = self._step, StepMetadata()
        step.idle = output.total_num_scheduled_tokens == 0
        with logged("no kept request makes room for this step's requests"):
            self.keeper.make_room(1, step, num_requests=max(1, len(output.num_scheduled_tokens)))
            if self._unplaced is not None:
                self.keeper.make_room(self._unplaced.num_tokens, step)
            for req_id in output.num_scheduled_tokens:
                self._to_compute.pop(req_id, None)
            for request in self._to_compute.values() if step.idle else ():  # what else would wait for them has no blocks
                if request.request_id not in self._loading:
                    self.keeper.make_room(request.num_tokens - request.num_computed_tokens, step)
        self._unplaced = None
        with logged("requests that wait in the queue are not renewed in this step"):
            step.wanted = self._queue.take_due()
        for req_id, num_computed in _computed(output):
            prefill = self._prefills.get(req_id)
            if prefill is None or prefill.is_given_up:
                continue
            try:
                if num_computed < prefill.num_done and prefill.attempt == prefill.request.num_preemptions:
                    logger.warning("request %s: it is not handed over: another connector's blocks were invalid", req_id)
                    self._give_up(prefill.request_id)
                elif not prefill.is_ended:
                    self._advance(step, prefill, num_computed + output.num_scheduled_tokens[req_id])
            except Exception:
                logger.exception("request %s: it is not handed over", req_id)
                self._give_up(prefill.request_id)
        return step

    def _end_preempted(self, req_id: str) -> None:
        """VLLM has taken the blocks of a request away, and may compute it much later."""
        prefill = self._prefills.get(req_id)
        if prefill is None or prefill.is_given_up or prefill.is_ended:
            return
        if transfer_id(prefill.request.kv_transfer_params) is not None:
            # Decode may have been asked already: it knows only the first attempt, and computes the request.
            self._give_up(prefill.request_id)
        elif prefill.num_sent:
            self._step.aborts.append(req_id)

    def _advance(self, step: StepMetadata, prefill: Prefill, num_done: int) -> None:
        """After this step `num_done` tokens are computed."""
        if prefill.attempt != prefill.request.num_preemptions:  # it was preempted
            prefill.attempt, prefill.num_sent = prefill.request.num_preemptions, 0
        prefill.num_done = min(num_done, prefill.num_tokens)
        if any(group.is_incremental for group in self._groups):
            self._add_chunk(step, prefill, num_done)
        is_alone = self._leader is not None and self._leader.is_alone  # others report invalid blocks after the step
        if num_done >= prefill.num_tokens and is_alone and not prefill.first_token and self._prompts.is_known(prefill.request):
            self._end_early(step, prefill)

    def _add_chunk(self, step: StepMetadata, prefill: Prefill, num_computed: int) -> None:
        start, stop = prefill.num_sent, min(num_computed, prefill.num_tokens)
        if start < stop:
            blocks = self.keeper.manager.get_block_ids(prefill.request.request_id)
            chosen = tuple(group.covering(blocks[group.index], start, stop) for group in self._groups)
            step.chunks.append(Chunk(prefill.request.request_id, prefill.request_id, prefill.attempt, chosen, start, stop))
            prefill.num_sent = stop

    def _end_early(self, step: StepMetadata, prefill: Prefill) -> None:
        """End a send in the step that computes it, not in the next one. The blocks are held, since vLLM may still preempt or
        abort the request.
        """
        req_id = prefill.request.request_id
        finish = self._finish(prefill, self.keeper.manager.get_block_ids(req_id))
        self._sent[req_id] = touch(self.keeper.manager, req_id)
        step.finishes.append(finish)

    def _finish(self, prefill: Prefill, blocks: BlockIds) -> Finish:
        request = prefill.request
        first_token = request.output_token_ids[0] if prefill.first_token else None
        whole = self._prompts.digest(request, prefill.num_tokens)
        prompt = self._prompts.digest(request, prefill.num_tokens - 1) if prefill.first_token else whole
        payload = Payload(
            engine=ENGINE, num_tokens=prefill.num_tokens, first_token=first_token, prompt=prompt, whole_prompt=whole
        )
        finish = Finish(request.request_id, prefill.request_id, prefill.attempt, blocks, payload.encode())
        prefill.prompt, prefill.is_ended = prompt, True
        return finish

    @guarded(lambda: (False, None))
    def request_finished(self, request: Request, blocks: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """Hand over a prefilled request and keep its blocks until decode has them, or stop an aborted one."""
        req_id = request.request_id
        self._queue.remove(req_id)
        self._offered.pop(req_id, None)
        self._failed.pop(req_id, None)
        self._to_compute.pop(req_id, None)
        move_id, told = self._moves.remove(request)
        prefill, partial = self._prefills.pop(req_id, None), self._partial.pop(req_id, ())
        if self._loading.pop(req_id, None) is not None:
            self._step.aborts.append(req_id)
        with logged(f"request {req_id}: its hand-off is not declined, so prefill keeps it for as long as it may"):
            self._decline_unresolved(request)
        if prefill is None and told is not None:
            return False, {**told, **((self.keeper.answer(request) or {}) if "stopped" in told else {})}
        prompt_id = _prompt_id(request)
        if prefill is None:
            shared = self._shared.get(prompt_id)
            return False, self._answer(request, blocks, move_id, partial) if shared is None else dict(shared)
        params = None
        with logged(f"request {req_id}: it is not handed over"):
            params = self._hand_over(prefill, blocks, partial)
        if prompt_id in self._shared:  # vLLM returns the last answer's, and adds to each
            self._shared[prompt_id] = params and dict(params)
        if params is None:
            self._step.aborts.append(req_id)
        if prefill.is_ended:
            logger.debug("request %s: its blocks are held until decode has its state", req_id)
            self._step.held.append(req_id)
        return prefill.is_ended, params or dict(NOTHING)

    def _decline_unresolved(self, request: Request) -> None:
        hand_off = self._unresolved(request)
        for each in (hand_off, self._of_others.pop(request.request_id, None)):
            if each is not None and _transfer(each) not in self._loaded:
                self._step.declines.append(each)

    def _hand_over(self, prefill: Prefill, blocks: BlockIds, partial: Sequence[tuple[Group, int]]) -> dict[str, Any] | None:
        request = prefill.request
        computed = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        is_computed = request.num_computed_tokens >= prefill.num_tokens and prefill.attempt == request.num_preemptions
        is_whole = prefill.is_ended or (is_computed and self._prompts.is_known(request))
        if computed and not is_whole:
            logger.warning(
                "request %s: it is not handed over: it was preempted, another connector's blocks were invalid, or its adapter "
                "is still being read",
                request.request_id,
            )
        if not computed or not is_whole or prefill.is_given_up or self._leader is None:
            return None
        if not prefill.is_ended:
            self._step.finishes.append(self._finish(prefill, blocks))
        hand_off = HandOff(
            **msgspec.structs.asdict(self._place(self._leader, window_page=self._window_page_of(partial, prefill.num_tokens))),
            remote_request_id=prefill.request_id.hex(),
            remote_num_tokens=prefill.num_tokens,
            remote_attempt=prefill.attempt,
            remote_prompt=prefill.prompt,
        )
        return hand_off.params()

    def _answer(
        self, request: Request, blocks: BlockIds, move_id: str, partial: Sequence[tuple[Group, int]]
    ) -> dict[str, Any] | None:
        if self._leader is None:
            return None
        place = self._place(self._leader, window_page=self._window_page_of(partial, request.num_tokens - 1))
        kept = self.keeper.keep(request, blocks, place, self._step, move_id=move_id)
        return kept or self.keeper.answer(request) or self._without_hand_off(request)

    def _without_hand_off(self, request: Request) -> dict[str, Any] | None:
        """For a prompt of one token, name this server and its number of replicas: a proxy that asks both servers at once
        begins with such a prompt.
        """
        if not (request.kv_transfer_params or {}).get("do_remote_decode") or self._leader is None:
            return None
        if num_handed_over(request.num_prompt_tokens) > 0:
            return dict(NOTHING)
        place = msgspec.structs.asdict(self._place(self._leader))
        return {**NOTHING, **place, "remote_replicas": num_replicas(self._config.parallel_config)}

    # -- decode ------------------------------------------------------------------------------------------------------

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        """The tokens to load beyond `num_computed`, and whether between steps. `None`: ask again, since the adapter is still
        being read, or another answer loads the prompt into vLLM's cache.

        A request whose load has failed stands before all others, and may need more blocks than it gave back: computing also
        writes those before a window. If it does not fit, vLLM looks at no other, although these may hold the blocks. So it
        steps aside once, and in every other step while its old blocks are held.
        """
        if (was_asked := self._failed.get(request.request_id)) is not None:
            self._failed[request.request_id] = not was_asked
            if was_asked:
                if request.request_id not in self._held:
                    del self._failed[request.request_id]  # vLLM looks at it after those with blocks from now on
                return None, False
        if HandOff.part(request.kv_transfer_params) is not None and not self._prompts.is_known(request):
            return None, False
        hand_off = self._unresolved(request)
        if hand_off is not None and _transfer(hand_off) in self._loading.values():
            return None, False
        self._unplaced = request
        if hand_off is not None and (_transfer(hand_off) in self._loaded or _is_later_answer(request)):
            _use(request)  # only the first answer loads it, perhaps on another replica
            return 0, False
        stop = 0 if hand_off is None else self._num_loadable(request, hand_off, num_computed)
        self._offered[request.request_id] = num_computed, stop
        return (stop - num_computed, True) if stop > num_computed else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """Load, or decline. The workers report a load that cannot begin: vLLM would wait forever."""
        self._unplaced = None
        self._failed.pop(request.request_id, None)
        hand_off, is_loaded = None, False
        with logged(f"request {request.request_id}: its load has failed"):
            hand_off = self._unresolved(request)
            if hand_off is not None:
                _use(request)  # once, even if it is preempted later
                is_loaded = num_external > 0 and self._load(request, hand_off, blocks, num_external)
        self._offered.pop(request.request_id, None)
        if hand_off is not None and not is_loaded:
            self._step.declines.append(hand_off)
        if num_external > 0 and not is_loaded:
            self._step.unloadable.append(request.request_id)
            self._failed[request.request_id] = False

    def _load(self, request: Request, hand_off: HandOff, blocks: KVCacheBlocks, num_external: int) -> bool:
        """Load all that was offered or nothing: windows and states are of the last token."""
        start, stop = self._offered.get(request.request_id, (0, 0))
        if stop - start != num_external:
            found = f"expected to load {stop - start} tokens, found that vLLM takes {num_external}"
            logger.warning("request %s: its load has failed: %s", request.request_id, found)
            return False
        needs = self._needs(hand_off, start, stop)
        self._keep_out_of_cache(request.request_id, needs)
        if partial := self._partly(needs):
            self._partial[request.request_id] = partial
        prompt = self._prompts.digest(request, stop)
        self._step.loads.append(Load(request.request_id, hand_off, blocks.get_block_ids(), start, stop, needs, prompt))
        self._loading[request.request_id] = transfer = _transfer(hand_off)
        self._to_compute[request.request_id] = request
        self._loaded[transfer] = None
        if len(self._loaded) > NUM_LOADED:
            self._loaded.popitem(last=False)
        return True

    def _keep_out_of_cache(self, req_id: str, needs: Sequence[TokenRange]) -> None:
        """Keep vLLM from caching a block that is loaded in part, by counting it as cached already."""
        for group, first in self._partly(needs):
            num_cached = self._num_cached[group.index]
            num_cached[req_id] = max(num_cached.get(req_id, 0), first // group.block_size + 1)

    def _unresolved(self, request: Request) -> HandOff | None:
        """The hand-off that was not loaded or declined. A damaged one is removed. So is that of another prompt, which is
        declined when this request ends, unless it was loaded by then.
        """
        try:
            hand_off, problem = HandOff.of(request.kv_transfer_params), ""
        except ValueError as error:  # also msgspec.ValidationError
            hand_off, problem = None, f"kv_transfer_params of another connector or version: {error}"
        if hand_off is not None and hand_off.is_kept:
            hand_off = self._common(request, hand_off)
        elif hand_off is not None and hand_off.remote_prompt:
            request.kv_transfer_params["remote_prompt"] = ""  # compared once
            is_stand_in = request.abort_immediately  # of one that vLLM's frontend has ended, without its prompt
            if not is_stand_in and hand_off.remote_prompt != self._prompts.digest(request, _num_common(request, hand_off)):
                self._of_others[request.request_id] = hand_off
                hand_off, problem = None, f"kv_transfer_params: {OTHER_PROMPT}"
        if problem:
            logger.warning("request %s: %s", request.request_id, problem)
            self._stats.count_refusal()
            _use(request)
        return hand_off

    def _common(self, request: Request, hand_off: HandOff) -> HandOff:
        """A kept request's hand-off, cut to the tokens that both requests have."""
        if not hand_off.remote_prompt:  # compared before
            return hand_off
        num_kept = hand_off.remote_num_tokens
        common = self._prompts.num_common(request, hand_off, num_handed_over(request.num_prompt_tokens))
        if self._exact and common != num_kept:
            common = 0
        logger.debug("request %s: the first %d tokens of %s that were kept are its own", request.request_id, common, num_kept)
        cut: dict[str, Any] = {"remote_num_tokens": common, "remote_prompt": "", "remote_beginnings": ""}
        if (part := HandOff.part(request.kv_transfer_params)) is not None:
            part.update(cut)
        return msgspec.structs.replace(hand_off, **cut)

    def _num_loadable(self, request: Request, hand_off: HandOff, num_computed: int) -> int:
        """The leading prompt tokens that can be loaded. Windows and states are of one token only. Another connector stores
        all full blocks, so none may be loaded in part.
        """
        common = _num_common(request, hand_off)
        if self._exact and ((hand_off.remote_num_tokens or 0) > common or request.prompt_embeds is not None):
            reason = f"the state that prefill has cannot be cut to its first {common} tokens"
        else:
            partial = self._partly(self._needs(hand_off, num_computed, common)) if common > num_computed else []
            if not (partial and (other := self._takes_for_whole(request, partial))):
                return common
            reason = (
                f"{other} would take the first block of a window for whole; give prefill a block size that is a "
                "multiple of this server's"
            )
        if request.request_id not in self._offered:  # vLLM has not asked before
            self._stats.count_refusal()
            logger.warning("request %s: vLLM computes it, since %s", request.request_id, reason)
        return 0

    def _takes_for_whole(self, request: Request, partial: Sequence[tuple[Group, int]]) -> str:
        """Who would take a block that is loaded in part for whole, if anybody."""
        if self._leader is not None and not self._leader.is_alone:
            return "another connector"
        prefill = self._prefills.get(request.request_id)
        if prefill is None or transfer_id(request.kv_transfer_params) is None:  # else decode was told the page before
            return ""
        return "" if self._window_page_of(partial, prefill.num_tokens) == self._window_page else "decode"

    def _needs(self, hand_off: HandOff, start: int, stop: int) -> tuple[TokenRange, ...]:
        return tuple(group.needed(start, stop, window_page=hand_off.remote_window_page) for group in self._groups)

    def _partly(self, needs: Sequence[TokenRange]) -> list[tuple[Group, int]]:
        """The groups with a block that is loaded in part, and its first loaded token."""
        return [(group, first) for group, (first, _) in zip(self._groups, needs, strict=True) if first % group.block_size]

    # -- after each step -----------------------------------------------------------------------------------------------

    @guarded(lambda: None)
    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Hold the blocks of failed loads, which vLLM frees, while a rank's lease is held."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._leases.update(report.leases)
            self.keeper.end(report.ended)
        for req_id in output.finished_recving or ():
            if self._loading.pop(req_id, None) is not None and req_id in output.failed_recving:  # not of an aborted request
                self._failed[req_id] = False
            if self._leases[req_id] > 0 and req_id not in self._held:  # another connector's load may end later
                self._hold(req_id)
        for req_id in [req_id for req_id, count in self._leases.items() if count <= 0]:
            del self._leases[req_id]
            self._give_back(self._held.pop(req_id, None))
        for req_id in output.finished_sending or ():
            self._give_back(self._sent.pop(req_id, None))

    def take_stats(self) -> TransferStats:
        stats, self._stats = self._stats, TransferStats()
        return stats

    @property
    def waits_for_workers(self) -> bool:
        """Whether a request is kept, or blocks have been held for a short time."""
        return self.keeper.keeps or (bool(self._held) and time.monotonic() < self._held_until_s)

    def _hold(self, req_id: str) -> None:
        self._held_until_s = time.monotonic() + HELD_S
        self._held[req_id] = blocks = touch(self.keeper.manager, req_id)
        logger.warning("request %s: %d blocks are held until prefill cannot write them any more", req_id, len(blocks))

    def _give_back(self, blocks: list[Any] | None) -> None:
        if blocks:
            give_back(self.keeper.manager, blocks)


def _prompt_id(request: Request) -> str:
    """The part of a request's id that all answers share."""
    several = ONE_OF_SEVERAL.fullmatch(request.request_id)
    return request.request_id if several is None else several[2]


def _is_later_answer(request: Request) -> bool:
    several = ONE_OF_SEVERAL.fullmatch(request.request_id)
    return several is not None and several[1] != "0"


def _num_common(request: Request, hand_off: HandOff) -> int:
    most = num_handed_over(request.num_prompt_tokens)
    return most if hand_off.remote_num_tokens is None else min(hand_off.remote_num_tokens, most)


def _use(request: Request) -> None:
    """Mark the hand-off as used, and its `kept`."""
    while (part := HandOff.part(request.kv_transfer_params)) is not None:
        part["do_remote_prefill"] = False


def _transfer(hand_off: HandOff) -> Transfer:
    """It has the address, since a restarted server may use an id again."""
    return hand_off.remote_engine_id, hand_off.remote_address, hand_off.remote_request_id, hand_off.remote_attempt


def _computed(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """The scheduled requests, and how many tokens each had before."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
