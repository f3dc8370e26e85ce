"""What the keys of DeepSpeed's JSON mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardfn.quoting import listed
from shardfn.translate.deepspeed_bits import bits
from shardfn.translate.deepspeed_optimizers import optimizer, scheduler
from shardfn.translate.deepspeed_zero import DISK, OBSERVES, zero
from shardfn.translate.draft import Draft
from shardfn.translate.facts import TranslateError
from shardfn.translate.meanings import (
    By,
    Section,
    Table,
    Whole,
    always,
    apply,
    flag,
    missing,
    sets,
    yours,
)
from shardfn.translate.values import dtype, is_open, number, on, shown, whole

ACCUMULATE = sets(
    "as many micro-batches in sf.accumulate, and the loss divided by them",
    name="micro_batches",
    about="micro-batches of a step",
    accumulate=whole,
)
_COMPRESSED = missing("the model is trained as it is: quant, and docs/reference/few-bits.md", "None", "{}")


def _clip(key: str, value: Any) -> float | None:
    return number(key, value) or None


CLIP = sets("so.clip_by_global_norm", name="max_grad_norm", about="gradient_clipping", clip=_clip)


def _communication(draft: Draft, key: str, value: Any) -> None:
    made = None if is_open(value) else dtype(key, value)
    if is_open(value):
        draft.row(key, value, "open", "its value is not in the file; reduce_dtype= of the stages")
    elif made:
        draft.facts["reduce_dtype"], draft.keys["reduce_dtype"] = made, (key,)
        draft.row(key, value, "becomes", "reduce_dtype= of the stages")
    else:
        draft.row(key, value, "always", "the default")


_CHECKPOINTING: Table = {
    "partition_activations": missing("sequence=1 of parallel.to_parallel cuts activations between layers", "False"),
    "partitioned_activations": missing("sequence=1 of parallel.to_parallel cuts activations between layers", "False"),
    "cpu_checkpointing": flag(sets('remat="offload"', remat='"offload"'), always("on the device")),
    "contiguous_memory_optimization": missing("no number changes; fragmentation may", "False"),
    "synchronize_checkpoint_boundary": always("nothing waits"),
    "number_checkpoints": always("of no effect here: there is no contiguous memory"),
    "profile": OBSERVES,
}

_BATCH = "of a product: ranks, micro-batches and rows of each"

CONFIG: Table = {
    "zero_optimization": Whole(zero),
    "train_batch_size": sets(_BATCH, name="train_batch_size", about="rows of a step, on all ranks", train_batch=whole),
    "train_micro_batch_size_per_gpu": sets(
        _BATCH, name="micro_batch_size", about="rows of a micro-batch on one rank", micro_batch=whole
    ),
    "gradient_accumulation_steps": ACCUMULATE,
    "gradient_clipping": CLIP,
    "bf16": bits("torch.bfloat16"),
    "bfloat16": bits("torch.bfloat16"),
    "fp16": bits("torch.float16"),
    "torch_autocast": Whole(lambda draft, key, value: _autocast(draft, key, value)),
    "amp": missing("bf16 or fp16", "None", "{}", "{'ENABLED': FALSE}"),
    "communication_data_type": Whole(_communication),
    "seq_parallel_communication_data_type": always("of no effect without sequence parallelism"),
    "data_types": Section(
        {
            "grad_accum_dtype": Whole(lambda draft, key, value: _accumulated(draft, key, value)),
        }
    ),
    "optimizer": Whole(optimizer),
    "scheduler": Whole(scheduler),
    "prescale_gradients": flag(
        always("gradients are divided before the sum, since the loss is"),
        always("the loss is divided before the sum, which is the same mean"),
    ),
    "gradient_predivide_factor": missing(
        "the loss is divided before the sum: the same mean, but in 16 bits other roundings and overflows", "1.0", "1"
    ),
    "gradient_allreduce_op": By(
        {
            "MEAN": always("the loss is the mean over ranks"),
            "SUM": sets("sf.psum in place of sf.pmean", mean=False),
        }
    ),
    "sparse_gradients": missing("gradients are dense: no number changes, memory may", "False"),
    "fp32_allreduce": Whole(lambda draft, key, value: _communication(draft, key, "fp32" if on(key, value) else None)),
    "disable_allgather": always("parameters are gathered where the strategy cuts them"),
    "zero_allow_untested_optimizer": always("so.from_torch tries out whether one works on a shard"),
    "zero_force_ds_cpu_optimizer": always("one optimizer on each tier"),
    "activation_checkpointing": Section(_CHECKPOINTING),
    "aio": Section(
        dict.fromkeys(
            [
                "block_size",
                "queue_depth",
                "thread_count",
                "intra_op_parallelism",
                "single_submit",
                "overlap_events",
                "use_gds",
            ],
            DISK,
        )
    ),
    "checkpoint": Section(
        {
            "tag_validation": always("ranks that save under different paths are an error"),
            "load_universal": always("a checkpoint loads on any mesh"),
            "use_node_local_storage": missing("a checkpoint is one folder that all ranks see", "False"),
            "parallel_write": always("each rank writes its part"),
            "writer": yours("checkpoint.save_async writes behind"),
        }
    ),
    "compile": missing("compile= of functional", "None", "{}", "{'DEEPCOMPILE': FALSE}"),
    "tensor_parallel": Section(
        {
            "autotp_size": sets(
                "the axis tensor of make_mesh, and tensor= of functional", tensor=lambda k, v: whole(k, v, 0) or None
            ),
            "tp_size": sets("the axis tensor of make_mesh, and tensor= of functional", tensor=whole),
            "tp_overlap_comm": missing("see docs/how-to/tensor-parallel.md", "False"),
            "dtype": missing("gather_dtype= of the stages"),
            "partition_config": missing("tensor=: a table of ends of paths", "None"),
            "preset_model": missing('tensor="auto" or a table of interop', "None"),
        }
    ),
    "sequence_parallel_size": missing("for functions: parallel.ring_attention", "1"),
    "expert_parallel_size": missing("for functions: docs/how-to/tensor-parallel.md", "1"),
    "expert_parallel": missing("for functions: docs/how-to/tensor-parallel.md", "{}"),
    "use_data_before_expert_parallelism": always("the axes of a mesh are in the order of make_mesh"),
    "pipeline": missing("for functions: parallel.pipeline", "{}", "None"),
    "elasticity": missing("torchrun's --max-restarts; the batch is yours", "{}", "{'ENABLED': FALSE}"),
    "autotuning": missing("it trains with what it finds; write that", "{}", "{'ENABLED': FALSE}"),
    "hybrid_engine": missing("for training alone", "{}", "{'ENABLED': FALSE}"),
    "data_efficiency": missing("the data are yours", "{}", "{'ENABLED': FALSE}"),
    "curriculum_learning": missing("the data are yours", "{}", "{'ENABLED': FALSE}"),
    "progressive_layer_drop": missing("the model is yours", "{}", "{'ENABLED': FALSE}"),
    "eigenvalue": missing("the model is trained as it is", "{}", "{'ENABLED': FALSE}"),
    "sparse_attention": missing("the model is yours", "{}"),
    "compression_training": _COMPRESSED,
    "quantize_training": _COMPRESSED,
    "weight_quantization": _COMPRESSED,
    "nebula": missing("checkpoint.save_async", "{}", "{'ENABLED': FALSE}"),
    "dataloader_drop_last": yours('last="drop" of sf.run.batches'),
    "data_parallel_group": missing("the mesh's axes are the groups", "None"),
    "disable_python_gc": yours("gc.disable() where you want it"),
    "managed_gradient_accumulation": always("sf.accumulate is one call"),
    "graph_harvesting": missing("torch.compile around a stage", "False"),
    "use_fused_adam": always("torch's fused kernels where there are any"),
    "timers": OBSERVES,
    **dict.fromkeys(
        [
            "steps_per_print",
            "wall_clock_breakdown",
            "memory_breakdown",
            "dump_state",
            "flops_profiler",
            "tensorboard",
            "wandb",
            "comet",
            "csv_monitor",
            "comms_logger",
            "monitor_config",
            "log_level",
            "swap_debug_config",
        ],
        OBSERVES,
    ),
}


def _accumulated(draft: Draft, key: str, value: Any) -> None:
    made = None if is_open(value) else dtype(key, value)
    if made in (None, "torch.float32"):
        draft.row(
            key, value, "open" if is_open(value) else "always", "gradients are added up in the dtype of the shards"
        )
    else:
        draft.row(key, value, "missing", "gradients are added up in the dtype of the shards, float32")


def _autocast(draft: Draft, key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TranslateError(f"{key}: {shown(value)} is not a mapping of keys")
    enabled = on(f"{key}.enabled", value.get("enabled", False))
    made = dtype(f"{key}.dtype", value.get("dtype", "bfloat16"))
    for name, one in value.items():
        if name not in ("enabled", "dtype", "lower_precision_safe_modules"):
            draft.row(f"{key}.{name}", one, "unknown", "no key of torch_autocast that is known here")
        elif name == "lower_precision_safe_modules" and enabled and one:
            draft.row(f"{key}.{name}", one, "missing", "torch.autocast is around the whole model")
        else:
            said = enabled and name in ("enabled", "dtype")
            text = "torch.autocast around the model" if enabled else "switched off"
            draft.row(f"{key}.{name}", one, "becomes" if said else "always", text)
    if enabled:
        draft.say("autocast", made, f"{key}.enabled", *([f"{key}.dtype"] if "dtype" in value else []))


def translate(draft: Draft, given: Mapping[str, Any], prefix: str = "") -> None:
    """DeepSpeed's JSON.

    Raises:
        TranslateError: fp16 and bf16 at once; batch sizes whose product is another.
    """
    last = ("bf16", "bfloat16", "fp16")
    ordered = {
        **{key: given[key] for key in given if key not in last},
        **{key: given[key] for key in last if key in given},
    }
    both = [key for key in last if isinstance(given.get(key), Mapping) and given[key].get("enabled") is True]
    if len(both) > 1:
        raise TranslateError(f"{both[0]} and {both[1]} are both enabled")
    apply(draft, ordered, CONFIG, prefix, "DeepSpeed")
    if draft.get("hpz"):
        draft.facts["cut"], draft.facts["shard"] = "hpz", draft.get("hpz")
        draft.keys["cut"], draft.keys["shard"] = draft.of("cut", "hpz"), draft.of("hpz")
    if draft.get("mics"):
        draft.facts["cut"] = "mics" if draft.get("hierarchical") else "hybrid_shard"
        draft.facts["shard"], draft.keys["shard"] = draft.get("mics"), draft.of("mics")
        draft.keys["cut"] = draft.of("cut", "mics", "hierarchical")
    draft.facts.setdefault("cut", "ddp")


def batches(draft: Draft) -> None:
    """The product rule: rows of a step = ranks x micro-batches x rows of one.

    Raises:
        TranslateError: all are said, and it does not hold.
    """
    total, micro = draft.get("train_batch"), draft.get("micro_batch")
    count, ranks = draft.get("accumulate"), draft.get("ranks")
    if not all(isinstance(one, (int, type(None))) for one in (total, micro, count)) or total is None:
        return
    ranks = ranks and ranks // draft.get("tensor", 1)
    parts = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": count, "ranks": ranks}
    known = {name: one for name, one in parts.items() if one}
    product = 1
    for one in known.values():
        product *= one
    if total % product or (len(known) == 3 and total != product):
        said = listed(f"{name} {one}" for name, one in known.items())
        raise TranslateError(f"train_batch_size: {total} is not the product of {said}, and of what is not said")


__all__ = ["ACCUMULATE", "CLIP", "CONFIG", "batches", "translate"]
