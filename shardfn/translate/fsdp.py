"""What FSDP's arguments mean: those of FSDP1 and FSDP2, under PyTorch's names."""

from __future__ import annotations

from typing import Any

from shardfn.translate.draft import Draft
from shardfn.translate.facts import Call, Source, TranslateError
from shardfn.translate.meanings import (
    By,
    Meaning,
    Table,
    Whole,
    always,
    apply,
    flag,
    meant,
    missing,
    sets,
    strangers,
    yours,
)
from shardfn.translate.values import dtype, is_open, number, on, shown, whole, word, words

CUTS = {
    "FULL_SHARD": "full_shard",
    "SHARD_GRAD_OP": "shard_grad_op",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "hybrid_shard",
    "_HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
    "HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
}
CUT = {name: sets(f"the strategy sf.{ours}", cut=ours) for name, ours in CUTS.items()}
PREFETCH = By(
    {
        "BACKWARD_PRE": sets("prefetch=1, which is the default", prefetch=1),
        "BACKWARD_POST": always("gathers run one stage ahead, earlier than there; no number changes"),
        "NONE": sets("prefetch=0, forward and backward", prefetch=0),
        "NO_PREFETCH": sets("prefetch=0, forward and backward", prefetch=0),
    }
)
FORWARD = always("forward gathers ahead, by prefetch= stages; no number changes")
AWAY = sets('.on(params="host", grads="host", state="host")', params="host", grads="host", state="host")
STAY = always("nothing leaves the device unless it is said")
REMAT = flag(sets("remat=True", remat="True"), always("the default"))
REMAT_AWAY = flag(sets('remat="offload"', remat='"offload"'), always("the default"))
CLASSES = sets("stages={...} of functional", stages=words)
SIZE = sets("min_num_params= of functional", min_num_params=lambda key, value: whole(key, value, 0) or None)
ONE_UNIT = sets("one stage, which is gathered as a whole", one_unit=True)
IGNORED = missing(
    "such parameters stay whole and trainable, and their gradients are not reduced: see Ignored is not frozen, in "
    "docs/how-to/port-from-fsdp.md; frozen ones are found by functional",
    "None",
    "[]",
)
STATES = By(
    {
        "FULL_STATE_DICT": sets("checkpoint.export of whole parameters", save="full"),
        "SHARDED_STATE_DICT": sets("checkpoint.save, each rank its own", save="sharded"),
        "FULL": sets("checkpoint.export of whole parameters", save="full"),
        "SHARDED": sets("checkpoint.save, each rank its own", save="sharded"),
        "LOCAL_STATE_DICT": missing("every checkpoint has whole names and shapes"),
    }
)
PRECISION: Table = {
    "param_dtype": sets("gather_dtype= of the stages, and reduce_dtype= unless it is said", gather_dtype=dtype),
    "reduce_dtype": sets("reduce_dtype= of the stages", reduce_dtype=dtype),
    "output_dtype": sets("output_dtype= of the stages: each layer's result", output_dtype=dtype),
    "buffer_dtype": sets("a cast of the buffers, other than those of batch norms", buffer_dtype=dtype),
    "keep_low_precision_grads": missing("a gradient has the dtype of its shard", "False"),
    "cast_forward_inputs": flag(
        always("input_dtype= of the stages"),
        always("no input_dtype=, unless FSDP1 casts the arguments of the whole model"),
    ),
    "cast_root_forward_inputs": flag(always("input_dtype= of the stages"), always("no input_dtype=")),
    "_module_classes_to_ignore": missing("batch norms keep their statistics in their own dtype; others are cast"),
}


