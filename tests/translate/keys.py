"""The keys of DeepSpeed 0.19, Lightning 2.6 and Composer 0.32, from their own code."""

from __future__ import annotations

from shardfn.translate import composer, deepspeed, lightning, precision
from shardfn.translate.schema import Table

KEYS: dict[str, tuple[Table, str]] = {
    "zero": (
        deepspeed.ZERO,
        """
        stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
        allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights
        elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param
        cpu_offload_use_pin_memory cpu_offload stage3_prefetch_bucket_size stage3_param_persistence_threshold
        stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
        stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save
        ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment zero_hpz_partition_size
        zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients mics_shard_size
        mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint override_module_apply
        log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
        zeropp_loco_param
        """,
    ),
    "deepspeed": (
        deepspeed.CONFIG,
        """
        train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print managed_gradient_accumulation bf16
        bfloat16 fp16 amp torch_autocast communication_data_type seq_parallel_communication_data_type
        prescale_gradients gradient_predivide_factor gradient_allreduce_op sparse_gradients disable_allgather
        disable_python_gc gradient_clipping checkpoint data_types dataloader_drop_last data_parallel_group
        use_data_before_expert_parallelism log_level wall_clock_breakdown memory_breakdown dump_state flops_profiler
        tensorboard wandb csv_monitor comet comms_logger activation_checkpointing aio elasticity autotuning
        hybrid_engine data_efficiency curriculum_learning progressive_layer_drop eigenvalue sparse_attention
        compression_training weight_quantization compile tensor_parallel pipeline nebula zero_optimization
        expert_parallel
        """,
    ),
    "sixteen bits": (
        precision.SIXTEEN,
        """
        enabled loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale
        auto_cast fp16_master_weights_and_grads immediate_grad_update check_grad_overflow
        bf16_master_weights_and_grads bf16_optimizer_states
        """,
    ),
    "FSDPStrategy": (
        lightning.FSDP,
        """
        accelerator parallel_devices cluster_environment checkpoint_io precision_plugin precision
        process_group_backend timeout cpu_offload mixed_precision auto_wrap_policy activation_checkpointing
        activation_checkpointing_policy sharding_strategy state_dict_type device_mesh
        """,
    ),
    "DeepSpeedStrategy": (
        lightning.DEEPSPEED,
        """
        accelerator zero_optimization stage remote_device offload_optimizer offload_parameters offload_params_device
        nvme_path params_buffer_count params_buffer_size max_in_cpu offload_optimizer_device optimizer_buffer_count
        block_size queue_depth single_submit overlap_events thread_count pin_memory sub_group_size
        contiguous_gradients overlap_comm allgather_partitions reduce_scatter allgather_bucket_size
        reduce_bucket_size zero_allow_untested_optimizer logging_batch_size_per_gpu config logging_level
        parallel_devices cluster_environment loss_scale initial_scale_power loss_scale_window hysteresis
        min_loss_scale partition_activations cpu_checkpointing contiguous_memory_optimization
        synchronize_checkpoint_boundary load_full_weights precision_plugin precision process_group_backend timeout
        exclude_frozen_parameters
        """,
    ),
    "ModelParallelStrategy": (
        lightning.MODEL_PARALLEL,
        """
        parallelize_fn data_parallel_size tensor_parallel_size save_distributed_checkpoint process_group_backend
        timeout
        """,
    ),
    "DDPStrategy": (
        lightning.DDP,
        """
        accelerator parallel_devices cluster_environment checkpoint_io precision_plugin ddp_comm_state ddp_comm_hook
        ddp_comm_wrapper model_averaging_period process_group_backend timeout start_method
        """,
    ),
    "Lightning's Trainer": (
        lightning.TRAINER,
        """
        accelerator strategy devices num_nodes precision logger loggers callbacks fast_dev_run max_epochs min_epochs
        max_steps min_steps max_time limit_train_batches limit_val_batches limit_test_batches limit_predict_batches
        overfit_batches val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps
        enable_checkpointing enable_progress_bar enable_model_summary accumulate_grad_batches gradient_clip_val
        gradient_clip_algorithm deterministic benchmark inference_mode use_distributed_sampler profiler
        detect_anomaly barebones plugins sync_batchnorm reload_dataloaders_every_n_epochs default_root_dir
        enable_autolog_hparams model_registry
        """,
    ),
    "FSDPConfig": (
        composer.FSDP,
        """
        activation_checkpointing activation_checkpointing_reentrant activation_cpu_offload auto_wrap
        te_checkpoint_wrapper te_shard_fp8_weight backward_prefetch backward_prefetch_limit cpu_offload
        data_parallel_shard_degree data_parallel_replicate_degree forward_prefetch forward_prefetch_limit
        ignored_modules keep_low_precision_grads limit_all_gathers load_monolith_rank0_only load_planner
        mixed_precision process_group save_planner sharded_ckpt_prefix_dir sharding_strategy state_dict_type
        sync_module_states use_orig_params verbose device_mesh
        """,
    ),
    "FSDP2Config": (
        composer.FSDP2,
        """
        device_mesh reshard_after_forward activation_checkpointing activation_cpu_offload state_dict_type
        load_monolith_rank0_only mixed_precision verbose
        """,
    ),
    "TPConfig": (
        composer.TP,
        """
        device_mesh tensor_parallel_degree layer_plan
        """,
    ),
    "Composer's Trainer": (
        composer.CONFIG,
        """
        model train_dataloader train_dataloader_label train_subset_num_batches spin_dataloaders max_duration
        algorithms algorithm_passes optimizers schedulers scale_schedule_ratio step_schedulers_every_batch
        eval_dataloader eval_interval eval_subset_num_batches callbacks loggers run_name progress_bar log_to_console
        console_stream console_log_interval log_traces auto_log_hparams load_path load_object_store
        load_weights_only load_strict_model_weights load_progress_bar load_ignore_keys load_exclude_algorithms
        save_folder save_filename save_latest_filename save_overwrite save_interval save_weights_only
        save_ignore_keys save_num_checkpoints_to_keep save_metrics autoresume parallelism_config device precision
        precision_config device_train_microbatch_size accumulate_train_batch_on_tokens seed deterministic_mode
        dist_timeout ddp_sync_strategy profiler python_log_level compile_config
        """,
    ),
}
