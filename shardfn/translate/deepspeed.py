"""What the keys of DeepSpeed's JSON mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardfn.translate.draft import Draft
from shardfn.translate.facts import Call, TranslateError
from shardfn.translate.meanings import (
    By,
    Meaning,
    Section,
    Table,
    Whole,
    always,
    apply,
    flag,
    meant,
    missing,
    sets,
    yours,
)
from shardfn.translate.values import dtype, is_open, number, on, pair, shown, whole, word, words

STAGES = ("ddp", "zero1", "zero2", "full_shard")
ACCUMULATE = sets(
    "as many micro-batches in sf.accumulate, and the loss divided by them",
    name="micro_batches",
    about="micro-batches of a step",
    accumulate=whole,
)
_OBSERVES = yours("it only looks on: what is printed or logged is yours")
_BUFFER = always("a stage's gradients, and its parameters, of one dtype are one buffer")
_DISK = always("four threads, which each ask for 4 MiB")
_TIER = always("buffers follow from prefetch=, and sf.memory says what they take")
_COMPRESSED = missing("the model is trained as it is: quant, and docs/few-bits.md", "None", "{}")


def _clip(key: str, value: Any) -> float | None:
    return number(key, value) or None


CLIP = sets("so.clip_by_global_norm", name="max_grad_norm", about="gradient_clipping", clip=_clip)
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


def sixteen_bits(draft: Draft, made: str, key: str) -> None:
    """DeepSpeed's 16 bits: a master in float32, and all that moves in the dtype of the model."""
    draft.say("gather_dtype", made, key)
    draft.say("cast_inputs", True, key)
    draft.facts.setdefault("reduce_dtype", made)
    draft.keys.setdefault("reduce_dtype", (key,))
    if made == "torch.float16":
        draft.facts.setdefault("scaled", {})
        draft.keys.setdefault("scaled", (key,))


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
    "log_trace_cache_warnings": _OBSERVES,
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


def _zero(draft: Draft, key: str, value: Any) -> None:
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


_NOT_SCALED = {
    "hysteresis": "the scale shrinks at the first gradient that is not finite",
    "min_loss_scale": "the scale has no least value",
}
SIXTEEN: Table = {
    "enabled": sets("see below"),
    "loss_scale": Whole(lambda draft, key, value: _scale(draft, key, value)),
    "initial_scale_power": Whole(lambda draft, key, value: _scaling(draft, key, value, "scale")),
    "loss_scale_window": Whole(lambda draft, key, value: _scaling(draft, key, value, "every")),
    "hysteresis": missing(_NOT_SCALED["hysteresis"], "1"),
    "consecutive_hysteresis": always("there is no hysteresis"),
    "min_loss_scale": missing(_NOT_SCALED["min_loss_scale"], "0"),
    "auto_cast": flag(always("input_dtype= casts what stages get"), always("input_dtype= casts what stages get")),
    "fp16_master_weights_and_grads": missing("the master is the float32 shard", "False"),
    "bf16_master_weights_and_grads": missing("module.to(torch.bfloat16) has no master in float32", "False"),
    "bf16_optimizer_states": flag(
        sets("state_dtype=torch.bfloat16 of the optimizer", state_dtype="torch.bfloat16"), always("float32")
    ),
    "immediate_grad_update": always("gradients are added up as they come"),
    "check_grad_overflow": flag(
        sets("so.skip_nonfinite", skip_nonfinite=True), always("no check unless one is asked for")
    ),
    "check_overflow": flag(sets("so.skip_nonfinite", skip_nonfinite=True), always("no check unless one is asked for")),
}


def _scale(draft: Draft, key: str, value: Any) -> None:
    if is_open(value):
        meant(draft, key, value, sets("so.loss_scaled", ignored=number))
        return
    fixed = number(key, value)
    if fixed:
        draft.facts["scaled"] = {"scale": fixed, "growth": 1.0, "backoff": 1.0}
        draft.keys["scaled"] = (*draft.of("scaled"), key)
        draft.facts["fixed_scale"] = True
    draft.row(key, value, "becomes", "so.loss_scaled, " + ("with this scale always" if fixed else "whose scale adapts"))