def precision(draft: Draft, key: str, value: Any) -> None:
    """`MixedPrecision(...)`, `MixedPrecisionPolicy(...)`, or a dict of their arguments."""
    given = value.arguments if isinstance(value, Call) else value
    if given is None:
        draft.row(key, value, "always", "the default: all in the dtype of the parameters")
    elif isinstance(given, dict):
        apply(draft, given, PRECISION, f"{key}.", "MixedPrecision")
        if draft.get("gather_dtype") and not draft.get("reduce_dtype"):
            draft.say("reduce_dtype", draft.get("gather_dtype"), f"{key}.param_dtype")
        if "param_dtype" in given:
            old = "buffer_dtype" in given or (isinstance(value, Call) and value.name == "MixedPrecision")
            switch = "cast_root_forward_inputs" if old else "cast_forward_inputs"
            draft.facts["cast_inputs"] = given.get(switch, True) is not False
    else:
        draft.row(key, value, "open", "its value is not in the file; gather_dtype=, reduce_dtype= of the stages")


def offload(draft: Draft, key: str, value: Any) -> None:
    """A switch, `CPUOffload(offload_params=...)`, `CPUOffloadPolicy(...)`."""
    if isinstance(value, Call):
        given = value.arguments
        strangers(draft, key, given, "offload_params pin_memory")
        if value.name == "OffloadPolicy" or (value.name == "CPUOffload" and not given.get("offload_params", False)):
            meant(draft, key, value, STAY)
            return
        meant(draft, key, value, AWAY)
        if given.get("pin_memory") is False:
            draft.row(f"{key}.pin_memory", False, "missing", "memory of the host is pinned on CUDA always")
        return
    if isinstance(value, Source):
        draft.row(key, value, "open", "its value is not in the file; .on(...) of the strategy")
        return
    meant(draft, key, value, AWAY if on(key, value) else STAY)


def wrap(draft: Draft, key: str, value: Any) -> None:
    """A policy: a set of classes, `ModuleWrapPolicy`, or one of torch's functions with its arguments bound."""
    if value is None:
        meant(draft, key, value, ONE_UNIT)
    elif isinstance(value, (set, list, tuple, frozenset)):
        meant(draft, key, value, CLASSES)
    elif isinstance(value, Call) and value.name == "ModuleWrapPolicy":
        strangers(draft, key, value.arguments, "module_classes")
        meant(draft, key, value.arguments.get("module_classes"), CLASSES)
    elif isinstance(value, Call) and value.name == "partial":
        _bound(draft, key, value)
    elif word(value) == "ALWAYS_WRAP_POLICY":
        draft.say("min_num_params", 1, key)
        draft.row(key, value, "becomes", "min_num_params=1 of functional")
    else:
        draft.row(key, value, "open", "a function: pass one of (path, module) as stages= of functional")


def _bound(draft: Draft, key: str, value: Call) -> None:
    given = value.arguments
    strangers(draft, key, given, "func transformer_layer_cls min_num_params force_leaf_modules exclude_wrap_modules")
    if "transformer_layer_cls" in given:
        meant(draft, f"{key}.transformer_layer_cls", given["transformer_layer_cls"], CLASSES)
    elif "min_num_params" in given:
        meant(draft, f"{key}.min_num_params", given["min_num_params"], SIZE)
    else:
        draft.row(key, value, "open", "a function: pass one of (path, module) as stages= of functional")


def strategy(draft: Draft, key: str, value: Any) -> None:
    """A name, or a member of ShardingStrategy. A bare number is refused: what it means depends on whose it is."""
    if isinstance(value, int) or str(value).strip().isdecimal():
        raise TranslateError(
            f"{key}: {value} is a bare number, which means different things to different libraries; write its name, "
            f"one of {', '.join(CUTS)}"
        )
    meant(draft, key, value, By(CUT))


def reshard(draft: Draft, key: str, value: Any) -> None:
    """Of FSDP2: true, false, or the size of the groups within which backward gathers."""
    if isinstance(value, int) and not isinstance(value, bool):
        draft.say("cut", "hpz", key)
        draft.say("shard", whole(key, value, 2), key)
        draft.row(key, value, "becomes", f"sf.hpz: backward gathers over {value} ranks, from a copy")
    elif is_open(value) and word(value) not in ("TRUE", "FALSE"):
        draft.row(key, value, "open", "its value is not in the file; sf.full_shard if true, sf.shard_grad_op if false")
    else:
        kept = value is None or on(key, value)
        meant(draft, key, value, CUT["FULL_SHARD" if kept else "SHARD_GRAD_OP"])


