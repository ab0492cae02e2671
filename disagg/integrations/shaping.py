"""What shapes a request's state, for vLLM and SGLang: special fields of a model's `config.json` and all options of a server,
with what compares or refuses them, or why they do not matter. The documentation shows all rows, and tests fail for an option
without one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class Verdict(enum.Enum):
    COMPARED = "compared when two servers meet"
    REQUEST = "compared for each request"
    REFUSED = "refused at the start"
    NONE = "does not matter"


@dataclass(frozen=True)
class Row:
    verdict: Verdict
    how: str
    names: tuple[str, ...]


def _row(verdict: Verdict, how: str, names: str) -> Row:
    return Row(verdict, how, tuple(names.split()))


def names(rows: Iterable[Row]) -> tuple[str, ...]:
    return tuple(name for row in rows for name in row.names)


_COMPARED, _REQUEST, _REFUSED, _NONE = Verdict

# -- config.json -------------------------------------------------------------------------------------------------------

# fmt: off
_ROTARY = _row(_COMPARED, "`rope`: the rotary embeddings that the server has loaded, in one form for all spellings", """
    rope_parameters rope_scaling rope_theta rope_local_base_freq partial_rotary_factor rotary_pct rotary_emb_base
    original_max_position_embeddings max_position_embeddings""")
_PATTERN = _row(_COMPARED, "`layers`: the kind of each layer, in one form, and `windows`: what the server applies", """
    layer_types sliding_window sliding_window_size sliding_window_pattern _sliding_window_pattern use_sliding_window
    max_window_layers interleaved_sliding_window attn_layer_period attn_layer_offset attn_layer_indices
    full_attention_interval""")
_LAYOUT = _row(_COMPARED, "the layouts of both servers' memory", "head_dim num_key_value_heads")
_DTYPES = _row(_COMPARED, "the layouts of both servers' memory", "dtype torch_dtype")
_DEFAULTED = _row(_COMPARED, "the value that the server has loaded, so that a default may be left out", """
    attention_bias mlp_bias hidden_act rms_norm_eps layer_norm_eps num_experts_per_tok norm_topk_prob routed_scaling_factor
    n_group topk_group topk_method scoring_func first_k_dense_replace moe_layer_freq decoder_sparse_step mlp_only_layers
    attn_logit_softcapping query_pre_attn_scalar attention_multiplier embedding_multiplier residual_multiplier use_qk_norm
    use_bidirectional_attention is_causal hidden_activation swiglu_limit mlp_layer_types no_rope_layers
    no_rope_layer_interval qkv_bias clip_qkv attn_temperature_tuning floor_scale attn_scale""")
_IGNORED = (
    _row(_NONE, "files, versions and names", "_commit_hash _name_or_path auto_map transformers_version id2label label2id"),
    _row(_NONE, "weights may be quantized on one side, but not by what changes K, V or latents. AutoAWQ without grouped heads "
        "and a `transform_config` are compared; of llm-compressor's AWQ the file says nothing", """
        quantization_config compression_config quantization"""),
    _row(_NONE, "training and the first values of weights", """
        initializer_range initializer_factor init_std gradient_checkpointing output_router_logits router_aux_loss_coef
        router_z_loss_coef router_jitter_noise aux_loss_alpha seq_aux pretraining_tp problem_type resid_pdrop embd_pdrop
        attn_pdrop attention_probs_dropout_prob hidden_dropout_prob layerdrop drop_path_rate chunk_size_feed_forward"""),
    _row(_NONE, "what is done with the last layer's output", "tie_word_embeddings final_logit_softcapping"),
    _row(_NONE, "draft layers, whose drafts the model checks", """
        num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers num_nextn_predict mtp_loss_scaling_factor"""),
    _row(_NONE, "how transformers runs a model, and its old defaults for generation", """
        use_cache cache_implementation attn_implementation _attn_implementation _attn_implementation_autoset return_dict
        output_attentions output_hidden_states output_scores return_dict_in_generate do_sample num_beams num_beam_groups
        no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences repetition_penalty length_penalty
        diversity_penalty task_specific_params tf_legacy_loss torchscript pruned_heads use_bfloat16 finetuning_task
        tokenizer_class"""),
)
# fmt: on
MODEL = (_ROTARY, _PATTERN, _LAYOUT, _DTYPES, _DEFAULTED, *_IGNORED)
"""All other fields are compared as they are, except token ids and rates of dropout."""

ROTARY, PATTERN, LAYOUT, DEFAULTED = (frozenset(row.names) for row in (_ROTARY, _PATTERN, _LAYOUT, _DEFAULTED))
IGNORED = frozenset(names((_DTYPES, *_IGNORED)))

# -- vLLM --------------------------------------------------------------------------------------------------------------

_CONFIG = "the description of the model (`config.json` with what the command line overrides)"
_MEMORY = "the layouts of both servers' memory"
_KERNELS = "how the same values are computed; rounding may differ"
_WHERE = "where and how large memory is, and when its pages are used again"
_TOKENS = "a request's tokens are compared, not how a text became tokens"
_PICTURES = "pictures and sound become states on prefill; requests carry their digests"
_SAMPLING = "what is done with the last layer's output"
_PARALLEL = "layers, heads and tokens of each rank are in the layouts"
_DRAFTS = "drafts, which the model checks"
_WEIGHTS = "where weights come from and how they are stored; weights are not compared"
_SERVING = "how requests and answers travel and are scheduled"

# fmt: off
VLLM: Mapping[str, tuple[Row, ...]] = {
    "VllmConfig": (
        _row(_NONE, "their fields have rows below", """
            model_config cache_config lora_config attention_config speculative_config parallel_config"""),
        _row(_REFUSED, "the connector, by name", "diffusion_config aux_output_config"),
        _row(_COMPARED, "its value, if it is set", "additional_config"),
        _row(_NONE, _KERNELS, """
            device_config mamba_config kernel_config quant_config compilation_config optimization_level performance_mode"""),
        _row(_NONE, _WEIGHTS, "load_config offload_config weight_transfer_config engram_config"),
        _row(_NONE, _SAMPLING, "structured_outputs_config watermark_config reasoning_config"),
        _row(_NONE, _SERVING, """
            scheduler_config observability_config logging_config profiler_config kv_transfer_config kv_events_config
            ec_transfer_config ec_manager_config instance_id shutdown_timeout watchdog_config"""),
    ),
    "CacheConfig": (
        _row(_COMPARED, "formats and scales in the layouts, which may differ where they can be converted, and `kv_scales`", """
            cache_dtype kv_cache_dtype_skip_layers"""),
        _row(_COMPARED, _MEMORY, "mamba_cache_dtype mamba_ssm_cache_dtype"),
        _row(_COMPARED, "`windows`: the layers' own", "sliding_window"),
        _row(_REFUSED, "models that use it, which the specs of their caches show", "swa_bounded_replay"),
        _row(_REFUSED, "vLLM itself, with any connector", "use_replayssm replayssm_buffer_len use_kda_recoverssm"),
        _row(_NONE, "layers that use another layer's states have none of their own", "kv_sharing_fast_prefill"),
        _row(_NONE, _WHERE, """
            block_size user_specified_block_size _block_size_resolved kv_cache_layout prefix_match_unit gpu_memory_utilization
            is_attention_free num_gpu_blocks_override enable_prefix_caching prefix_caching_hash_algo
            prefix_cache_retention_interval mamba_page_size_padded skip_page_size_padded mamba_block_size mamba_cache_mode
            enable_mamba_shared_prefix_checkpoint num_gpu_blocks num_cpu_blocks effective_attention_block_size
            kv_cache_size_tokens kv_cache_max_concurrency hash_block_size cache_hit_alignment_tokens kv_cache_memory_bytes
            kv_offloading_size kv_offloading_backend simple_cpu_offload_num_blocks"""),
    ),
    "ModelConfig": (
        _row(_COMPARED, _CONFIG, "hf_overrides hf_config hf_text_config hf_config_path config_format model revision"),
        _row(_COMPARED, _MEMORY, "dtype"),
        _row(_COMPARED, "`longrope`: vLLM takes the long factors if this exceeds the original length. Llama 4, below", """
            max_model_len"""),
        _row(_COMPARED, "`windows`: the layers' own", "disable_sliding_window"),
        _row(_COMPARED, "its value, if it is set", "model_class_overrides"),
        _row(_REQUEST, "the request's key", "enable_prompt_embeds"),
        _row(_COMPARED, "`model_impl`, if `transformers` is set, or implements latent attention", "model_impl"),
        _row(_COMPARED, "`attn_temperature_tuning` of Llama 4, by default whether `max_model_len` exceeds 32,768", """
            generation_config override_generation_config"""),
        _row(_NONE, _WEIGHTS, """
            model_weights code_revision trust_remote_code quantization quantization_config allow_deprecated_quantization
            hf_token word_embeddings_untied_by_checkpoint"""),
        _row(_NONE, _TOKENS, "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init renderer_num_workers"),
        _row(_REQUEST, "each item's hash, with the server's processor options and pruning", "multimodal_config"),
        _row(_NONE, _PICTURES, "allowed_local_media_path allowed_media_domains"),
        _row(_NONE, _SAMPLING, """
            seed return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay logits_processors
            io_processor_plugin pooler_config runner convert"""),
        _row(_NONE, _KERNELS, "enforce_eager disable_cascade_attn"),
        _row(_NONE, _DRAFTS, "spec_target_max_model_len is_submodel_config"),
        _row(_REFUSED, "the connector, by name", "enable_sleep_mode enable_cumem_allocator"),
        _row(_NONE, "options of sleep mode, which is refused", """
            sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend"""),
        _row(_NONE, _SERVING, "served_model_name"),
    ),
    "LoRAConfig": (
        _row(_COMPARED, "their values, if they are set", "target_modules enable_tower_connector_lora"),
        _row(_REQUEST, "the request's key", "default_mm_loras"),
        _row(_NONE, "how an adapter that fits is stored and computed", """
            max_lora_rank max_loras fully_sharded_loras max_cpu_loras lora_dtype specialize_active_lora
            enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels"""),
    ),
    "AttentionConfig": (
        _row(_COMPARED, "the dtype in the layouts", "indexer_kv_dtype"),
        _row(_REFUSED, "models that use it, which the specs of their caches show", "indexer_sparse_logits"),
        _row(_REFUSED, "pages in the host's memory, by the group of their caches", "hisparse_config"),
        _row(_NONE, _KERNELS, """
            backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version flash_attn_max_num_splits_for_cuda_graph
            tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph use_trtllm_attention disable_flashinfer_q_quantization
            mla_prefill_backend use_prefill_query_quantization use_non_causal sparse_mla_force_mqa
            sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size
            flex_attn_kv_block_size trtllm_ragged_backend indexer_tp_shard_min_rows minimax_m3_indexer_cp"""),
    ),
    "ParallelConfig": (
        _row(_COMPARED, "the tokens of each rank, in the layouts", """
            decode_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
            _allow_auto_resolve_cp_interleave_size"""),
        _row(_REFUSED, "the connector, by name", "prefill_context_parallel_size"),
        _row(_NONE, _PARALLEL, "pipeline_parallel_size tensor_parallel_size world_size rank"),
        _row(_NONE, "each replica is an instance of its own", """
            data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_index
            data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port data_parallel_backend
            data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval disable_nccl_for_dp_synchronization"""),
        _row(_NONE, "experts have no states", """
            is_moe_model enable_expert_parallel enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy
            all2all_backend enable_elastic_ep elastic_ep_max_dp_size"""),
        _row(_NONE, _KERNELS, """
            enable_hc_sp disable_custom_all_reduce enable_shm_tensor_arena enable_dbo ubatch_size dbo_decode_token_threshold
            dbo_prefill_token_threshold dcp_comm_backend dcp_q_replicate"""),
        _row(_NONE, _SAMPLING, "enable_batch_sharded_sampling"),
        _row(_NONE, _WEIGHTS, "max_parallel_loading_workers"),
        _row(_NONE, "how processes are started and find each other; the memory that they allocate is compared", """
            distributed_executor_backend worker_cls worker_extension_cls ray_workers_use_nsight ray_runtime_env placement_group
            master_addr master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids
            distributed_timeout_seconds cpu_distributed_timeout_seconds _data_parallel_master_port_list _coord_store_port
            _api_process_count _api_process_rank enable_fault_tolerance fault_tolerance_config"""),
    ),
    "SpeculativeConfig": (
        _row(_COMPARED, "the names of the draft's components: servers with different drafts move none of its states", """
            method model revision parallel_drafting use_heterogeneous_vocab draft_model_config"""),
        _row(_COMPARED, "the names of the draft's components, which say whether it uses `longrope`", "max_model_len"),
        _row(_COMPARED, "the names of the draft's components, which have the format of its states", "kv_cache_dtype"),
        _row(_NONE, "the target is the model", "target_model_config target_parallel_config"),
        _row(_NONE, "drafts after the first token, which the model checks", """
            num_speculative_tokens num_speculative_tokens_per_batch_size index_share_for_mtp_iteration prompt_lookup_max
            prompt_lookup_min suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests
            suffix_decoding_max_spec_factor suffix_decoding_min_token_prob draft_sample_method dspark_draft_topk
            enable_adaptive_verification xpress_topc"""),
        _row(_NONE, _SAMPLING, """
            rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length fly_window_size
            fly_entropy_threshold fly_entropy_top_k"""),
        _row(_NONE, _PARALLEL, "draft_tensor_parallel_size tensor_parallel_size draft_parallel_config"),
        _row(_NONE, _WEIGHTS, "quantization code_revision draft_load_config draft_lm_head_quantization"),
        _row(_NONE, _KERNELS, """
            enforce_eager moe_backend attention_backend disable_padded_drafter_batch use_local_argmax_reduction"""),
        _row(_NONE, _WHERE, "disable_eagle_block_drop disable_lookahead_block_hashes"),
    ),
}
"""By the class of vLLM's configuration."""