def _scaling(draft: Draft, key: str, value: Any, argument: str) -> None:
    if is_open(value):
        draft.row(key, value, "open", f"its value is not in the file; {argument}= of so.loss_scaled")
    elif draft.get("fixed_scale"):
        draft.row(key, value, "always", "of no effect with a fixed loss_scale")
    else:
        found = whole(key, value, 0)
        draft.facts["scaled"] = {**draft.get("scaled", {}), argument: 2.0**found if argument == "scale" else found}
        draft.keys["scaled"] = (*draft.of("scaled"), key)
        draft.row(key, value, "becomes", f"{argument}= of so.loss_scaled")


def _bits(made: str) -> Whole:
    def read(draft: Draft, key: str, value: Any) -> None:
        if isinstance(value, bool):
            value = {"enabled": value}
        if not isinstance(value, Mapping):
            raise TranslateError(f"{key}: {shown(value)} is not a mapping of keys")
        enabled = value.get("enabled", False)
        if is_open(enabled):
            draft.row(f"{key}.enabled", enabled, "open", "its value is not in the file; the lines for 16 bits")
            enabled = False
        elif on(f"{key}.enabled", enabled):
            sixteen_bits(draft, made, f"{key}.enabled")
            text = f"gather_dtype=, reduce_dtype= and input_dtype= of the stages: {made}"
            draft.row(f"{key}.enabled", True, "becomes", text)
            if made == "torch.float16":
                _dynamic(draft, key, value)
        rest = {
            name: one for name, one in sorted(value.items(), key=lambda i: i[0] != "loss_scale") if name != "enabled"
        }
        if not on(key, enabled):
            apply(draft, {"off": {"enabled": False, **rest}}, {"off": Section(SIXTEEN, "enabled")}, f"{key}.")
            draft.rows[:] = [_shorter(row, f"{key}.off.", f"{key}.") for row in draft.rows]
        else:
            apply(draft, rest, SIXTEEN, f"{key}.", "DeepSpeed")

    return Whole(read)


def _shorter(row: Any, old: str, new: str) -> Any:
    return replace(row, key=row.key.replace(old, new, 1))


def _dynamic(draft: Draft, key: str, value: Mapping[str, Any]) -> None:
    """Defaults that are others than those of so.loss_scaled, where the scale adapts."""
    scale = value.get("loss_scale", 0)
    if not is_open(scale) and not number(f"{key}.loss_scale", scale):
        draft.facts["scaled"] = {"every": 1000, **draft.get("scaled", {})}
        for name, default in (("hysteresis", 2), ("min_loss_scale", 1)):
            if name not in value:
                draft.row(f"{key}.{name}", f"{default}, the default", "missing", _NOT_SCALED[name])


_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("adam", _ADAM),
    "adamw": ("adamw", _ADAM),
    "lion": ("lion", {"betas": (0.9, 0.99), "weight_decay": 0.0}),
    "sgd": ("sgd", {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False}),
    "adagrad": ("torch.optim.Adagrad", {}),
    "adadelta": ("torch.optim.Adadelta", {}),
    "rmsprop": ("torch.optim.RMSprop", {}),
    "nadam": ("torch.optim.NAdam", {}),
    "radam": ("torch.optim.RAdam", {}),
    "adamax": ("torch.optim.Adamax", {}),
}
_NEUTRAL: dict[str, Meaning] = {
    "torch_adam": always("one implementation on each tier"),
    "adam_w_mode": always("whether it is so.adamw or so.adam"),
    "bias_correction": missing("it is always there", "True"),
    "amsgrad": missing("so.from_torch(torch.optim.AdamW, amsgrad=True, ...)", "False"),
    "fp32_optimizer_states": missing("state has the dtype of the parameters' shards, float32 here", "True"),
    "dampening": missing("so.from_torch(torch.optim.SGD, dampening=...)", "0", "0.0"),
    "maximize": missing("the loss with the other sign", "False"),
    "fused": always("torch's fused kernels where there are any"),
    "foreach": always("torch's fused kernels where there are any"),
    "set_grad_none": always("gradients are values"),
    "amp": always("see fp16"),
}


