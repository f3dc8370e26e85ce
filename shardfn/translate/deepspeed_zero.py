"""What the keys of DeepSpeed's `zero_optimization` mean: a strategy, and the tiers of what it cuts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardfn.translate.draft import Draft
from shardfn.translate.facts import Call, TranslateError
from shardfn.translate.meanings import (
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
from shardfn.translate.values import is_open, number, on, shown, whole, word, words

STAGES = ("ddp", "zero1", "zero2", "full_shard")
_BUFFER = always("a stage's gradients, and its parameters, of one dtype are one buffer")
OBSERVES = yours("it only looks on: what is printed or logged is yours")
DISK = always("four threads, which each ask for 4 MiB")
_TIER = always("buffers follow from prefetch=, and sf.memory says what they take")
SCRATCH = sets(
    "scratch= of make_mesh", scratch=lambda key, value: None if str(value) in ("none", "None") else str(value)
)


def stage(draft: Draft, key: str, value: Any) -> None:
    """0 to 3, which in DeepSpeed's own file have one meaning."""
    if is_open(value):
        draft.row(key, value, "open", "its value is not in the file; one of 0 to 3")
        return
    found = whole(key, value, 0)
    if found > 3:
        raise TranslateError(f"{key}: {found} is not one of 0, 1, 2, 3")
    draft.say("cut", STAGES[found], key)
    draft.row(key, value, "becomes", f"the strategy sf.{STAGES[found]}")


def device(draft: Draft, key: str, value: Any, kind: str) -> None:
    """Where optimizer state, with gradients, or parameters go: "none", "cpu" or "nvme"."""
    tiers = {"NONE": None, "CPU": "host", "NVME": "disk"}
    if word(value) not in tiers:
        if is_open(value):
            draft.row(key, value, "open", "its value is not in the file; none, cpu or nvme")
            return
        raise TranslateError(f"{key}: {shown(value)} is not none, cpu or nvme")
    tier = tiers[word(value)]
    if tier is None:
        draft.row(key, value, "always", "the device")
        return
    facts = ("grads", "state") if kind == "optimizer" else ("params",)
    for fact in facts:
        draft.say(fact, tier, key)
    said = ", ".join(f'{fact}="{tier}"' for fact in facts)
    draft.row(key, value, "becomes", f".on({said}) of the strategy")


def _offload(kind: str) -> Whole:
    def read(draft: Draft, key: str, value: Any) -> None:
        if value is None or value == {}:
            return
        if isinstance(value, Call):
            value = value.arguments
        if not isinstance(value, Mapping):
            raise TranslateError(f"{key}: {shown(value)} is not a mapping of keys")
        place = value.get("device", "none")
        table: Table = {
            "device": Whole(lambda d, k, v: device(d, k, v, kind)),
            "nvme_path": SCRATCH if word(place) == "NVME" else always("of no effect without nvme"),
            "pin_memory": always("memory of the host is pinned on CUDA"),
            "fast_init": always("state on disk is zeros that nobody writes"),
            "ratio": missing("a strategy that is a function of path and shape says which parameters", "1.0", "1"),
            "super_offload": missing("a step reads and writes a stretch ahead", "False"),
            "cpuadam_cores_perc": always("of no effect without super_offload"),
            **dict.fromkeys(("buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write"), _TIER),
            "pipeline": _TIER,
        }
        apply(draft, value, table, f"{key}.", "DeepSpeed")

    return Whole(read)


def _legacy(kind: str) -> Whole:
    return Whole(lambda draft, key, value: device(draft, key, "cpu" if on(key, value) else "none", kind))


def _hpz(draft: Draft, key: str, value: Any) -> None:
    if is_open(value):
        draft.row(key, value, "open", "its value is not in the file; with one it is sf.hpz")
        return
    size = whole(key, value, 0)
    if size > 1:
        draft.say("hpz", size, key)
        draft.row(key, value, "becomes", f"sf.hpz: backward gathers over {size} ranks, from a copy")
    else:
        draft.row(key, value, "always", "no copy, as without it")


