"""Meanings of the arguments of FSDP1 and FSDP2 under PyTorch's names, and of calls next to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardfn.translate import precision
from shardfn.translate.draft import TranslationBuilder
from shardfn.translate.optimizers import OptimizerCounterpart, arguments
from shardfn.translate.schema import By, Section, Table, always, flag, meant, missing, read, same_for, sets, yours
from shardfn.translate.values import (
    SourceCall,
    SourceExpression,
    TranslateError,
    as_count,
    natural,
    number,
    shown,
    strategy_path,
    words,
)

CUTS = {
    "FULL_SHARD": "full_shard",
    "SHARD_GRAD_OP": "shard_grad_op",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "hybrid_shard",
    "_HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
    "HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
}
STRATEGY = By(
    {name: sets(f"the strategy {strategy_path(ours)}", cut=ours) for name, ours in CUTS.items()},
    said=f"one of {', '.join(CUTS)}; a bare number means different things to different libraries",
)
PREFETCH = By(
    {
        "BACKWARD_PRE": sets("prefetch=1, which is the default", prefetch=1),
        "BACKWARD_POST": always("gathers run one stage ahead, earlier than there; no number changes"),
        **same_for("NONE NO_PREFETCH", sets("prefetch=0, forward and backward", prefetch=0)),
    }
)
AWAY = sets('.with_tiers(params="host", grads="host", state="host")', params="host", grads="host", state="host")
STAY = always("nothing leaves the device unless it is said")
REMAT = flag(sets("remat=True", remat="True"), always("the default"))
REMAT_INPUTS_AWAY = sets("remat=sf.offload(recompute=True)", remat="sf.offload(recompute=True)")
REMAT_AWAY = flag(sets('remat="offload"', remat='"offload"'), always("the default"))
CLASSES = sets("stages={...} of functional", stages=words)
SIZE = sets("min_num_params= of functional", min_num_params=lambda key, value: natural(key, value) or None)
ONE_UNIT = sets("one stage, which is gathered as a whole", one_unit=True)
STATES = By(
    same_for("FULL_STATE_DICT FULL", sets("checkpoint.export_hf of whole parameters", save="full"))
    | same_for("SHARDED_STATE_DICT SHARDED", sets("save= of sf.run.loop: each rank its own", save="sharded"))
    | {"LOCAL_STATE_DICT": missing("every checkpoint has whole names and shapes")}
)
_IGNORED = missing(
    "such parameters stay whole and trainable, and their gradients are not reduced: see Ignored is not frozen, in "
    "docs/how-to/port-from-fsdp.md; frozen ones are found by functional", "None", "[]"
)  # fmt: skip
# Arguments of FSDP1 in all systems that have it.
SHARED: Table = {
    "backward_prefetch": PREFETCH,
    "forward_prefetch": always("forward gathers ahead, by prefetch= stages; no number changes"),
    "limit_all_gathers": always("prefetch + 1 buffers, however deep the model"),
    "use_orig_params": always("parameters have their own names and shapes"),
    "ignored_modules": _IGNORED,
    "param_init_fn": missing("sf.init_sharded(model.tree, seed, mesh, strategy, fill=f) of a module on meta", "None"),
    "sync_module_states": always("nothing is broadcast: sf.shard compares what ranks pass, and raises if it differs"),
}
_PINNED = By({"true": always("it is, on CUDA"), "false": missing("memory of the host is pinned on CUDA always")})
OFFLOAD = By(
    {
        **flag(AWAY, STAY).choices,
        "OffloadPolicy()": STAY,
        "CPUOffload()": Section({"offload_params": flag(AWAY, STAY)}),
        "CPUOffloadPolicy()": Section({"pin_memory": _PINNED}, itself=AWAY),
    },
    said="true or false; .with_tiers(...) of the strategy",
)


def _classes(key: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TranslateError(f"{key}: {value} is not a set of classes, or a policy")
    return words(key, value)


_FUNCTION = "a function: pass one of (path, module) as stages= of functional"
_BOUND: Table = {
    "func": By(
        same_for("transformer_auto_wrap_policy size_based_auto_wrap_policy", always("see below")), said=_FUNCTION
    ),
    "transformer_layer_cls": CLASSES,
    "min_num_params": SIZE,
    **same_for("force_leaf_modules exclude_wrap_modules", missing("stages= says what is gathered as a whole", "None")),
}
WRAP = By(
    {
        "none": ONE_UNIT,
        "always_wrap_policy": sets("min_num_params=1 of functional", min_num_params=1),
        "ModuleWrapPolicy()": Section({"module_classes": CLASSES}),
        "partial()": Section(_BOUND),
    },
    sets("stages={...} of functional", stages=_classes),
    said=_FUNCTION,
)
RESHARD = By(
    {**same_for("true none", STRATEGY.choices["FULL_SHARD"]), "false": STRATEGY.choices["SHARD_GRAD_OP"]},
    sets(
        "sf.strategies.hpz: backward gathers over {value} ranks, from a copy",
        hpz=lambda key, value: as_count(key, value, 2),
    ),
    said="true for sf.full_shard, or false for sf.strategies.shard_grad_op",
)


def _mesh_sizes(draft: TranslationBuilder, key: str, value: Any) -> None:
    """Reads the sizes of a mesh with one or two axes."""
    sizes = value if isinstance(value, (tuple, list)) else ()
    if len(sizes) not in (1, 2) or sum(isinstance(size, (SourceExpression, SourceCall)) for size in sizes) > 1:
        draft.row(key, value, "open", f"its value is not in the file: {shown(value)}; sizes of make_mesh's axes")
        return
    for fact, size in zip(("replica", "shard")[-len(value) :], value, strict=True):
        if size not in (None, -1) and not isinstance(
            size, (SourceExpression, SourceCall)
        ):  # one that is not said is the rest
            draft.say(fact, as_count(key, size), key)
    draft.say("hybrid", len(value) == 2, key)
    draft.row(key, value, "becomes", "the sizes of make_mesh's axes")


_MADE: Table = {
    "device_type": yours("device= of make_mesh"),
    "mesh_shape": _mesh_sizes,
    "mesh_dim_names": always("axes have the names of what they are for"),
    "backend_override": yours("make_mesh takes the device's own"),
}
MESH = By({"none": always("all ranks"), "init_device_mesh()": Section(_MADE)}, _mesh_sizes)
FSDP1: Table = {
    **SHARED,
    "module": yours("what functional takes"),
    "process_group": missing("write the mesh: its axes are the groups", "None"),
    "sharding_strategy": STRATEGY,
    "cpu_offload": OFFLOAD,
    "auto_wrap_policy": WRAP,
    "mixed_precision": precision.POLICIES,
    "ignored_states": _IGNORED,
    "device_id": yours("each process uses the device of LOCAL_RANK, or the one that it has chosen"),
    "device_mesh": MESH,
}
FSDP2: Table = {
    "module": yours("what functional takes; each call of fully_shard is a stage"),
    "mesh": MESH,
    "reshard_after_forward": RESHARD,
    "shard_placement_fn": missing("a flat buffer is cut, of any shapes; no number changes, memory may", "None"),
    "mp_policy": precision.POLICIES,
    "offload_policy": OFFLOAD,
    "ignored_params": _IGNORED,
    "dp_mesh_dims": missing("the strategy names the axes", "None"),
}
_PLAIN = missing("buffers are whole on every rank, and not broadcast", "False", "None")
DDP: Table = {
    "module": yours("what functional takes"),
    **same_for("device_ids output_device dim", yours("each process uses the device of LOCAL_RANK")),
    **same_for("broadcast_buffers forward_sync_buffers", _PLAIN),
    "init_sync": always("nothing is broadcast: sf.shard compares what ranks pass, and raises if it differs"),
    "process_group": missing("write the mesh: its axes are the groups", "None"),
    **same_for("find_unused_parameters skip_all_reduce_unused_params",
           always("a parameter that the loss does not use has a gradient of zeros")),
    **same_for("bucket_cap_mb bucket_cap_mb_list gradient_as_bucket_view batched_grad_copy check_reduction "
               "static_graph",
           always("a stage's gradients of one dtype are one buffer")),
    **same_for("delay_all_reduce_named_params param_to_hook_all_reduce", missing("gradients are values", "None")),
    "mixed_precision": precision.POLICIES,
    "device_mesh": missing("the sizes of make_mesh's axes", "None"),
}  # fmt: skip
CALLS = {
    **same_for("DistributedDataParallel DDP", Section(DDP, "DistributedDataParallel", cut="ddp")),
    **same_for("FullyShardedDataParallel FSDP", Section(FSDP1, "FullyShardedDataParallel", cut="full_shard")),
    "fully_shard": Section(FSDP2, "fully_shard", cut="full_shard"),
}


_HOW = always("one implementation")
_BY_ORDER = "so.clip_by_global_norm(order=)"
_ORDERS = {
    **same_for("2 2.0", always("so.clip_by_global_norm")),
    **same_for("1 1.0", sets(_BY_ORDER, clip_order=1)),
    "inf": sets(_BY_ORDER, clip_order=math.inf),
}
_NORM: Table = {
    "parameters": always("all gradients"),
    "max_norm": sets("so.clip_by_global_norm", name="max_grad_norm", clip=number),
    "norm_type": By(_ORDERS, missing("so.clip_by_global_norm takes the orders 1, 2 and inf")),
    "error_if_nonfinite": yours("sf.run.loop raises where the loss is not finite"),
    "foreach": _HOW,
}
_VALUE: Table = {
    "parameters": always("all gradients"),
    "clip_value": sets("so.clip_by_value", name="clip_value", clip_value=number),
    "foreach": _HOW,
}
# Gradients are the sum over ranks divided by this factor, instead of by the number of ranks.
_FACTOR: Table = {"factor": sets("sf.psum of the loss, divided by it", name="divide_factor", divide=number)}


def _of_module(draft: TranslationBuilder, prefix: str, settings: dict[str, Any]) -> None:
    """Moves the arguments of a module's own `clip_grad_norm_(max_norm)`, which has no `parameters`, to their names."""
    if "max_norm" not in settings or isinstance(settings.get("parameters"), (int, float)):
        names = [name for name in ("max_norm", "norm_type") if name not in settings or name == "max_norm"]
        values = [settings.pop(name) for name in ("parameters", "max_norm") if name in settings]
        settings |= dict(zip(names, values, strict=False))


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
OPTIMIZERS = {
    "Adam": OptimizerCounterpart("adam", {**_ADAM, "weight_decay": 0.0}),
    "AdamW": OptimizerCounterpart("adamw", {**_ADAM, "weight_decay": 0.01}),
    "SGD": OptimizerCounterpart("sgd", {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False}),
    **{
        name: OptimizerCounterpart(f"torch.optim.{name}", {"lr": lr})
        for name, lr in {
            "Adagrad": 1e-2,
            "Adadelta": 1.0,
            "RMSprop": 1e-2,
            "NAdam": 2e-3,
            "RAdam": 1e-3,
            "Adamax": 2e-3,
        }.items()
    },
}
_GROUPS = "groups of parameters: pass **so.rules_from_param_groups(module, groups) to the optimizer in place of numbers"