# -- SGLang ------------------------------------------------------------------------------------------------------------

SGLANG: tuple[Row, ...] = (
    _row(_COMPARED, _CONFIG, "model_path revision json_model_override_args decrypted_config_file model_config_parser"),
    _row(_COMPARED, "formats and scales in the layouts, which may differ where they can be converted, and `kv_scales`", """
        kv_cache_dtype quantization_param_path qsa_indexer_dtype"""),
    _row(_COMPARED, _MEMORY, """
        dtype mamba_ssm_dtype disable_hybrid_swa_memory enable_linear_replayssm linear_replayssm_cache_len
        enable_linear_replayssm_spec"""),
    _row(_COMPARED, "its value, if it is set", "forward_hooks rl_on_policy_target"),
    _row(_REFUSED, "the plug-in, by name", "dllm_algorithm enable_mis debug_tensor_dump_input_file language_only"),
    _row(_REFUSED, "the plug-in, by name", """
        enable_kv_cache_sharding enable_dsa_cache_layer_split enable_cp_tp_group_sharing dcp_size enable_hisparse
        enable_memory_saver"""),
    _row(_REFUSED, "the models that have it, by the class of their pool", """
        enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay swa_prefix_tails c128_page_size
        enable_deepseek_v4_fp4_indexer"""),
    _row(_REFUSED, "SGLang itself or the class of the pool", """
        enable_unified_memory enable_page_major_kv_layout disaggregation_decode_allocation_policy"""),
    _row(_REQUEST, "the request's tokens and adapter", "lora_paths"),
    _row(_NONE, "rows of a diffusion model, which is refused", "dllm_algorithm_config dllm_fdfo"),
    _row(_NONE, "another implementation of the same model; the windows that it applies are compared", "model_impl"),
    _row(_NONE, _WHERE, """
        mem_fraction_static max_total_tokens page_size swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set
        radix_eviction_policy radix_eviction_policy_config _radix_eviction_policy_explicitly_set prefill_only_disable_kv_cache
        disable_radix_cache max_mamba_cache_size mamba_max_states_per_path mamba_full_memory_ratio mamba_radix_cache_strategy
        uses_mamba_radix_cache mamba_track_interval enable_int8_mamba_checkpoint int8_mamba_ckpt_size enable_hierarchical_cache
        hicache_host_memory_mode hicache_host_memory_fraction hicache_ratio hicache_size hicache_write_policy
        hicache_io_backend hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy
        hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
        hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker unified_cache_external_linker_backend
        unified_cache_external_linker_config enable_linker_mla_dedup hisparse_config enable_lmcache lmcache_config_file
        enable_flexkv flexkv_config_file radix_cache_backend cpu_offload_gb offload_group_size offload_num_in_group
        offload_prefetch_step offload_mode enable_weights_cpu_backup enable_draft_weights_cpu_backup
        enable_session_radix_cache enable_streaming_session kv_canary kv_canary_real_data kv_canary_sweep_interval"""),
    _row(_NONE, _PARALLEL, """
        nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank tp_size pp_size pp_max_micro_batch_size
        pp_async_batch_depth dp_size attn_dp_size load_balance_method attn_cp_size moe_dp_size dwdp_size dcp_comm_backend
        dcp_replicate_q_proj enable_prefill_cp cp_strategy enable_cp_decode_attn_tp enable_dp_attention
        enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_tp_lm_head_all_to_all
        enable_attn_tp_input_scattered enable_shared_experts_attn_tp shared_experts_tp_size enable_dense_mlp_attn_tp
        enable_layernorm_sp disable_attn_tp_gather enable_p2p_check ep_size moe_dense_tp_size"""),
    _row(_NONE, _KERNELS, """
        device base_gpu_id gpu_id_step enable_tf32_matmul attention_backend decode_attention_backend enable_lean_attention
        prefill_attention_backend mm_attention_backend fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend
        dsa_prefill_backend dsv4_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend dsa_topk_backend
        dsv4_attn_backend dsa_triton_union enable_dsa_fused_indexer disable_flashinfer_autotune flashinfer_autotune_skip_ops
        mamba_backend cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
        cuda_graph_max_bs_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context
        cuda_graph_max_seq_len_prefill disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph
        disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph enable_layerwise_nvtx_marker
        enable_nccl_nvls enable_symm_mem triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
        triton_attention_split_tile_size flashinfer_mla_disable_ragged enable_fused_qk_norm_rope
        enable_fused_moe_sum_all_reduce disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem enable_scattered_sconv
        pre_warm_nccl boundary_reduction enable_quant_communications enable_flashinfer_allreduce_fusion
        enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion
        disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode enable_amd_monokernel
        enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs moe_a2a_backend enable_w4a4_mxfp4_megamoe
        enable_megamoe_for_layernorm_sp deepep_v2_mode moe_runner_backend flashinfer_mxfp4_moe_precision
        flashinfer_a2a_dispatch_type deepep_mode fuseep_mode deepep_dispatcher_output_dtype ep_num_redundant_experts
        ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations
        eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
        expert_distribution_recorder_buffer_size expert_balancedness_report_mode deepep_config elastic_ep_backend
        enable_elastic_expert_backup mooncake_ib_device enable_waterfill ep_join_mode ep_join_rank_offset
        elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout disable_flashinfer_cutlass_moe_fp4_allgather
        disable_shared_experts_fusion enforce_shared_experts_fusion enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend
        linear_attn_verify_backend enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold
        kt_weight_path kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token
        ple_offload_embedding ple_offload_backend ple_offload_dir enable_paged_experts paged_experts_num_resident
        enable_nvidia_megakernel disable_chunked_prefix_cache prefill_kv_cache_dequant_dtype enable_deterministic_inference
        lora_backend max_lora_chunk_size lora_use_virtual_experts"""),
    _row(_NONE, "how an adapter that fits is stored and computed; SGLang refuses one that does not", """
        enable_lora enable_lora_overlap_loading max_lora_rank lora_target_modules max_loaded_loras max_loras_per_batch
        lora_eviction_policy experts_shared_outer_loras lora_strict_loading lora_drain_wait_threshold"""),
    _row(_NONE, _WEIGHTS, """
        load_format model_loader_extra_config trust_remote_code quantization modelopt_quant modelopt_checkpoint_restore_path
        modelopt_checkpoint_save_path modelopt_export_path quantize_and_serve rl_quant_profile weight_version
        startup_weight_load_mode custom_weight_loader weight_loader_disable_mmap weight_loader_prefetch_checkpoints
        weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port remote_instance_weight_loader_send_weights_group_ports
        remote_instance_weight_loader_backend remote_instance_weight_loader_start_seed_via_transfer_engine
        engine_info_bootstrap_port modelexpress_config download_dir model_checksum delete_ckpt_after_loading
        checkpoint_engine_wait_weights_before_ready weight_cache_mode weight_cache_socket weight_cache_timeout"""),
    _row(_NONE, _TOKENS, """
        tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num skip_tokenizer_init
        chat_template trust_request_chat_template hf_chat_template_name completion_template default_chat_template_kwargs
        allow_auto_truncate enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
        dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode"""),
    _row(_NONE, _PICTURES, """
        enable_multimodal enable_precise_embedding_interpolation enable_broadcast_mm_inputs_process enable_prefix_mm_cache
        mm_enable_dp_encoder mm_process_config mm_processor_worker_num mm_io_worker_num allowed_media_domains
        media_url_max_file_size_mb mm_preprocess_cache_size_mb trust_mm_content_hashes limit_mm_data_per_request
        enable_mm_global_cache image_processor_backend mm_global_cache_backend disable_fast_image_processor
        mm_feature_transport encoder_only language_model_only encoder_transfer_backend encoder_urls
        encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder asr_max_buffer_seconds
        asr_max_concurrent_sessions"""),
    _row(_NONE, _DRAFTS, """
        speculative_algorithm uno_lora_path speculative_draft_model_path speculative_draft_model_revision
        speculative_draft_load_format speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens
        speculative_dflash_block_size speculative_dspark_block_size speculative_dspark_sps_table_path
        speculative_dspark_confidence_sts_path speculative_dspark_align_verify_tokens_to_graph_tier
        speculative_accept_threshold_single speculative_accept_threshold_acc speculative_use_rejection_sampling
        speculative_token_map speculative_attention_mode speculative_draft_attention_backend speculative_dsa_topk_backend
        speculative_draft_kv_cache_dtype speculative_draft_window_size speculative_draft_sink_size
        speculative_moe_runner_backend speculative_moe_a2a_backend speculative_enable_w4a4_mxfp4_megamoe
        speculative_draft_model_quantization _speculative_draft_quantization_explicitly_set enable_multi_layer_eagle
        speculative_adaptive speculative_adaptive_config speculative_domino_candidate_pool_size speculative_boundary_reduction
        speculative_use_block_verification decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank
        decoupled_spec_role spec_trace_dir speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth
        speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity
        speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
        speculative_ngram_external_corpus_max_tokens decrypted_draft_config_file"""),
    _row(_NONE, _SAMPLING, """
        is_embedding random_seed mlx_enable_sampling enable_fp32_lm_head sampling_backend grammar_backend sampling_defaults
        preferred_sampling_params reasoning_parser strip_thinking_cache enable_strict_thinking tool_call_parser tool_server
        constrained_json_whitespace_pattern constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
        enable_custom_logit_processor enable_return_hidden_states return_hidden_states_mode enable_return_routed_experts
        enable_return_indexer_topk enable_return_aux_hidden_states aux_hidden_state_capture return_aux_hidden_state_layer_ids
        sampling_mask_max_tokens disable_outlines_disk_cache enable_watermark watermark_config watermark_key watermark_key_b
        watermark_context_window watermark_mixing_probability watermark_max_probability watermark_default_enabled
        watermark_enforce_all"""),
    _row(_NONE, _SERVING, """
        context_length max_running_requests max_queued_requests chunked_prefill_size prefill_decode_interval
        prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_policy
        enable_priority_scheduling disable_priority_preemption default_priority_value abort_on_priority_when_disabled
        schedule_low_priority_values_first priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness
        disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk watchdog_timeout
        soft_watchdog_timeout sleep_on_idle use_ray custom_sigquit_handler numa_node gc_threshold host port fastapi_root_path
        smg_grpc_mode grpc_mode grpc_port grpc_worker_threads grpc_response_timeout_secs sidecar sidecar_args
        skip_server_warmup warmups enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile
        ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name
        file_storage_path enable_cache_report return_input_ids return_output_ids stream_interval batch_notify_size
        stream_response_default_include_usage incremental_streaming_output enable_response_store enable_http_worker_reuseport
        disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device
        disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
        disaggregation_decode_retraction_backup num_reserved_decode_tokens disaggregation_decode_extra_slots
        disaggregation_decode_polling_interval disaggregation_decode_host_receive_threshold disaggregation_enable_kv_checksum
        enable_pd_role_switch optimistic_prefill_attempts enable_pdmux pdmux_config_path sm_group_num enable_prefill_delayer
        prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms
        min_free_slots_delay"""),
    _row(_NONE, "logs, metrics and debugging", """
        log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
        uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics smg_http_sidecar_port
        enable_mfu_metrics enable_metrics_for_all_schedulers load_snapshot_publish_interval
        tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels
        bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
        generation_tokens_buckets gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging
        kv_events_config load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
        forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file
        export_metrics_to_file_dir stat_loggers debug_tensor_dump_output_folder debug_tensor_dump_layers
        msprobe_dump_config"""),
)
"""Fields of `ServerArgs`."""
# fmt: on
