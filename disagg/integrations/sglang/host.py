"""What the manager needs of its SGLang process."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from disagg.core.errors import ConfigError
from disagg.core.events import ReadyEvent
from disagg.core.topology import Topology
from disagg.integrations.adapters import Adapters
from disagg.integrations.identity import has_windows
from disagg.integrations.options import ServerConfig
from disagg.integrations.sglang import payload
from disagg.integrations.sglang.facts import Facts
from disagg.integrations.sglang.identity import (
    attention_layers,
    check_scales,
    identify,
    kv_scales,
    read_source,
    windows_read,
)
from disagg.integrations.sglang.pools import Drafts, Pools, has_numbers, read_facts
from disagg.integrations.sglang.prompts import UNREAD_OF_ADAPTERS, Prompt, prompt_of
from disagg.layout.agreement import ModelId
from disagg.protocol.messages import MAX_PAYLOAD_NBYTES

MAX_REST_NBYTES = 512
"""Of a payload, beside SGLang's metadata."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """`gather` returns what every pipeline stage gives, in order; `from_leader` what the instance's rank 0 gives.
    `write_first_token(index, token, room)` writes no log-probability. `check_metadata(index, room)` checks prefill's rows.
    `check_scales` raises `LocalProtocolError` for scales other than in the layouts. `launched` is an event after the GPU's
    current work, which may still write freed pages. The scheduler does not read metadata buffers at `unread`.
    """

    model: ModelId
    read_facts: Callable[[Topology], Facts]
    gather: Callable[[Any], list[Any]]
    from_leader: Callable[[Any], Any]
    request: Callable[[Any], Any]
    prompt: Callable[[Any], Prompt]
    write_first_token: Callable[[int, int, int], None]
    check_metadata: Callable[[int, int], None]
    check_scales: Callable[[], None]
    launched: Callable[[], ReadyEvent | None]
    unread: frozenset[int] = frozenset()


def host_of(queue: Any) -> Host:
    """Raises `ConfigError` for an unsupported option. Decode keeps a failed request's pages until nothing can write there:
    SGLang's own 30 seconds prove nothing.
    """
    from sglang.srt.runtime_context import get_disagg, get_exec, get_parallel

    options = get_disagg()
    check_options(queue.scheduler, get_parallel(), get_exec().features, is_decode=options.disaggregation_mode == "decode")
    check_buffers(queue.metadata_buffers)
    transfers = getattr(queue, "transfer_queue", None)
    if transfers is not None:
        transfers.enable_deferred_kv_release, transfers.deferred_kv_release_timeout = True, math.inf
    if transfers is not None and options.disaggregation_decode_enable_radix_cache:
        check_windows(queue.scheduler)
    reuses_pages = options.disaggregation_decode_enable_radix_cache or options.disaggregation_decode_enable_offload_kvcache
    return describe(queue, reuses_pages=bool(reuses_pages))


def describe(queue: Any, *, reuses_pages: bool) -> Host:
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.runtime_context import get_parallel

    scheduler, parallel = queue.scheduler, get_parallel()
    config, runner = scheduler.model_config, scheduler.tp_worker.model_runner
    name, options = ServerConfig.load(environ=os.environ, name="sglang").model, scheduler.server_args
    source = read_source(config, options.decrypted_config_file, name=name)
    layers = tuple(attention_layers(runner.model))
    scales = kv_scales(runner, layers)
    pools = Pools(
        kv=queue.token_to_kv_pool,
        drafts=drafts_of(scheduler),
        requests=scheduler.req_to_token_pool,
        config=config,
        recurrent_config=mambaish_config(config),
        window=getattr(scheduler, "sliding_window_size", None),
        kv_scales=scales,
        windows=windows_read(runner),
        by_layer=has_windows(source.config),
        reuses_pages=reuses_pages,
    )

    adapters = Adapters(UNREAD_OF_ADAPTERS)
    reads_hidden_states = scheduler.draft_worker is not None and scheduler.spec_algorithm.carries_draft_hidden_states()

    def prompt(request: Any) -> Prompt:
        paths = {} if request.lora_id is None else scheduler.tp_worker.model_runner.lora_manager.lora_refs
        return prompt_of(request, adapters, paths)

    def gather(own: Any) -> list[Any]:
        return parallel.pp_group.all_gather_object(own) if parallel.pp_size > 1 else [own]

    def write_first_token(index: int, token: int, room: int) -> None:
        payload.write_first_token(queue.metadata_buffers, index, token, room=room, vocabulary=config.vocab_size)

    def check_metadata(index: int, room: int) -> None:
        payload.check_metadata(queue.metadata_buffers, index, room=room, vocabulary=config.vocab_size)

    def launched() -> ReadyEvent | None:
        if not (scheduler.enable_overlap or parallel.pp_size > 1) or torch.device(queue.token_to_kv_pool.device).type != "cuda":
            return None  # each pass has ended by then
        if scheduler.forward_stream.query():
            return None  # no pass is under way
        event = torch.cuda.Event()
        event.record(scheduler.forward_stream)
        return event  # type: ignore[no-any-return]

    return Host(
        model=identify(
            source,
            runner,
            name=name,
            options={name: getattr(options, name) for name in ("forward_hooks", "rl_on_policy_target")},
            from_stages=gather,
            scales={} if has_numbers(pools.kv, scales) else scales,
        ),
        read_facts=lambda topology: read_facts(pools, topology),
        gather=gather,
        from_leader=lambda own: parallel.world_group.broadcast_object(own, src=0),
        request=lambda receiver: next(each.req for each in queue.queue if each.kv_receiver is receiver),
        prompt=prompt,
        write_first_token=write_first_token,
        check_metadata=check_metadata,
        check_scales=partial(check_scales, runner, layers, scales),
        launched=launched,
        unread=frozenset(() if reads_hidden_states else (queue.metadata_buffers.output_hidden_states.data_ptr(),)),
    )


def drafts_of(scheduler: Any) -> Drafts | None:
    """`None` without a draft model, and on earlier pipeline stages."""
    worker = scheduler.draft_worker
    if worker is None or worker.primary_draft_kv_pool is None:
        return None
    from sglang.srt.speculative.draft_parallel import legacy_draft_attn_tp_size

    runners, layout = worker._draft_model_runners(), worker.draft_parallel_layout
    return Drafts(
        pools=tuple(runner.token_to_kv_pool for runner in runners),
        config=runners[0].model_config,
        tp=legacy_draft_attn_tp_size(scheduler.spec_algorithm) if layout is None else layout.attn_tp_size,
        window=runners[0].sliding_window_size,
    )


def check_options(scheduler: Any, parallel: Any, features: Any, *, is_decode: bool) -> None:
    """Raise `ConfigError` for an unsupported option. `parallel`, `features` and the role come from SGLang's context: a server's
    options keep the role that it started with.
    """
    options, speculation = scheduler.server_args, scheduler.spec_algorithm
    starts_from_prefill = (speculation.is_none, speculation.is_eagle, speculation.is_dflash, speculation.is_dspark)
    refused = {
        "--enable-kv-cache-sharding": parallel.enable_kv_cache_sharding,
        "--enable-dsa-cache-layer-split": parallel.enable_dsa_cache_layer_split,
        "--enable-cp-tp-group-sharing": parallel.enable_cp_tp_group_sharing,
        "--dcp-size": parallel.attn_dcp_size > 1,
        "--enable-hisparse": scheduler.enable_hisparse,
        "--dllm-algorithm": options.dllm_algorithm,
        "--enable-mis": options.enable_mis,
        "--debug-tensor-dump-input-file": options.debug_tensor_dump_input_file,
        "--language-only": options.language_only,
        "--enable-memory-saver": features.enable_memory_saver,
        "--enable-hierarchical-cache on a decode server with --pp-size above 1": (
            scheduler.enable_decode_hicache and parallel.pp_size > 1
        ),
        # These SGLang never gives what prefill has: its scheduler would end, or embed other requests' tokens.
        f"--speculative-algorithm {options.speculative_algorithm} on a decode server": (
            is_decode and not any(begins() for begins in starts_from_prefill)
        ),
        "n-gram embeddings on a decode server": is_decode and scheduler.model_config.use_ngram_embedding,
        "encoder-decoder model": scheduler.model_config.is_encoder_decoder,
    }
    found = [option for option, given in refused.items() if given]
    if found:
        raise ConfigError(f"transfer backend disagg: expected no {found[0]}, which it does not support")


def check_buffers(rows: Any) -> None:
    """Raise `ConfigError` if SGLang's `MetadataBuffers` are not in host memory, or a row does not fit into a message."""
    device = rows.output_ids.device
    if device.type != "cpu":
        raise ConfigError(
            f"SGLANG_MOONCAKE_CUSTOM_MEM_POOL: expected metadata buffers in host memory, found them on {device}; unset it"
        )
    nbytes, most = sum(rows.get_buf_infos()[2]), MAX_PAYLOAD_NBYTES - MAX_REST_NBYTES
    if nbytes > most:
        raise ConfigError(
            f"metadata of a request: expected at most {most} bytes, found {nbytes}; lower --sampling-mask-max-tokens, or use a "
            "draft model with fewer hidden states"
        )


def storage_option(options: Any) -> str | None:
    """The option by which a server shares pages with others in a storage, if it has one."""
    given = {
        "--hicache-storage-backend": options.hicache_storage_backend is not None,
        "--enable-unified-cache-external-linker": options.enable_unified_cache_external_linker,
        "--enable-lmcache": options.enable_lmcache,
    }
    return next((option for option, has in given.items() if has), None)


def check_windows(scheduler: Any) -> None:
    """Raise `ConfigError` where a radix cache on decode would have unfilled tokens of a window: SGLang caches whole pages, also
    those of which only the window's end has arrived, and a shorter prompt of the same tokens reads their beginning.
    """
    if scheduler.tp_worker.is_hybrid_swa:
        raise ConfigError(
            "transfer backend disagg: expected no --disaggregation-decode-enable-radix-cache with a model that has a pool for "
            "sliding windows: shorter prompts would read tokens that have not arrived"
        )