def optimizer(draft: TranslationBuilder, key: str, call: SourceCall) -> None:
    """Reads an optimizer of torch's, which has one set of numbers for all parameters."""
    settings = {name: x for name, x in call.arguments.items() if name != "params"}
    if draft.get("optimizer") is not None:
        draft.row(key, call, "missing", "the program has one optimizer, the first")
        return
    if isinstance(call.arguments.get("params"), (list, tuple, Mapping)):
        draft.row(f"{key}.params", call.arguments["params"], "open", _GROUPS)
    kind = OPTIMIZERS[call.name]
    draft.row(key, call, "becomes", kind.text)
    draft.say("optimizer", kind.ours, key)
    arguments(draft, key, settings, kind)


_SCALER: Table = {
    "device": always("that of the mesh"),
    "init_scale": sets("scale= of so.dynamic_loss_scale", name="scale", scale=number),
    "growth_interval": sets(
        "growth_interval= of so.dynamic_loss_scale", name="growth_interval", growth_interval=as_count
    ),
    "growth_factor": missing("growth_factor= of so.dynamic_loss_scale", "2"),
    "backoff_factor": missing("backoff_factor= of so.dynamic_loss_scale", "0.5"),
    "enabled": missing("leave so.dynamic_loss_scale out", "True"),
}


