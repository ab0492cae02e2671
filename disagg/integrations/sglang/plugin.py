"""The entry point `sglang.srt.plugins`: SGLang calls `register` in each process before it reads its arguments."""

from __future__ import annotations

import functools
import logging
import os
from array import array
from collections.abc import Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from disagg.core.errors import ConfigError, LocalProtocolError
from disagg.integrations.sglang import TESTED, steps

logger = logging.getLogger(__name__)

NAME = "disagg"
ANY_VERSION = "SGLANG_DISAGG_ANY_VERSION"
STAGING = "SGLANG_DISAGG_STAGING_BUFFER"
APP = "SGLANG_HTTP_SERVER_APP_PATH"
"""The application of `--tokenizer-worker-num` processes, where SGLang loads no plug-ins."""

_process = SimpleNamespace(keeper=None)
"""What this process's decode keeps: SGLang releases a request where nothing else of the scheduler is known."""


def register() -> None:
    """Add the transfer backend to this process. Raises `ConfigError` for an untested version of SGLang, which logs it and
    goes on.
    """
    import sglang

    if sglang.__version__ not in TESTED and os.environ.get(ANY_VERSION) != "1":
        raise ConfigError(
            f"SGLang {sglang.__version__}: expected {' or '.join(TESTED)}, which were tested; {ANY_VERSION}=1 tries it"
        )
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    add_disagg_transfer_backend_choices([NAME])
    add_member(TransferBackend)
    register_resolution_hook("handle_pd_disaggregation")(_prepare)
    utils, queues = "sglang.srt.disaggregation.utils", "sglang.srt.disaggregation"
    HookRegistry.register(f"{utils}.get_kv_class", _kv_class, HookType.AROUND)
    for queue in ("prefill.PrefillBootstrapQueue", "decode.DecodePreallocQueue"):
        HookRegistry.register(f"{queues}.{queue}._init_kv_manager", _init_kv_manager, HookType.AROUND)
        HookRegistry.register(f"{queues}.{queue}._check_if_req_exceed_kv_capacity", _refuse, HookType.AROUND)
        HookRegistry.register(f"{queues}.{queue}.__init__", _set_up, HookType.AFTER)
    HookRegistry.register(f"{queues}.prefill.PrefillBootstrapQueue.create_sender", _create_sender, HookType.AROUND)
    HookRegistry.register(f"{queues}.prefill.PrefillBootstrapQueue.pop_bootstrapped", collect_created, HookType.BEFORE)
    HookRegistry.register(f"{queues}.prefill.PrefillBootstrapQueue.pop_bootstrapped", _withhold, HookType.AROUND)
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    for door in ("retire_unadmitted_request", "_reject_sampling_mask_request"):
        HookRegistry.register(f"{scheduler}.{door}", _retire, HookType.AROUND)
    HookRegistry.register(f"{scheduler}._set_or_validate_priority", _check_priority, HookType.AROUND)
    sending = f"{queues}.prefill.SchedulerDisaggregationPrefillMixin._send_kv_chunk"
    HookRegistry.register(sending, _send_cached, HookType.AROUND)
    HookRegistry.register(f"{queues}.decode.DecodePreallocQueue.prefetch_prefill_dp_rank_queries", _prefetch, HookType.AROUND)
    HookRegistry.register(f"{queues}.decode.DecodePreallocQueue._match_prefix_and_lock", _match_prefix, HookType.AROUND)
    query = f"{queues}.common.conn.CommonKVReceiver.query_prefill_dp_ranks"
    HookRegistry.register(query, _room_ranks, HookType.AROUND)
    control = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
    validate = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
    HookRegistry.register(validate, _check_fields, HookType.AROUND)
    dispatch = "sglang.srt.managers.data_parallel_controller.DataParallelController.follow_bootstrap_room_scheduler"
    HookRegistry.register(dispatch, _dispatch, HookType.AROUND)
    stages = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin"
    HookRegistry.register(f"{stages}._pp_pd_get_decode_transferred_ids", _ended_ids, HookType.AROUND)
    HookRegistry.register(f"{stages}.process_decode_transfer_queue", _release, HookType.AROUND)
    batch, prebuilt = "sglang.srt.managers.schedule_batch", f"{queues}.decode_schedule_batch_mixin"
    of_decode: dict[str, Callable[..., Any]] = {
        f"{batch}.ScheduleBatch.cumulate_penalty_output_tokens": steps.penalize,
        f"{batch}.Req.reset_for_retract": steps.keep_output,
        f"{scheduler}.update_running_batch": steps.settle,
        f"{prebuilt}.ScheduleBatchDisaggregationDecodeMixin.process_prebuilt": steps.restore,
    }
    for step, hook in of_decode.items():
        HookRegistry.register(step, _on_decode(hook), HookType.AROUND)
    components = "sglang.srt.managers.scheduler_components"
    HookRegistry.register("sglang.srt.mem_cache.common.release_kv_cache", _keep, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.process_decode_queue", _settle_kept, HookType.BEFORE)
    HookRegistry.register(f"{queues}.decode.DecodePreallocQueue.pop_preallocated", _make_room, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.update_running_batch", _make_room_for_step, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.flush_cache", _give_up_kept, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.is_fully_idle", _is_idle, HookType.AROUND)
    checker = f"{components}.invariant_checker.SchedulerInvariantChecker"
    HookRegistry.register(f"{checker}._check_all_pools", _check_pools, HookType.AROUND)
    HookRegistry.register(f"{checker}._check_req_pool", _check_rows, HookType.AROUND)
    for call in ("release", "resume"):
        HookRegistry.register(f"{control}.{call}_memory_occupation", _keep_pools, HookType.AROUND)


def _prepare(options: Any, previous: Callable[[Any], None]) -> None:
    """Runs before SGLang's other processes start, which inherit the environment."""
    if _is_ours(options):
        if os.environ.pop(STAGING, None) is not None:
            logger.info("%s: ignored; the backend disagg packs small pieces by itself", STAGING)
        os.environ.setdefault(APP, "disagg.integrations.sglang.workers:app")
    previous(options)


def add_member(backends: Any) -> None:
    """SGLang has no way to add a backend to its enumeration."""
    member = object.__new__(backends)
    member._name_, member._value_ = NAME.upper(), NAME
    backends._member_map_[member._name_] = member
    backends._member_names_.append(member._name_)
    backends._value2member_map_[NAME] = member


def _kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    from sglang.srt.disaggregation.utils import KVClassType

    if transfer_backend.value != NAME or class_type == KVClassType.KVARGS:
        return original(transfer_backend, class_type)
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    from disagg.integrations.sglang.manager import DisaggKVManager
    from disagg.integrations.sglang.receiver import DisaggKVReceiver
    from disagg.integrations.sglang.sender import DisaggKVSender

    classes = {
        KVClassType.MANAGER: DisaggKVManager,
        KVClassType.SENDER: DisaggKVSender,
        KVClassType.RECEIVER: DisaggKVReceiver,
        KVClassType.BOOTSTRAP_SERVER: CommonKVBootstrapServer,
    }
    return classes.get(class_type)


def _init_kv_manager(original: Callable[[Any], Any], queue: Any) -> Any:
    """The queue also has the pools, which `KVArgs` describe only in part."""
    if queue.transfer_backend.value != NAME:
        return original(queue)
    from disagg.integrations.sglang.host import host_of
    from disagg.integrations.sglang.manager import DisaggKVManager

    DisaggKVManager.host = host_of(queue)
    DisaggKVManager.is_checked = _wants_checksums()
    return original(queue)


def _wants_checksums() -> bool:
    from sglang.srt.runtime_context import get_disagg

    return bool(get_disagg().disaggregation_enable_kv_checksum)


def _set_up(_: None, queue: Any, *_given: Any, **_named: Any) -> None:
    """Build what keeps requests, or takes them. Turn off SGLang's digests of whole pages: the rest of the last page is not
    moved, and the manager compares checksums of the tokens instead.
    """
    if queue.transfer_backend.value != NAME:
        return
    from disagg.integrations.sglang.kept import Keeper
    from disagg.integrations.sglang.taking import Taker

    manager = queue.kv_manager
    if _is_decode():
        manager.keeper = Keeper(manager, queue.scheduler)
    else:
        manager.taker = Taker(manager, queue.scheduler)
    _process.keeper = manager.keeper
    if _wants_checksums():
        queue.scheduler.kv_checksum_computer = None
        logger.info(
            "--disaggregation-enable-kv-checksum: compared are checksums of what decode receives, as with DISAGG_VERIFY=full"
        )


def _dispatch(original: Callable[[Any, Any], None], controller: Any, request: Any) -> None:
    """SGLang's choice of a data-parallel rank would end over a room that is no number. The first rank's scheduler refuses
    it.
    """
    has_room = isinstance(request.bootstrap_room, int)
    if _is_ours(controller.server_args) and not has_room and request.routed_dp_rank is None:
        from sglang.srt.managers.io_struct import sock_send

        sock_send(controller.workers[0], request)
    else:
        original(controller, request)


def _is_ours(options: Any) -> bool:
    return bool(options.disaggregation_mode != "null" and options.disaggregation_transfer_backend == NAME)


def _keep_pools(original: Callable[..., Any], tokenizer: Any, request: Any, *given: Any, **named: Any) -> Any:
    """Raise `ConfigError` for a release of the pools, which stay registered."""
    tags = request.tags
    if _is_ours(tokenizer.server_args) and (not tags or "kv_cache" in tags):
        raise ConfigError(
            f"transfer backend disagg: expected no release of 'kv_cache', which peers may write to, found tags {tags}"
        )
    return original(tokenizer, request, *given, **named)


def _check_fields(original: Callable[..., None], tokenizer: Any, request: Any, *given: Any, **named: Any) -> None:
    """SGLang's processes would end over these lists and numbers, and sessions differ on both servers from the second turn on.
    Raises `ConfigError`, which becomes HTTP status 400.
    """
    if _is_ours(tokenizer.server_args):
        if getattr(request, "session_params", None):
            raise ConfigError("session_params: expected none: prefill's session does not have the answers")
        for name in ("top_logprobs_num", "logprob_start_len"):
            found = getattr(request, name, 0)
            if not isinstance(found, int) or (found < -1 and getattr(request, "return_logprob", False)):
                raise ConfigError(f"{name}: expected a number of at least -1 for one prompt, found {found!r:.80}")
    original(tokenizer, request, *given, **named)


def _refuse(original: Callable[[Any, Any], bool], queue: Any, request: Any) -> bool:
    """Whether a request is refused, with HTTP status 400."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode, prepare_abort

    if queue.transfer_backend.value == NAME:
        if _tell(queue, request):
            return True
        from disagg.integrations.sglang.prompts import check_logprobs, check_returned, check_tokens, check_unmoved_room

        try:
            if request.bootstrap_host != FAKE_BOOTSTRAP_HOST:
                queue.kv_manager.check_request(request)
            else:
                check_unmoved_room(request)
            check_tokens(request, queue.scheduler.model_config.vocab_size)
            check_logprobs(request, queue.metadata_buffers.output_top_logprobs_val.shape[1])
            if queue.kv_manager.disaggregation_mode == DisaggregationMode.DECODE:
                check_returned(request)
        except LocalProtocolError as error:
            prepare_abort(request, str(error), status_code=HTTPStatus.BAD_REQUEST)
            queue.scheduler.output_streamer.stream_output([request], request.return_logprob)
            queue.kv_manager.refused(request)
            return True
    is_refused = original(queue, request)
    if is_refused and queue.transfer_backend.value == NAME:
        queue.kv_manager.refused(request)
    return is_refused


def _tell(queue: Any, request: Any) -> bool:
    """Whether a request only tells decode to stop another one, or asks for what it keeps."""
    from disagg.integrations.sglang.kept import tell

    keeper = queue.kv_manager.keeper
    if keeper is None or not tell(request, keeper):
        return False
    queue.scheduler.output_streamer.stream_output([request], request.return_logprob)
    return True


def _keep(original: Callable[..., None], request: Any, tree_cache: Any, *, checkpoint: bool) -> None:
    """Decode keeps the pages of an ended request that asks for it."""
    release = functools.partial(original, request, tree_cache, checkpoint=checkpoint)
    if _process.keeper is None or not _process.keeper.keep(request, release):
        release()


def _settle_kept(scheduler: Any) -> None:
    """Before decode looks through its queues. Retracted requests come first, and wait for pages."""
    if _process.keeper:
        _process.keeper.settle()
    if _process.keeper and scheduler.disagg_decode_prealloc_queue.retracted_queue:
        _process.keeper.give_up_one()  # the next ones in the next loops


def _make_room(_: Any, queue: Any, *_given: Any, **_named: Any) -> None:
    """For the next look through decode's queue."""
    if _process.keeper:
        from disagg.integrations.sglang.kept import has_room

        if not has_room(queue):
            _process.keeper.give_up_one()


def _make_room_for_step(_: Any, batch: Any) -> None:
    """Before SGLang may retract requests."""
    if _process.keeper and not batch.is_empty():
        _process.keeper.make_room(batch.check_decode_mem)


def _give_up_kept(*_: Any, **__: Any) -> None:
    """SGLang empties its pools, also after new weights."""
    if _process.keeper:
        _process.keeper.give_up_all()


def _is_idle(original: Callable[..., bool], scheduler: Any, *given: Any, **named: Any) -> bool:
    """SGLang may empty its pools while it is idle, so nothing may arrive there."""
    queue = scheduler.disagg_prefill_bootstrap_queue
    taker = None if queue is None or queue.transfer_backend.value != NAME else queue.kv_manager.taker
    return original(scheduler, *given, **named) and not (taker is not None and taker.holds_pages)


def _check_pools(original: Callable[..., tuple[bool, list[str]]], *given: Any, **named: Any) -> tuple[bool, list[str]]:
    """SGLang counts pages while it is idle, and takes those that are kept for lost."""
    return (False, []) if _process.keeper else original(*given, **named)


def _check_rows(original: Callable[[Any], None], checker: Any) -> None:
    if not _process.keeper:
        original(checker)


def _retire(original: Callable[..., None], scheduler: Any, request: Any, *given: Any, **named: Any) -> None:
    """SGLang refuses a request before it gets to the queue."""
    original(scheduler, request, *given, **named)
    _tell_of_refusal(scheduler, request)


def _check_priority(original: Callable[[Any, Any], bool], scheduler: Any, request: Any) -> bool:
    """As `_retire`, for a priority where requests have none."""
    is_accepted = original(scheduler, request)
    if not is_accepted:
        _tell_of_refusal(scheduler, request)
    return is_accepted


def _tell_of_refusal(scheduler: Any, request: Any) -> None:
    queue = scheduler.disagg_prefill_bootstrap_queue or scheduler.disagg_decode_prealloc_queue
    if queue is not None and queue.transfer_backend.value == NAME:
        queue.kv_manager.refused(request)


def _create_sender(original: Callable[..., bool], queue: Any, request: Any, *given: Any, **named: Any) -> bool:
    """SGLang gives a sender only the room."""
    from disagg.integrations.sglang.sender import DisaggKVSender

    is_accepted = original(queue, request, *given, **named)
    if is_accepted and isinstance(request.disagg_kv_sender, DisaggKVSender):
        request.disagg_kv_sender.prompt = queue.kv_manager.host.prompt(request)
        queue.kv_manager.taker.begin(request)
    return is_accepted


def collect_created(queue: Any, *_: Any, **__: Any) -> None:
    """Runs after SGLang has created senders. Later pipeline stages must notice by themselves that decode has reserved:
    SGLang asks only the first one.
    """
    if queue.transfer_backend.value == NAME:
        queue.kv_manager.collect_created()


def _withhold(original: Callable[..., Any], queue: Any, *given: Any, **named: Any) -> Any:
    if queue.transfer_backend.value != NAME:
        return original(queue, *given, **named)
    from disagg.integrations.sglang.taking import withheld

    return withheld(functools.partial(original, queue, *given, **named), queue)


def _send_cached(
    original: Callable[..., None], scheduler: Any, request: Any, last_chunk: bool = False, end_idx: int | None = None
) -> None:
    """Pages that the radix cache does not own wait for the next chunk: SGLang frees duplicates of what another request
    cached first, and decode may still be reading them. The last chunk is safe: nothing of the request is cached until it has
    ended.

    With several pipeline stages on a GPU a chunk may still be computed: SGLang waits only before it sends the last one.
    """
    queue = scheduler.disagg_prefill_bootstrap_queue
    if queue.transfer_backend.value == NAME and not last_chunk:
        if not (scheduler.tree_cache.disable or request.skip_radix_cache_insert):
            computed = min(request.extend_end, len(request.origin_input_ids)) if end_idx is None else end_idx
            end_idx = min(computed, request.kv.cache_protected_len)
        if queue.kv_manager.pp_size > 1:
            request.disagg_kv_sender._early_send_wait_event = queue.kv_manager.host.launched()
    original(scheduler, request, last_chunk=last_chunk, end_idx=end_idx)


def _match_prefix(original: Callable[[Any, Any], Any], queue: Any, request: Any) -> Any:
    """With replaced embeddings the same token ids have another state, so decode's radix cache is not searched."""
    if queue.transfer_backend.value != NAME or request.positional_embed_overrides is None:
        return original(queue, request)
    token_ids, request.origin_input_ids = request.origin_input_ids, array("q")
    try:
        return original(queue, request)
    finally:
        request.origin_input_ids = token_ids


def _ended_ids(original: Callable[[Any], Any], scheduler: Any) -> Any:
    if scheduler.disagg_decode_prealloc_queue.transfer_backend.value != NAME:
        return original(scheduler)
    from disagg.integrations.sglang.stages import ended_ids

    return ended_ids(scheduler)


def _release(original: Callable[[Any, Any], Any], scheduler: Any, ids: Any) -> Any:
    if scheduler.disagg_decode_prealloc_queue.transfer_backend.value != NAME:
        return original(scheduler, ids)
    from disagg.integrations.sglang.stages import release

    return release(original, scheduler, ids)


def _on_decode(hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook` for decode servers with this backend only."""

    @functools.wraps(hook)
    def run(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        return hook(original, *given, **named) if _is_decode() else original(*given, **named)

    return run


def _is_decode() -> bool:
    from sglang.srt.runtime_context import get_disagg

    try:
        found = get_disagg()
    except ValueError:  # no server runs in this process
        return False
    return _is_ours(found) and bool(found.disaggregation_mode == "decode")


def _prefetch(original: Callable[[Any], None], queue: Any) -> None:
    """SGLang would ask ahead of time, in threads. `_room_ranks` does not wait in any case."""
    if queue.transfer_backend.value != NAME:
        original(queue)


def _room_ranks(original: Callable[..., dict[str, int]], server: str, rooms: list[int]) -> dict[str, int]:
    """SGLang would wait for each answer, and end over one that holds no numbers."""
    from disagg.integrations.sglang.bootstrap import BootstrapServers

    servers = BootstrapServers.current
    return original(server, rooms) if servers is None else servers.room_ranks(server, rooms)
