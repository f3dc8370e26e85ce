"""What FSDP's arguments mean: those of FSDP1 and FSDP2, under PyTorch's names."""

from __future__ import annotations

from typing import Any

from shardfn.translate.draft import Draft
from shardfn.translate.facts import Call, Source, TranslateError
from shardfn.translate.meanings import By, Table, Whole, always, apply, flag, meant, missing, sets, yours
from shardfn.translate.values import dtype, is_open, on, shown, whole, word, words

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
SIZE = sets("min_num_params= of functional", min_num_params=whole)
ONE_UNIT = sets("one stage, which is gathered as a whole", one_unit=True)
IGNORED = missing(
    "such parameters stay whole and trainable, and their gradients are not reduced: see Ignored is not frozen, in "
    "docs/coming-from-fsdp.md; frozen ones are found by functional",
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