def _optimizer(draft: Draft, key: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise TranslateError(f"{key}: {shown(value)} has no type, such as AdamW")
    for name, one in value.items():
        if name not in ("type", "params"):
            text = "one implementation" if name == "legacy_fusion" else "no key of an optimizer that is known here"
            draft.row(f"{key}.{name}", one, "always" if name == "legacy_fusion" else "unknown", text)
    kind, given = value["type"].lower(), value.get("params") or {}
    if not isinstance(given, Mapping):
        raise TranslateError(f"{key}.params: {shown(given)} is not a mapping of keys")
    if kind == "auto" or kind not in OPTIMIZERS:
        near = "; Muon of theirs scales and groups parameters otherwise than so.muon" if kind == "muon" else ""
        said = "the program has the name optimizer for yours"
        if kind == "auto":
            draft.row(f"{key}.type", value["type"], "open", f"its value is not in the file: {said}")
        else:
            draft.row(f"{key}.type", value["type"], "missing", f"not there{near}: {said}")
        for name, one in given.items():
            draft.row(f"{key}.params.{name}", one, "open", "an argument of that optimizer")
        return
    make, defaults = OPTIMIZERS[kind]
    if kind == "adam" and on(f"{key}.params.adam_w_mode", given.get("adam_w_mode", True)):
        make = "adamw"
        draft.row(f"{key}.type", value["type"], "becomes", "so.adamw: adam_w_mode is on unless it is said")
    else:
        draft.row(
            f"{key}.type", value["type"], "becomes", f"so.{make}" if "." not in make else f"so.from_torch({make}, ...)"
        )
    draft.say("optimizer", make, f"{key}.type")
    found = dict(defaults)
    if on(f"{key}.params.torch_adam", given.get("torch_adam", False)) and make == "adamw":
        found["weight_decay"] = 0.01
    for name, one in given.items():
        where = f"{key}.params.{name}"
        if name in _NEUTRAL and "." not in make:
            meant(draft, where, one, _NEUTRAL[name])
        elif name == "lr" or name in defaults or "." in make:
            found[name] = _argument(draft, where, name, one, make)
            draft.facts["optimizer_keys"] = (*draft.get("optimizer_keys", ()), where)
        else:
            draft.row(where, one, "unknown", f"no argument of so.{make}")
    if "lr" not in found:
        found["lr"] = draft.name("lr", "the learning rate")
        draft.row(f"{key}.params.lr", "not said", "open", "the program has the name lr for it")
    draft.facts["optimizer_params"] = found


def _argument(draft: Draft, key: str, name: str, value: Any, make: str) -> Any:
    if is_open(value):
        draft.row(key, value, "open", f"its value is not in the file: the program has the name {name} for it")
        return draft.name(name, f"of the optimizer, {name}")
    draft.row(key, value, "becomes", {"betas": "b1= and b2= of so." + make}.get(name, f"{name}= of the optimizer"))
    if name == "betas":
        return pair(key, value)
    return value if isinstance(value, bool) or ("." in make and not isinstance(value, str)) else number(key, value)


SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {
        "total_num_steps": None,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupCosineLR": {
        "total_num_steps": None,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
}


def _scheduler(draft: Draft, key: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise TranslateError(f"{key}: {shown(value)} has no type, such as WarmupLR")
    kind, given = value["type"], value.get("params") or {}
    if not isinstance(given, Mapping):
        raise TranslateError(f"{key}.params: {shown(given)} is not a mapping of keys")
    if kind not in SCHEDULES:
        why = (
            "it moves momentum too, which is a number here" if kind == "OneCycle" else "a function of the step is yours"
        )
        draft.row(f"{key}.type", kind, "missing", f"not there: {why}")
        for name, one in given.items():
            draft.row(f"{key}.params.{name}", one, "open", "an argument of that scheduler")
        return
    found = dict(SCHEDULES[kind])
    draft.row(f"{key}.type", kind, "becomes", "a function of the step")
    for name, one in given.items():
        where = f"{key}.params.{name}"
        if name == "last_batch_iteration" and one == -1:
            draft.row(where, one, "always", "a run begins at its first step")
        elif name not in found:
            draft.row(where, one, "unknown", f"no argument of {kind}")
        elif is_open(one):
            found[name] = draft.name(name, f"of {kind}")
            draft.row(where, one, "open", f"its value is not in the file: the program has the name {name} for it")
        else:
            found[name] = _rated(where, name, one)
            draft.row(where, one, "becomes", "a number in that function")
    for name, one in found.items():
        if one is None and name == "total_num_steps":
            raise TranslateError(f"{key}.params: {kind} has no total_num_steps")
    draft.say("schedule", (kind, tuple(found.items())), f"{key}.type", *(f"{key}.params.{name}" for name in given))


def _rated(key: str, name: str, value: Any) -> Any:
    if name == "warmup_type":
        if value not in ("log", "linear"):
            raise TranslateError(f"{key}: {shown(value)} is not log or linear")
        return value
    if name == "lr_range_test_staircase":
        return on(key, value)
    return whole(key, value) if name.endswith(("_steps", "_size")) else number(key, value)


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
    "profile": _OBSERVES,
}

_BATCH = "of a product: ranks, micro-batches and rows of each"

CONFIG: Table = {
    "zero_optimization": Whole(_zero),
    "train_batch_size": sets(_BATCH, name="train_batch_size", about="rows of a step, on all ranks", train_batch=whole),
    "train_micro_batch_size_per_gpu": sets(
        _BATCH, name="micro_batch_size", about="rows of a micro-batch on one rank", micro_batch=whole
    ),
    "gradient_accumulation_steps": ACCUMULATE,
    "gradient_clipping": CLIP,
    "bf16": _bits("torch.bfloat16"),
    "bfloat16": _bits("torch.bfloat16"),
    "fp16": _bits("torch.float16"),
    "torch_autocast": Whole(lambda draft, key, value: _autocast(draft, key, value)),
    "amp": missing("bf16 or fp16", "None", "{}", "{'ENABLED': FALSE}"),
    "communication_data_type": Whole(_communication),
    "seq_parallel_communication_data_type": always("of no effect without sequence parallelism"),
    "data_types": Section(
        {
            "grad_accum_dtype": Whole(lambda draft, key, value: _accumulated(draft, key, value)),
        }
    ),
    "optimizer": Whole(_optimizer),
    "scheduler": Whole(_scheduler),
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
            _DISK,
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
            "tp_overlap_comm": missing("see docs/parallel.md", "False"),
            "dtype": missing("gather_dtype= of the stages"),
            "partition_config": missing("tensor=: a table of ends of paths", "None"),
            "preset_model": missing('tensor="auto" or a table of interop', "None"),
        }
    ),
    "sequence_parallel_size": missing("for functions: parallel.ring_attention", "1"),
    "expert_parallel_size": missing("for functions: docs/parallel.md", "1"),
    "expert_parallel": missing("for functions: docs/parallel.md", "{}"),
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
    "timers": _OBSERVES,
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
        _OBSERVES,
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
        if name == "lower_precision_safe_modules" and enabled and one:
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
        said = ", ".join(f"{name} {one}" for name, one in known.items())
        raise TranslateError(f"train_batch_size: {total} is not the product of {said}, and of what is not said")


__all__ = ["ACCUMULATE", "CLIP", "CONFIG", "SCRATCH", "batches", "device", "sixteen_bits", "stage", "translate"]