def mesh(draft: Draft, key: str, value: Any) -> None:
    """`init_device_mesh("cuda", (2, 4), ...)`, a tuple of sizes, or a name."""
    sizes = value.arguments.get("mesh_shape") if isinstance(value, Call) else value
    if isinstance(value, Call):
        strangers(draft, key, value.arguments, "device_type mesh_shape mesh_dim_names backend_override")
    if value is None:
        draft.row(key, value, "always", "all ranks")
    elif isinstance(sizes, (tuple, list)) and len(sizes) in (1, 2):
        for fact, one in zip(("replica", "shard")[-len(sizes) :], sizes, strict=True):
            if one not in (None, -1):
                draft.say(fact, whole(key, one), key)
        draft.say("hybrid", len(sizes) == 2, key)
        draft.row(key, value, "becomes", "the sizes of make_mesh's axes")
    else:
        draft.row(key, value, "open", f"its value is not in the file: {shown(value)}; sizes of make_mesh's axes")


FSDP1: Table = {
    "module": yours("what functional takes"),
    "process_group": missing("write the mesh: its axes are the groups", "None"),
    "sharding_strategy": Whole(strategy),
    "cpu_offload": Whole(offload),
    "auto_wrap_policy": Whole(wrap),
    "backward_prefetch": PREFETCH,
    "mixed_precision": Whole(precision),
    "ignored_modules": IGNORED,
    "ignored_states": IGNORED,
    "param_init_fn": missing("sf.init_sharded(model.tree, seed, mesh, strategy, fill=f) of a module on meta", "None"),
    "device_id": yours("each process uses the device of LOCAL_RANK, or the one that it has chosen"),
    "sync_module_states": flag(
        always("nothing is broadcast: sf.shard compares what ranks pass, and raises if it differs"),
        always("the default"),
    ),
    "forward_prefetch": FORWARD,
    "limit_all_gathers": always("prefetch + 1 buffers, however deep the model"),
    "use_orig_params": always("parameters have their own names and shapes"),
    "device_mesh": Whole(mesh),
}

FSDP2: Table = {
    "module": yours("what functional takes; each call of fully_shard is a stage"),
    "mesh": Whole(mesh),
    "reshard_after_forward": Whole(reshard),
    "shard_placement_fn": missing("a flat buffer is cut, of any shapes; no number changes, memory may", "None"),
    "mp_policy": Whole(precision),
    "offload_policy": Whole(offload),
    "ignored_params": IGNORED,
    "dp_mesh_dims": missing("the strategy names the axes", "None"),
}


def _named(call: Call) -> dict[str, Any]:
    """The arguments that have names."""
    return {key: one for key, one in call.arguments.items() if not key.startswith("argument ")}


def _clipped(draft: Draft, key: str, value: Any) -> None:
    """`clip_grad_norm_(parameters, max_norm)`, or a module's own, of `max_norm`."""
    given = dict(value.arguments)
    first = given.pop("argument 1", None)
    norm = given.pop("max_norm", first if isinstance(first, (int, float)) else given.pop("argument 2", first))
    given.pop("parameters", None)
    kind = given.pop("norm_type", given.pop("argument 3", 2.0))
    if kind not in (2, 2.0):
        draft.row(f"{key}.norm_type", kind, "missing", "so.clip_by_global_norm is of the norm 2")
    strangers(draft, key, given, "error_if_nonfinite foreach")
    meant(draft, key, norm, sets("so.clip_by_global_norm", name="max_grad_norm", about=key, clip=number))


def _clipped_by_value(draft: Draft, key: str, value: Any) -> None:
    strangers(draft, key, _named(value), "parameters clip_value foreach")
    found = value.arguments.get("clip_value", value.arguments.get("argument 2"))
    meant(draft, key, found, sets("so.clip_by_value", name="clip_value", about=key, clip_value=number))


def _divided(draft: Draft, key: str, value: Any) -> None:
    """The sum over ranks, divided by this in the place of how many they are."""
    strangers(draft, key, _named(value), "factor")
    found = value.arguments.get("factor", value.arguments.get("argument 1"))
    told = sets("sf.psum of the loss, divided by it", name="divide_factor", about=key, divide=number)
    meant(draft, key, found, told)


