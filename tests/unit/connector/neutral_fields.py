"""Fields of vLLM's configuration that do not change a record's bytes, by part and reason.

A line is ``reason: fields``; indented lines go on with the fields of the line before.  The opposite is in
``vllm_hypic/connector/identity.py``; ``test_identity.py`` says that no field is forgotten.
"""

PARTS = """
told: additional_config
told where a model drafts: speculative_config
made of what the model and model_config.quantization_config say: quant_config
last bits: what is compiled, how, kernels and batches: compilation_config optimization_level performance_mode
last bits: where prefill chunks end, and the machine: scheduler_config device_config
where weights, and tables of weights, lie: offload_config engram_config
the plugin's own: kv_transfer_config
how tokens are chosen, not what is computed from them: diffusion_config watermark_config
    structured_outputs_config reasoning_config
where images are encoded; what they show stands in the record's key: ec_transfer_config ec_manager_config
what is given back beside tokens: aux_output_config
what is told of the engine: observability_config logging_config profiler_config kv_events_config
a name, and how it ends: instance_id shutdown_timeout
weights that change in a running engine, whose caches are then reset: weight_transfer_config
"""
"""Parts as a whole, but those of :data:`FIELDS`."""

FIELDS = {
    "model_config": """
        tokens, which stand in the record's key: tokenizer tokenizer_mode tokenizer_revision
            skip_tokenizer_init io_processor_plugin renderer_num_workers enable_prompt_embeds
        pooling, which is refused: pooler_config runner convert
        where images may come from: allowed_local_media_path allowed_media_domains
        what is made of the last layer's output: max_logprobs logprobs_mode use_fp64_gumbel
            return_sampling_mask enable_trace_replay logits_processors generation_config
            override_generation_config word_embeddings_untied_by_checkpoint
        memory, and weights that change in a running engine: enable_sleep_mode sleep_preserve_parameter_names
            sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator
        last bits: enforce_eager disable_cascade_attn
        permits, names: allow_deprecated_quantization hf_token served_model_name
        not of this model: spec_target_max_model_len is_submodel_config
    """,
    "load_config": """
        where files are, and how they are read: download_dir safetensors_prefetch_num_threads
            safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location
    """,
    "cache_config": """
        sizes and the stream's own cache: block_size user_specified_block_size kv_cache_layout
            prefix_match_unit gpu_memory_utilization num_gpu_blocks_override enable_prefix_caching
            prefix_caching_hash_algo prefix_cache_retention_interval mamba_page_size_padded
            skip_page_size_padded num_gpu_blocks num_cpu_blocks effective_attention_block_size
            kv_cache_size_tokens kv_cache_max_concurrency hash_block_size cache_hit_alignment_tokens
            kv_cache_memory_bytes kv_offloading_size kv_offloading_backend _block_size_resolved
        last bits: where chunks end: mamba_block_size mamba_cache_mode enable_mamba_shared_prefix_checkpoint
        layers that are refused: sliding_window swa_bounded_replay replayssm_buffer_len use_replayssm
            use_kda_recoverssm is_attention_free
    """,
    "parallel_config": """
        last bits: who computes what: prefill_context_parallel_size data_parallel_size
            data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_index
            is_moe_model enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling
            enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy all2all_backend
            enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold
            dbo_prefill_token_threshold decode_context_parallel_size dcp_kv_cache_interleave_size
            dcp_comm_backend dcp_q_replicate cp_kv_cache_interleave_size
            _allow_auto_resolve_cp_interleave_size disable_custom_all_reduce
            disable_nccl_for_dp_synchronization dp_sync_interval
        processes and addresses: data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port
            data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb
            max_parallel_loading_workers enable_shm_tensor_arena ray_workers_use_nsight ray_runtime_env
            placement_group distributed_executor_backend master_addr master_port node_rank nnodes numa_bind
            numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds
            cpu_distributed_timeout_seconds world_size rank _data_parallel_master_port_list _coord_store_port
            _api_process_count _api_process_rank enable_fault_tolerance fault_tolerance_config
        the plugin's own, and a program of the operator's: worker_cls worker_extension_cls
    """,
    "lora_config": """
        room for adapters; which one a request has is in its key: max_lora_rank max_loras max_cpu_loras
            default_mm_loras max_lora_cls_labels
        last bits: fully_sharded_loras specialize_active_lora enable_mixed_moe_lora_format
            enable_moe_shared_loras
    """,
    "attention_config": """
        last bits: kernels: backend backend_per_kind flash_attn_version
            flash_attn_max_num_splits_for_cuda_graph tq_max_kv_splits_for_cuda_graph use_trtllm_attention
            mla_prefill_backend flex_attn_block_m flex_attn_block_n flex_attn_q_block_size
            flex_attn_kv_block_size
        sparse attention, quantised and non-causal KV, which are refused: tokenspeed_mla_min_split_kv
            disable_flashinfer_q_quantization indexer_kv_dtype indexer_sparse_logits hisparse_config
            use_non_causal sparse_mla_force_mqa sparse_mla_prefill_workspace_factor
            minimax_m3_msa_decode_backend
    """,
    "mamba_config": "last bits: kernels: backend ssu_algorithm",
    "kernel_config": """
        last bits: kernels: ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune
            enable_cutedsl_warmup enable_jit_warmup sparse_indexer_topk_backend
    """,
}

NEWER: dict[str, str] = {
    "attention_config": "indexer_tp_shard_min_rows minimax_m3_indexer_cp trtllm_ragged_backend",
    "cache_config": "simple_cpu_offload_num_blocks",
    "kernel_config": "monokernel",
    "vllm_config": "watchdog_config",
}
"""Fields that vLLM 0.33 adds: sizes, kernels of layers that are refused, and what is told."""

OPTIONS = """
defaults of requests, and what stands in the record's key: link seam_tokens context islands context_file
    min_segment_tokens segment checkpoint_tokens prefix
sizes and places: page_tokens pool_bytes pool_fraction expected_segment_tokens expected_live_heads store
    max_pinned_fraction max_request_fraction max_tenant_fraction max_tenant_segments segment_parallel gate
    checkpoints
tokens that never reach the model: token_texts token_ids
"""
"""The plugin's own options."""

ALWAYS: dict[str, tuple[str, ...]] = {
    "model_config": ("model", "revision", "dtype", "quantization", "seed", "hf_config", "hf_text_config"),
    "load_config": ("load_format",),
    "cache_config": ("mamba_cache_dtype",),
    "parallel_config": ("tensor_parallel_size", "pipeline_parallel_size"),
}
"""Fields that every namespace holds, by their value, the fingerprint of weights (``load_format``; with dummy
weights the ``seed``), the geometry (types of K, V and convolution, stages) or names of objects (ranks)."""