def _scaler(draft: TranslationBuilder, key: str, call: SourceCall) -> None:
    if call.arguments.get("enabled") is False:
        draft.row(key, call, "always", "nothing is scaled unless it is said")
        return
    draft.row(key, call, "becomes", "so.dynamic_loss_scale(optimizer)")
    draft.say("scaled", True, key)
    read(draft, key, dict(call.arguments), Section(_SCALER, call.name))


_BATCHES = "of sf.run.batches"
_LOADER: Table = {
    "dataset": yours(f"the source {_BATCHES}"),
    "batch_size": yours(f"batch= {_BATCHES}, of all ranks together"),
    "shuffle": yours(f"shuffle= {_BATCHES}, whose default is True"),
    "drop_last": yours(f"remainder= {_BATCHES}, whose default is to drop it"),
    "num_workers": yours(f"workers= {_BATCHES}"),
    "prefetch_factor": yours(f"prefetch= {_BATCHES}"),
    "collate_fn": yours(f"collate= {_BATCHES}"),
    **same_for("generator seed", yours(f"seed= {_BATCHES}")),
    **same_for("sampler batch_sampler", yours(f"the order {_BATCHES}, which depends on seed and step alone")),
    **same_for("num_replicas rank", always("each rank reads its own rows")),
    **same_for("pin_memory pin_memory_device persistent_workers in_order", always(f"memory and workers {_BATCHES}")),
    **same_for("timeout worker_init_fn multiprocessing_context", yours("workers are outside of the step")),
}
_MICRO = missing("sf.accumulate(loss, batches): its defer= says what waits for the last micro-batch")
# Calls beside those that shard, by the last parts of their names.
BESIDE: Table = {
    "clip_grad_norm_": Section(_NORM, "clip_grad_norm_", before=_of_module),
    "clip_grad_value_": Section(_VALUE, "clip_grad_value_"),
    **same_for("set_gradient_divide_factor set_reduce_scatter_divide_factor", Section(_FACTOR)),
    "set_force_sum_reduction_for_comms": always("the loss is divided before the sum"),
    **same_for(
        "set_modules_to_forward_prefetch set_modules_to_backward_prefetch",
        always("gathers run ahead by prefetch= stages, in the order of the calls; no number changes"),
    ),
    "set_unshard_in_backward": always("what backward does not read is not gathered for it"),
    "set_reshard_after_forward": missing("reshard= of sf.stage, or a strategy such as sf.strategies.shard_grad_op"),
    **same_for("set_reshard_after_backward set_requires_gradient_sync set_requires_all_reduce", _MICRO),
    **same_for("set_is_last_backward no_sync", _MICRO),
    **same_for(
        "set_all_reduce_hook register_comm_hook", missing("gradients are values: change them before optimizer.step")
    ),
    "set_post_optim_event": always("the next gather waits for the step by itself"),
    "set_reduce_scatter_unused_params": always("a parameter that the loss does not use has a gradient of zeros"),
    "set_reduce_scatter_max_input_buffers": always("buffers are as many as are in flight"),
    "reset_iter_state": always("nothing outlives a step"),
    **same_for(
        "set_custom_all_gather set_custom_reduce_scatter set_separate_reduce_scatter_group"
        " set_allocate_memory_from_process_group_for_comm set_symm_mem_for_comm",
        missing("collectives of the engine's own"),
    ),
    "summon_full_params": yours("sf.unshard(params)"),
    "register_fsdp_forward_method": always("any function of parameters is a stage: sf.stage"),
    **same_for(
        "StepLR MultiStepLR ConstantLR LinearLR ExponentialLR CosineAnnealingLR PolynomialLR OneCycleLR CyclicLR"
        " LambdaLR SequentialLR ReduceLROnPlateau CosineAnnealingWarmRestarts get_scheduler"
        " get_linear_schedule_with_warmup get_cosine_schedule_with_warmup get_constant_schedule_with_warmup"
        " get_polynomial_decay_schedule_with_warmup get_wsd_schedule",
        missing("lr= of the optimizer takes a function of the step: so.warmup_cosine, so.wsd, or your own"),
    ),
    **same_for("GradScaler ShardedGradScaler", _scaler),
    **dict.fromkeys(OPTIMIZERS, optimizer),
    **same_for("DataLoader DistributedSampler", Section(_LOADER)),
    **same_for("apply_activation_checkpointing checkpoint_wrapper", sets("remat=True", remat="True")),
    "parallelize_module": missing('tensor="auto", or a table of ends of paths, of functional'),
}
_WORDS = (
    "modules recurse enable unshard_in_backward event module method_name writeback rank0_only offload_to_cpu "
    "with_grads checkpoint_impl checkpoint_wrapper_fn check_fn"
)