_SCHEDULE = missing("lr= of the optimizer takes a function of the step: so.warmup_cosine, so.wsd, or your own")
_SOONER = always("gathers run ahead by prefetch= stages, in the order of the calls; no number changes")
_MICRO = missing("sf.accumulate(loss, batches): its defer= says what waits for the last micro-batch")
_WIRES = missing("collectives of the engine's own")
# Calls beside those that shard, by the last parts of their names.
CALLS: Table = {
    "clip_grad_norm_": Whole(_clipped),
    "clip_grad_value_": Whole(_clipped_by_value),
    "set_gradient_divide_factor": Whole(_divided),
    "set_reduce_scatter_divide_factor": Whole(_divided),
    "set_force_sum_reduction_for_comms": always("the loss is divided before the sum"),
    "set_modules_to_forward_prefetch": _SOONER,
    "set_modules_to_backward_prefetch": _SOONER,
    "set_unshard_in_backward": always("what backward does not read is not gathered for it"),
    "set_reshard_after_forward": missing("reshard= of sf.stage, or a strategy such as sf.shard_grad_op"),
    "set_reshard_after_backward": _MICRO,
    "set_requires_gradient_sync": _MICRO,
    "set_requires_all_reduce": _MICRO,
    "set_is_last_backward": _MICRO,
    "no_sync": _MICRO,
    "set_all_reduce_hook": missing("gradients are values: change them before optimizer.step"),
    "register_comm_hook": missing("gradients are values: change them before optimizer.step"),
    "set_post_optim_event": always("the next gather waits for the step by itself"),
    "set_reduce_scatter_unused_params": always("a parameter that the loss does not use has a gradient of zeros"),
    "set_reduce_scatter_max_input_buffers": always("buffers are as many as are in flight"),
    "reset_iter_state": always("nothing outlives a step"),
    **dict.fromkeys(
        ["set_custom_all_gather", "set_custom_reduce_scatter", "set_separate_reduce_scatter_group"], _WIRES
    ),
    **dict.fromkeys(["set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm"], _WIRES),
    "summon_full_params": yours("sf.unshard(params)"),
    "register_fsdp_forward_method": always("any function of parameters is a stage: sf.stage"),
    **dict.fromkeys(
        [
            "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "CosineAnnealingLR", "PolynomialLR",
            "OneCycleLR", "CyclicLR", "LambdaLR", "SequentialLR", "ReduceLROnPlateau", "CosineAnnealingWarmRestarts",
            "get_scheduler", "get_linear_schedule_with_warmup", "get_cosine_schedule_with_warmup",
            "get_constant_schedule_with_warmup", "get_polynomial_decay_schedule_with_warmup", "get_wsd_schedule",
        ],
        _SCHEDULE,
    ),
    **dict.fromkeys(["GradScaler", "ShardedGradScaler"], missing("so.loss_scaled(optimizer)")),
    **dict.fromkeys(["apply_activation_checkpointing", "checkpoint_wrapper"], sets("remat=True", remat="True")),
    "parallelize_module": missing('tensor="auto", or a table of ends of paths, of functional'),
}  # fmt: skip


_WORDS = (
    "modules recurse enable unshard_in_backward event module method_name writeback rank0_only offload_to_cpu "
    "with_grads checkpoint_impl checkpoint_wrapper_fn check_fn"
)


def beside(draft: Draft, calls: list[Call]) -> None:
    """The calls of a program that change how it trains, beside the one that says how it is sharded."""
    seen = set()
    for call in calls:
        text = f"{call.name}({', '.join(f'{key}={shown(one)}' for key, one in call.arguments.items())})"
        if call.name in CALLS and text not in seen:
            seen.add(text)
            meaning = CALLS[call.name]
            apply(draft, {call.name: call if isinstance(meaning, Whole) else Source(text)}, CALLS)
            if isinstance(meaning, Meaning) and meaning.status != "missing":
                strangers(draft, call.name, _named(call), _WORDS)