ZERO: Table = {
    "stage": Whole(stage),
    "offload_optimizer": _offload("optimizer"),
    "offload_param": _offload("param"),
    "cpu_offload": _legacy("optimizer"),
    "cpu_offload_param": _legacy("param"),
    "cpu_offload_params": _legacy("param"),
    "cpu_offload_use_pin_memory": always("memory of the host is pinned on CUDA"),
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
    "save_muon_momentum_buffer_in_memory": missing("the tier of all state is one: .on(state=...)", "False"),
    **dict.fromkeys(
        [
            "reduce_bucket_size",
            "allgather_bucket_size",
            "allgather_partitions",
            "use_multi_rank_bucket_allreduce",
            "sub_group_size",
        ],
        _BUFFER,
    ),
    "stage3_max_live_parameters": always("prefetch + 1 buffers, each as large as the largest stage"),
    "max_live_parameters": always("prefetch + 1 buffers, each as large as the largest stage"),
    "stage3_max_reuse_distance": always("what is still in those buffers is not gathered again"),
    "max_reuse_distance": always("what is still in those buffers is not gathered again"),
    "stage3_prefetch_bucket_size": always("gathers run one stage ahead: prefetch=, a number of stages, says how many"),
    "prefetch_bucket_size": always("gathers run one stage ahead: prefetch=, a number of stages, says how many"),
    "stage3_param_persistence_threshold": sets(
        "sf.uncut(strategy, below={value}): smaller parameters stay whole",
        name="persistence_threshold",
        about="parameters with fewer elements stay whole",
        uncut=lambda k, v: whole(k, v, 0),
    ),
    "param_persistence_threshold": sets(
        "sf.uncut(strategy, below={value}): smaller parameters stay whole",
        name="persistence_threshold",
        about="parameters with fewer elements stay whole",
        uncut=lambda k, v: whole(k, v, 0),
    ),
    "stage3_model_persistence_threshold": missing("nothing bounds the sum of what stays whole: uncut(below=) alone"),
    "model_persistence_threshold": missing("nothing bounds the sum of what stays whole: uncut(below=) alone"),
    "stage3_gather_16bit_weights_on_model_save": yours("checkpoint.export(..., dtype=torch.bfloat16) when you want it"),
    "gather_16bit_weights_on_model_save": yours("checkpoint.export(..., dtype=torch.bfloat16) when you want it"),
    "stage3_gather_fp16_weights_on_model_save": yours("checkpoint.export(..., dtype=torch.float16) when you want it"),
    "stage3_module_granularity_threshold": always("stages= says what is gathered as a whole"),
    "module_granularity_threshold": always("stages= says what is gathered as a whole"),
    "stage3_use_all_reduce_for_fetch_params": always("an all-gather; no number changes"),
    "use_all_reduce_for_fetch_params": always("an all-gather; no number changes"),
    "stage3_allgather_sequential": always("parameters of a stage are one buffer, gathered at once"),
    "allgather_sequential": always("parameters of a stage are one buffer, gathered at once"),
    "leaf_module": Section(
        {
            "classes": sets("stages={...} of functional: the outermost match is one stage", stages=words),
            "names": missing("stages=: regular expressions of whole paths", "[]"),
            "name_suffixes": missing("stages=: regular expressions of whole paths", "[]"),
        }
    ),
    "zero_hpz_partition_size": Whole(_hpz),
    "zero_quantized_weights": flag(sets("gather=quant.int8() of the stages", gather="quant.int8()"), always("full")),
    "zero_quantized_gradients": flag(sets("reduce=quant.int4() of the stages", reduce="quant.int4()"), always("full")),
    "zero_quantized_nontrainable_weights": missing(
        "quant.quantize(model.tree, ..., names=...) before sf.shard", "False"
    ),
    "zeropp_loco_param": missing("gradients are rounded without feedback of the error", "None", "{}"),
    "zenflow": missing("all gradients are used at each step", "None", "{}"),
    "mics_shard_size": Whole(lambda draft, key, value: _mics(draft, key, value)),
    "mics_hierarchical_params_gather": flag(
        sets("sf.mics: one axis after another", hierarchical=True), always("at once")
    ),
}


def _mics(draft: Draft, key: str, value: Any) -> None:
    if is_open(value):
        draft.row(key, value, "open", "its value is not in the file; with one it is sf.hybrid_shard")
        return
    size = number(key, value, -1)
    if size > 0:
        draft.say("mics", whole(key, value), key)
        draft.row(key, value, "becomes", f"sf.hybrid_shard over groups of {int(size)} ranks")
    else:
        draft.row(key, value, "always", "no groups, as without it")


def zero(draft: Draft, key: str, value: Any) -> None:
    """The mapping `zero_optimization`."""
    if isinstance(value, bool):
        raise TranslateError(f"{key}: {value} is an old spelling, with another meaning in each version; write a stage")
    if not isinstance(value, Mapping):
        raise TranslateError(f"{key}: {shown(value)} is not a mapping of keys")
    apply(draft, value, ZERO, f"{key}.", "DeepSpeed's ZeRO")
    draft.facts.setdefault("cut", "ddp")
    cut, needs = (
        draft.get("cut"),
        {"hpz": "zero_hpz_partition_size", "mics": "mics_shard_size", "params": "offload_param"},
    )
    for fact, name in needs.items():
        if fact in draft.facts and cut != "full_shard":
            raise TranslateError(f"{key}.{name} is for stage 3, and stage is {STAGES.index(cut)}")
    for fact, name in (("gather", "zero_quantized_weights"), ("uncut", "stage3_param_persistence_threshold")):
        if fact in draft.facts and cut != "full_shard":
            draft.facts.pop(fact)
            _effect(draft, f"{key}.{name}", "of no effect before stage 3")
    if draft.get("hpz") and draft.get("mics"):
        raise TranslateError(f"{key}: zero_hpz_partition_size and mics_shard_size: two strategies in one file")


def _effect(draft: Draft, key: str, text: str) -> None:
    draft.rows[:] = [replace(row, status="always", text=text) if row.key == key else row for row in draft.rows]