def read_other_calls(draft: TranslationBuilder, calls: list[SourceCall]) -> None:
    """Reads the calls of a program that change how it trains, apart from those that shard it."""
    texts = set()
    for call in calls:
        text = f"{call.name}({', '.join(f'{key}={shown(argument)}' for key, argument in call.arguments.items())})"
        if call.name in BESIDE and text not in texts:
            texts.add(text)
            meaning = BESIDE[call.name]
            whole_call = isinstance(meaning, Section) or callable(meaning)
            meant(draft, call.name, call if whole_call else SourceExpression(text), meaning)
            if not whole_call and draft.rows[-1].status != "missing":
                for key, argument in call.arguments.items():
                    if not key.startswith("argument ") and key not in _WORDS.split():
                        draft.row(f"{call.name}.{key}", argument, "unknown", "no argument that is known here")


_KEPT = "reshard_after_forward"


def several(draft: TranslationBuilder, calls: list[SourceCall]) -> None:
    """Reads the calls that shard a program's modules; they may differ only in which modules stay whole."""
    first = calls[0]
    read(draft, "", first, CALLS[first.name])
    for call in calls:
        reshard = call.arguments.get(_KEPT)
        if reshard != first.arguments.get(_KEPT) and call is calls[-1]:
            text = "of the root alone: what the ring of buffers still holds is not gathered again; no number changes"
            draft.row(f"{_KEPT} in line {call.line}", reshard, "always", text)
        elif reshard != first.arguments.get(_KEPT):
            text = "one strategy for all stages: no number changes, memory may; reshard= of sf.stage is of one"
            draft.row(f"{_KEPT} in line {call.line}", reshard, "missing", text)


def differ(calls: list[SourceCall]) -> list[str]:
    """The arguments in which calls for several modules differ, apart from the module and whether it stays whole."""
    names = {key for call in calls for key in call.arguments} - {"module", _KEPT}
    return sorted(key for key in names if len({repr(call.arguments.get(key)) for call in calls}) > 1)
