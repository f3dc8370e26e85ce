"""Meanings of the keys of DeepSpeed's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardfn.translate import fsdp, optimizers, precision
from shardfn.translate.draft import TranslationBuilder
from shardfn.translate.optimizers import OptimizerCounterpart
from shardfn.translate.schema import By, Section, Table, always, flag, meant, missing, read, same_for, sets, yours
from shardfn.translate.values import (
    TranslateError,
    as_count,
    as_switch,
    natural,
    number,
    path,
    positive,
    strategy_path,
    upper_word,
    whole_or_all,
    words,
)

STAGES = ("ddp", "zero1", "zero2", "full_shard")
STAGE = By({str(i): sets(f"the strategy {strategy_path(cut)}", cut=cut) for i, cut in enumerate(STAGES)})
_MANY = "as many micro-batches in sf.accumulate, and the loss divided by them"
ACCUMULATE = sets(_MANY, name="micro_batches", about="micro-batches of a step", accumulate=as_count)
CLIP = sets("so.clip_by_global_norm", off="nothing is clipped", name="max_grad_norm", clip=positive)
SCRATCH = sets("scratch= of make_mesh", scratch=path)
OBSERVES = yours("it only looks on: what is printed or logged is yours")
_AIO = "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds"
_TIER = always("buffers follow from prefetch=, and plan.host of sf.plan.step says what they take")
_PINNED = always("memory of the host is pinned on CUDA")
_BUFFER = always("a stage's gradients, and its parameters, of one dtype are one buffer")
_OFF = "{'ENABLED': FALSE}"
_AS_IT_IS = missing("the model is trained as it is: quant, and docs/reference/few-bits.md", "None", "{}")


def device(*kinds: str) -> By:
    """The meanings of an offload device, "none", "cpu" or "nvme", for these kinds of values."""
    choices = {"none": always("the device")}
    for name, tier in (("cpu", "host"), ("nvme", "disk")):
        tiers = ", ".join(f'{kind}="{tier}"' for kind in kinds)
        choices[name] = sets(f".with_tiers({tiers}) of the strategy", **dict.fromkeys(kinds, tier))
    return By(choices)


STATE, PARAMS = device("grads", "state"), device("params")
_TIERS: Table = {
    "nvme_path": SCRATCH,
    "pin_memory": _PINNED,
    "fast_init": always("state on disk is zeros that nobody writes"),
    "ratio": missing("a strategy that is a function of path and shape says which parameters", "1.0", "1"),
    "super_offload": missing("a step reads and writes a stretch ahead", "False"),
    "cpuadam_cores_perc": always("of no effect without super_offload"),
    **same_for("buffer_count buffer_size max_in_cpu pipeline pipeline_read pipeline_write", _TIER),
}


def _offload(where: By) -> Section:
    def before(draft: TranslationBuilder, prefix: str, settings: dict[str, Any]) -> None:
        if "nvme_path" in settings and upper_word(settings.get("device", "none")) != "NVME":
            draft.row(f"{prefix}nvme_path", settings.pop("nvme_path"), "always", "of no effect without nvme")

    return Section({"device": where, **_TIERS}, "DeepSpeed", before=before)


_FEWER = "parameters with fewer elements stay whole"
_KEPT = "sf.strategies.replicate_small(strategy, below={value}): smaller parameters stay whole"
_PERSISTENT: Table = {
    "max_live_parameters": always("prefetch + 1 buffers, each as large as the largest stage"),
    "max_reuse_distance": always("what is still in those buffers is not gathered again"),
    "prefetch_bucket_size": always("gathers run one stage ahead: prefetch=, a number of stages, says how many"),
    "param_persistence_threshold": sets(_KEPT, name="persistence_threshold", about=_FEWER, uncut=natural),
    "model_persistence_threshold": missing("nothing bounds the sum of what stays whole: replicate_small(below=) alone"),
    "gather_16bit_weights_on_model_save": yours("checkpoint.export_hf(..., dtype=torch.bfloat16) when you want it"),
    "module_granularity_threshold": always("stages= says what is gathered as a whole"),
    "use_all_reduce_for_fetch_params": always("an all-gather; no number changes"),
    "allgather_sequential": always("parameters of a stage are one buffer, gathered at once"),
}
_LEAVES: Table = {
    "classes": sets("stages={...} of functional: the outermost match is one stage", stages=words),
    **same_for("names name_suffixes", missing("stages=: regular expressions of whole paths", "[]")),
}
_GROUPS = "sf.hybrid_shard over groups of {value} ranks"
ZERO: Table = {
    "stage": STAGE,
    "offload_optimizer": _offload(STATE),
    "offload_param": _offload(PARAMS),
    "cpu_offload": flag(STATE.choices["cpu"], always("the device")),
    **same_for("cpu_offload_param cpu_offload_params", flag(PARAMS.choices["cpu"], always("the device"))),
    "cpu_offload_use_pin_memory": _PINNED,
    "overlap_comm": always("gathers run ahead and reductions behind, while stages compute"),
    "contiguous_gradients": always("a stage's gradients are one flat buffer"),
    "reduce_scatter": always("gradients are reduce-scattered where the strategy cuts them"),
    "compute_grad_norm": always("a norm is computed where clipping asks for it"),
    "ignore_unused_parameters": always("a parameter that the loss does not use has a gradient of zeros"),
    "elastic_checkpoint": always("a checkpoint loads on any mesh"),
    "load_from_fp32_weights": always("a checkpoint holds the parameters in the dtype of their shards"),
    "legacy_stage1": always("there is one way"),
    "round_robin_gradients": always("gradients are reduced as they come, stage by stage; no number changes"),
    "parameter_alignment": always("shards are aligned"),
    "memory_efficient_linear": always("backward keeps no copy of gathered parameters"),
    "pipeline_loading_checkpoint": always("each rank reads its part"),
    "override_module_apply": always("nothing is overridden"),
    "log_trace_cache_warnings": OBSERVES,
    "enable_sanity_checks": yours("SHARDFN_DEBUG=memory"),
    "save_muon_momentum_buffer_in_memory": missing("the tier of all state is one: .with_tiers(state=...)", "False"),
    **same_for("reduce_bucket_size allgather_bucket_size allgather_partitions sub_group_size", _BUFFER),
    "use_multi_rank_bucket_allreduce": _BUFFER,
    **_PERSISTENT,
    **{f"stage3_{name}": meaning for name, meaning in _PERSISTENT.items()},
    "stage3_gather_fp16_weights_on_model_save": yours(
        "checkpoint.export_hf(..., dtype=torch.float16) when you want it"
    ),
    "leaf_module": Section(_LEAVES),
    "zero_hpz_partition_size": sets(
        "sf.strategies.hpz: backward gathers over {value} ranks, from a copy",
        off="no copy, as without it",
        hpz=lambda key, value: as_count(key, value, 0) if number(key, value) > 1 else None,
    ),
    "zero_quantized_weights": flag(
        sets("gather_format=quant.int8() of the stages", gather_format="quant.int8()"), always("full")
    ),
    "zero_quantized_gradients": flag(
        sets("reduce_format=quant.int4() of the stages", reduce_format="quant.int4()"), always("full")
    ),
    "zero_quantized_nontrainable_weights": missing("quant.quantize(model.tree, ...) before sf.shard", "False"),
    "zeropp_loco_param": missing("gradients are rounded without feedback of the error", "None", "{}"),
    "zenflow": missing("all gradients are used at each step", "None", "{}"),
    "mics_shard_size": sets(_GROUPS, off="no groups, as without it", mics=whole_or_all),
    "mics_hierarchical_params_gather": flag(
        sets("sf.strategies.mics: axis after axis", hierarchical=True), always("at once")
    ),
}


def _within_stages(draft: TranslationBuilder, prefix: str, settings: dict[str, Any]) -> None:
    """Checks keys that need a certain stage; marks as ineffective those that need stage 3."""
    stage_3 = draft.get("cut") == "full_shard"
    for fact, name in (("hpz", "zero_hpz_partition_size"), ("mics", "mics_shard_size"), ("params", "offload_param")):
        if fact in draft.facts and not stage_3:
            raise TranslateError(f"{prefix}{name} is for stage 3, and stage is {STAGES.index(draft.get('cut'))}")
    for fact in ("gather_format", "uncut"):
        if fact in draft.facts and not stage_3:
            for i, row in enumerate(draft.rows):
                if row.key in draft.keys_for_facts(fact):
                    draft.rows[i] = replace(row, status="always", text="of no effect before stage 3")
            draft.facts.pop(fact)
    if draft.get("hpz") and draft.get("mics"):
        raise TranslateError(f"{prefix}zero_hpz_partition_size and mics_shard_size: two strategies in one file")


def _zero(draft: TranslationBuilder, key: str, value: Any) -> None:
    if isinstance(value, bool):
        raise TranslateError(f"{key}: {value} is an old spelling, with another meaning in each version; write a stage")
    meant(draft, key, value, Section(ZERO, "DeepSpeed's ZeRO", cut="ddp", first="stage", after=_within_stages))


_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
OPTIMIZERS = {
    "adam": OptimizerCounterpart("adam", _ADAM),
    "adamw": OptimizerCounterpart("adamw", _ADAM),
    "lion": OptimizerCounterpart("lion", {"betas": (0.9, 0.99), "weight_decay": 0.0}),
    "lamb": OptimizerCounterpart("lamb", {**_ADAM, "min_coeff": 0.01, "max_coeff": 10.0}),
    "sgd": OptimizerCounterpart("sgd", {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False}),
    **{name.rpartition(".")[2].lower(): OptimizerCounterpart(name) for name in optimizers.TAKES if "." in name},
}


def _typed(
    draft: TranslationBuilder, key: str, value: Any, example: str, section: Section
) -> tuple[str, dict[str, Any]]:
    """The type and the arguments of an optimizer or a scheduler, whose other keys it reads."""
    kind = optimizers.read_kind(key, value, "type", example)
    read(draft, key, {name: x for name, x in value.items() if name not in ("type", "params")}, section)
    return kind, draft.settings(f"{key}.params", value.get("params")) or {}


def _read_optimizer(draft: TranslationBuilder, key: str, value: Any) -> None:
    section = Section({"legacy_fusion": always("one implementation")}, "an optimizer")
    name, settings = _typed(draft, key, value, "AdamW", section)
    kind, where = OPTIMIZERS.get(name.lower()), f"{key}.params."
    if kind is None:
        optimizers.unread(draft, f"{key}.type", name, where, settings)
        return
    if name.lower() == "adam" and as_switch(f"{where}adam_w_mode", settings.get("adam_w_mode", True)):
        kind = OPTIMIZERS["adamw"]
        draft.row(f"{key}.type", name, "becomes", "so.adamw: adam_w_mode is on unless it is said")
    else:
        draft.row(f"{key}.type", name, "becomes", kind.text)
    if as_switch(f"{where}torch_adam", settings.get("torch_adam", False)) and kind.ours == "adamw":
        kind = OptimizerCounterpart("adamw", {**kind.defaults, "weight_decay": 0.01})
    draft.say("optimizer", kind.ours, f"{key}.type")
    optimizers.arguments(draft, f"{key}.params", settings, kind)


def _scheduler(draft: TranslationBuilder, key: str, value: Any) -> None:
    kind, settings = _typed(draft, key, value, "WarmupLR", Section({}, "a scheduler"))
    optimizers.schedule_of_deepspeed(draft, key, kind, settings)


_CUT = missing("sequence=1 of parallel.to_parallel cuts activations between layers", "False")
CHECKPOINTING: Table = {
    "partition_activations": _CUT,
    "partitioned_activations": _CUT,
    "cpu_checkpointing": flag(fsdp.REMAT_INPUTS_AWAY, always("on the device")),
    "contiguous_memory_optimization": missing("no number changes; fragmentation may", "False"),
    "synchronize_checkpoint_boundary": always("nothing waits"),
    "number_checkpoints": always("of no effect here: there is no contiguous memory"),
    "profile": OBSERVES,
}
_CHECKPOINT: Table = {
    "tag_validation": always("ranks that save under different paths are an error"),
    "load_universal": always("a checkpoint loads on any mesh"),
    "use_node_local_storage": missing("a checkpoint is one folder that all ranks see", "False"),
    "parallel_write": always("each rank writes its part"),
    "writer": yours("checkpoint.save_async writes behind"),
}
_AXIS = "the axis tensor of make_mesh, and tensor= of functional"
_TENSOR: Table = {
    "autotp_size": sets(_AXIS, tensor=lambda key, value: natural(key, value) or None),
    "tp_size": sets(_AXIS, tensor=as_count),
    "tp_overlap_comm": missing("see docs/how-to/tensor-parallel.md", "False"),
    "dtype": missing("gather_dtype= of the stages"),
    "partition_config": missing("tensor=: a table of ends of paths", "None"),
    "preset_model": missing('tensor="auto" or a table of interop', "None"),
}
_BATCH, _ROWS = "of a product: ranks, micro-batches and rows of each", "rows of a micro-batch on one rank"
_SUM = sets("sf.psum in place of sf.pmean", mean=False)
_DATA, _BEFORE = missing("the data are yours", "{}", _OFF), "the loss is divided before the sum: the same mean"
CONFIG: Table = {
    "zero_optimization": _zero,
    "train_batch_size": sets(
        _BATCH, name="train_batch_size", about="rows of a step, on all ranks", train_batch=as_count
    ),
    "train_micro_batch_size_per_gpu": sets(_BATCH, name="micro_batch_size", about=_ROWS, micro_batch=as_count),
    "gradient_accumulation_steps": ACCUMULATE,
    "gradient_clipping": CLIP,
    **same_for("bf16 bfloat16", precision.bits("torch.bfloat16")),
    "fp16": precision.bits("torch.float16"),
    "torch_autocast": precision.AUTOCAST,
    "amp": missing("bf16 or fp16", "None", "{}", _OFF),
    "communication_data_type": precision.REDUCED,
    "fp32_allreduce": flag(sets("reduce_dtype= of the stages", reduce_dtype="torch.float32"), always("the default")),
    "seq_parallel_communication_data_type": always("of no effect without sequence parallelism"),
    "data_types": Section({"grad_accum_dtype": precision.ACCUMULATED}),
    "optimizer": _read_optimizer,
    "scheduler": _scheduler,
    "prescale_gradients": always("the loss is divided before the sum, which is the same mean"),
    "gradient_predivide_factor": missing(f"{_BEFORE}, but in 16 bits other roundings and overflows", "1.0", "1"),
    "gradient_allreduce_op": By({"mean": always("the loss is the mean over ranks"), "sum": _SUM}),
    "sparse_gradients": missing("gradients are dense: no number changes, memory may", "False"),
    "disable_allgather": always("parameters are gathered where the strategy cuts them"),
    "zero_allow_untested_optimizer": always("so.from_torch tries out whether one works on a shard"),
    "zero_force_ds_cpu_optimizer": always("one optimizer on each tier"),
    "activation_checkpointing": Section(CHECKPOINTING),
    "aio": Section(same_for(_AIO, always("four threads, which each ask for 4 MiB"))),
    "checkpoint": Section(_CHECKPOINT),
    "compile": missing("compile= of functional", "None", "{}", "{'DEEPCOMPILE': FALSE}"),
    "tensor_parallel": Section(_TENSOR),
    "sequence_parallel_size": missing("for functions: parallel.ring_attention", "1"),
    "expert_parallel_size": missing("for functions: docs/how-to/tensor-parallel.md", "1"),
    "expert_parallel": missing("for functions: docs/how-to/tensor-parallel.md", "{}"),
    "use_data_before_expert_parallelism": always("the axes of a mesh are in the order of make_mesh"),
    "pipeline": missing("for functions: parallel.pipeline", "{}", "None"),
    "elasticity": missing("torchrun's --max-restarts; the batch is yours", "{}", _OFF),
    "autotuning": missing("it trains with what it finds; write that", "{}", _OFF),
    "hybrid_engine": missing("for training alone", "{}", _OFF),
    "data_efficiency": _DATA,
    "curriculum_learning": _DATA,
    "progressive_layer_drop": missing("the model is yours", "{}", _OFF),
    "eigenvalue": missing("the model is trained as it is", "{}", _OFF),
    "sparse_attention": missing("the model is yours", "{}"),
    **same_for("compression_training quantize_training weight_quantization", _AS_IT_IS),
    "nebula": missing("checkpoint.save_async", "{}", _OFF),
    "dataloader_drop_last": yours('remainder="drop" of sf.run.batches'),
    "data_parallel_group": missing("the mesh's axes are the groups", "None"),
    "disable_python_gc": yours("gc.disable() where you want it"),
    "managed_gradient_accumulation": always("sf.accumulate is one call"),
    "graph_harvesting": missing("torch.compile around a stage", "False"),
    "use_fused_adam": always("torch's fused kernels where there are any"),
    **same_for("timers steps_per_print wall_clock_breakdown memory_breakdown dump_state flops_profiler", OBSERVES),
    **same_for("tensorboard wandb comet csv_monitor comms_logger monitor_config log_level swap_debug_config", OBSERVES),
}


def _one_of_16_bits(draft: TranslationBuilder, prefix: str, settings: dict[str, Any]) -> None:
    sections = {key: settings[key] for key in ("bf16", "bfloat16", "fp16") if isinstance(settings.get(key), Mapping)}
    enabled = [key for key, section in sections.items() if section.get("enabled") is True]
    if len(enabled) > 1:
        raise TranslateError(f"{enabled[0]} and {enabled[1]} are both enabled")


FILE = Section(CONFIG, "DeepSpeed", last="bf16 bfloat16 fp16", cut="ddp", before=_one_of_16_bits)
