"""What the arguments of Lightning and Fabric mean: of strategies, and of `Trainer` and `Fabric`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardfn.translate import deepspeed, deepspeed_bits, deepspeed_zero, fsdp
from shardfn.translate.draft import Draft
from shardfn.translate.facts import Call, TranslateError
from shardfn.translate.meanings import By, Meaning, Table, Whole, always, apply, flag, meant, missing, sets, yours
from shardfn.translate.values import dtype, is_open, number, shown, whole, word

_START = yours("starting processes: torchrun")
_LOOP = yours("sf.run.loop is a function; what it is given is yours: docs/how-to/run-a-loop.md")
_PATIENCE = yours("timeout= of make_mesh")


def _remat_policy(draft: Draft, key: str, value: Any) -> None:
    if value is None:
        draft.row(key, value, "always", "the default")
        return
    draft.say("remat", "True", key)
    draft.row(key, value, "becomes", "remat=True, for all stages")


def _sharding(draft: Draft, key: str, value: Any) -> None:
    fsdp.strategy(draft, key, value)


FSDP: Table = {
    "sharding_strategy": Whole(_sharding),
    "cpu_offload": Whole(fsdp.offload),
    "mixed_precision": Whole(fsdp.precision),
    "auto_wrap_policy": Whole(fsdp.wrap),
    "policy": Whole(fsdp.wrap),
    "activation_checkpointing": Whole(_remat_policy),
    "activation_checkpointing_policy": Whole(_remat_policy),
    "state_dict_type": fsdp.STATES,
    "device_mesh": Whole(fsdp.mesh),
    "precision": Whole(lambda draft, key, value: precision(draft, key, value)),
    "timeout": _PATIENCE,
    **dict.fromkeys(
        [
            "accelerator",
            "parallel_devices",
            "cluster_environment",
            "process_group_backend",
            "checkpoint_io",
            "precision_plugin",
        ],
        _START,
    ),
    **{
        name: meaning
        for name, meaning in fsdp.FSDP1.items()
        if name not in ("module", "sharding_strategy")
        and name not in ("cpu_offload", "mixed_precision", "auto_wrap_policy", "device_mesh")
    },
}


def _size(fact: str) -> Whole:
    def read(draft: Draft, key: str, value: Any) -> None:
        if value == "auto":
            where = "as many nodes as there are" if fact == "shard" else "as many as a node has devices: write it"
            draft.row(key, value, "becomes" if fact == "shard" else "open", where)
        else:
            meant(draft, key, value, Meaning("becomes", f"the axis {fact} of make_mesh", {fact: whole}))

    return Whole(read)


MODEL_PARALLEL: Table = {
    "data_parallel_size": _size("shard"),
    "tensor_parallel_size": _size("tensor"),
    "parallelize_fn": missing('it says what is cut: tensor="auto", or a table, of functional', "None"),
    "save_distributed_checkpoint": flag(fsdp.STATES.choices["SHARDED"], fsdp.STATES.choices["FULL"]),
    "process_group_backend": _START,
    "timeout": _PATIENCE,
}
DDP: Table = {
    **dict.fromkeys(
        [
            "accelerator",
            "parallel_devices",
            "cluster_environment",
            "checkpoint_io",
            "precision_plugin",
            "process_group_backend",
            "start_method",
        ],
        _START,
    ),
    "timeout": _PATIENCE,
    "ddp_comm_state": missing("gradients are values: change them before optimizer.step", "None"),
    "ddp_comm_hook": missing("reduce_dtype=torch.bfloat16 of functional, or reduce=quant.int8()", "None"),
    "ddp_comm_wrapper": missing("reduce_dtype=torch.bfloat16 of functional", "None"),
    "model_averaging_period": missing("parameters are the same on all ranks, always", "None"),
    "find_unused_parameters": always("a parameter that the loss does not use has a gradient of zeros"),
    "static_graph": always("nothing is assumed of the graph"),
    "gradient_as_bucket_view": always("there are no buckets"),
    "bucket_cap_mb": always("there are no buckets: a stage's gradients of one dtype are one buffer"),
    "broadcast_buffers": missing("buffers are whole on every rank, and not broadcast", "False"),
}


def _config(draft: Draft, key: str, value: Any) -> None:
    if value is None:
        draft.row(key, value, "always", "nothing more is said")
    elif isinstance(value, Mapping):
        draft.row(key, "a dict", "becomes", "its keys, below")
        deepspeed.translate(draft, value, f"{key}.")
    else:
        draft.row(key, value, "open", "a file: translate that, beside this one")


_SAME = dict.fromkeys(
    [
        "contiguous_gradients",
        "overlap_comm",
        "allgather_partitions",
        "reduce_scatter",
        "allgather_bucket_size",
        "reduce_bucket_size",
        "sub_group_size",
        "pin_memory",
    ],
    always("one flat buffer a stage, in flight while others compute"),
)


def _away(name: str, kind: str, draft: Draft, given: Mapping[str, Any]) -> None:
    where = given.get(f"offload_{kind}_device", "cpu")
    if given.get(name) is True:
        deepspeed_zero.device(draft, name, where, "optimizer" if kind == "optimizer" else "param")


def _bits(fact: str) -> Whole:
    def read(draft: Draft, key: str, value: Any) -> None:
        if draft.get("lightning_bits") != "torch.float16":
            draft.row(key, value, "always", "of no effect without 16 bits")
            return
        found = number(key, value)
        if fact == "loss_scale":
            if found:
                draft.facts["scaled"] = {"scale": found, "growth": 1.0, "backoff": 1.0}
            draft.row(key, value, "becomes", "so.loss_scaled")
        else:
            made = 2.0**found if fact == "scale" else int(found)
            draft.facts["scaled"] = {**draft.get("scaled", {}), fact: made}
            draft.row(key, value, "becomes", f"{fact}= of so.loss_scaled")

    return Whole(read)


DEEPSPEED: Table = {
    "stage": Whole(deepspeed_zero.stage),
    "zero_optimization": flag(always("by stage="), sets("sf.ddp", cut="ddp")),
    "config": Whole(_config),
    "offload_optimizer": By({"TRUE": always("by offload_optimizer_device"), "FALSE": always("the device")}),
    "offload_parameters": By({"TRUE": always("by offload_params_device"), "FALSE": always("the device")}),
    "offload_optimizer_device": By({"CPU": always("with offload_optimizer"), "NVME": always("with offload_optimizer")}),
    "offload_params_device": By({"CPU": always("with offload_parameters"), "NVME": always("with offload_parameters")}),
    "nvme_path": deepspeed_zero.SCRATCH,
    "remote_device": yours("sf.init_sharded makes each rank's part where the strategy keeps it"),
    **_SAME,
    **dict.fromkeys(
        [
            "params_buffer_count",
            "params_buffer_size",
            "max_in_cpu",
            "optimizer_buffer_count",
            "block_size",
            "queue_depth",
            "single_submit",
            "overlap_events",
            "thread_count",
        ],
        always("buffers follow from prefetch=, and four threads read and write"),
    ),
    "zero_allow_untested_optimizer": always("so.from_torch tries out whether one works on a shard"),
    "logging_batch_size_per_gpu": yours("it is printed alone"),
    "logging_level": yours("what is logged"),
    "loss_scale": _bits("loss_scale"),
    "initial_scale_power": _bits("scale"),
    "loss_scale_window": _bits("every"),
    "hysteresis": missing("the scale shrinks at the first gradient that is not finite", "1"),
    "min_loss_scale": missing("the scale has no least value", "0"),
    "partition_activations": missing("sequence=1 of parallel.to_parallel", "False"),
    "cpu_checkpointing": flag(sets('remat="offload"', remat='"offload"'), always("on the device")),
    "contiguous_memory_optimization": missing("no number changes; fragmentation may", "False"),
    "synchronize_checkpoint_boundary": always("nothing waits"),
    "load_full_weights": yours("interop.load"),
    "exclude_frozen_parameters": yours("sf.partition before checkpoint.save"),
    "timeout": _PATIENCE,
    "precision": Whole(lambda draft, key, value: precision(draft, key, value)),
    **dict.fromkeys(
        ["accelerator", "parallel_devices", "cluster_environment", "process_group_backend", "precision_plugin"], _START
    ),
}


def precision(draft: Draft, key: str, value: Any) -> None:
    """A word or a number: what it means depends on the strategy."""
    said = str(value).lower()
    if value is None or said in ("32", "32-true"):
        draft.row(key, value, "always", "the default: all in float32")
        return
    if said in ("64", "64-true"):
        draft.say("param_dtype", "torch.float64", key)
        draft.say("cast_inputs", True, key)
        draft.row(key, value, "becomes", "module.to(torch.float64), and input_dtype= of the stages")
        return
    if said in ("16", "bf16", "16-mixed", "bf16-mixed", "16-true", "bf16-true"):
        made = str(dtype(key, said))
        _sixteen(draft, key, value, made, said.endswith("true"))
    elif "transformer-engine" in said:
        draft.row(key, value, "missing", "products are of 16 bits or more")
    elif is_open(value):
        draft.row(key, value, "open", "its value is not in the file")
    else:
        raise TranslateError(f"{key}: {shown(value)} is no precision, such as 32-true, bf16-mixed or 16-mixed")


def _sixteen(draft: Draft, key: str, value: Any, made: str, true: bool) -> None:
    kind = draft.get("lightning")
    text = []
    if true and kind != "deepspeed":
        draft.say("param_dtype", made, key)
        draft.say("cast_inputs", True, key)
        text.append(f"module.to({made})")
    if kind == "fsdp":
        if "gather_dtype" not in draft.facts:
            for fact in ("gather_dtype", "reduce_dtype", "buffer_dtype"):
                draft.facts.setdefault(fact, made)
                draft.keys.setdefault(fact, (key,))
            text.append("gather_dtype=, reduce_dtype= and input_dtype= of the stages")
        draft.say("cast_inputs", True, key)
    elif kind == "deepspeed":
        deepspeed_bits.sixteen_bits(draft, made, key)
        text.append("gather_dtype=, reduce_dtype= and input_dtype= of the stages")
        draft.facts["lightning_bits"] = made
    if not true and kind != "deepspeed":
        draft.say("autocast", made, key)
        text.append("torch.autocast around the model")
    if made == "torch.float16" and (not true or kind == "deepspeed"):
        draft.say("scaled", {}, key)
        text.append("so.loss_scaled")
    draft.row(key, value, "becomes", ", ".join(text))


_NAMES = re.compile(
    r"(?P<ddp>auto|ddp(_spawn|_fork|_notebook)?(_find_unused_parameters_(true|false))?)"
    r"|(?P<fsdp>fsdp(_cpu_offload)?)|(?P<deepspeed>deepspeed(_stage_(?P<stage>[123])(_offload(_nvme)?)?)?)"
)


def _named(draft: Draft, key: str, value: Any) -> None:
    """A strategy by its name; a `...Strategy(...)` has been read before."""
    if isinstance(value, Call):
        draft.row(key, value, "becomes", "the strategy, by its own arguments")
        return
    if is_open(value) and not isinstance(value, str):
        draft.row(key, value, "open", "its value is not in the file")
        return
    said = _NAMES.fullmatch(str(value).lower())
    if said is None:
        raise TranslateError(f"{key}: {shown(value)} is no strategy that is read: ddp, fsdp, deepspeed or an object")
    kind, stage = next(name for name in ("ddp", "fsdp", "deepspeed") if said[name]), said["stage"]
    draft.facts["lightning"] = kind
    cut = (
        deepspeed_zero.STAGES[int(stage)] if stage else {"fsdp": "full_shard", "deepspeed": "zero2", "ddp": "ddp"}[kind]
    )
    draft.say("cut", cut, key)
    away = "offload" in said[0]
    if away:
        nvme = said[0].endswith("nvme")
        for fact in ("params", "grads", "state") if cut == "full_shard" else ("grads", "state"):
            draft.say(fact, "disk" if nvme else "host", key)
        if nvme:
            draft.say("scratch", "/local_nvme", key)
    draft.row(key, value, "becomes", f"the strategy sf.{cut}" + ", and .on(...)" * away)


def _clipping(draft: Draft, key: str, value: Any) -> None:
    if value is None or (not is_open(value) and not number(key, value)):
        draft.row(key, value, "always", "nothing is clipped")
    else:
        by_value = word(draft.get("clip_algorithm", "norm")) == "VALUE"
        fact, call = ("clip_value", "so.clip_by_value") if by_value else ("clip", "so.clip_by_global_norm")
        meant(draft, key, value, sets(call, name="clip", about=key, **{fact: number}))


def _devices(draft: Draft, key: str, value: Any) -> None:
    draft.row(key, value, "yours", "starting processes: torchrun")
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        draft.facts["devices"] = value


def _scheduled(draft: Draft, key: str, value: Any) -> None:
    if isinstance(value, Mapping):
        draft.row(key, value, "open", "a number that changes with the epoch: the batches of sf.accumulate are yours")
    else:
        meant(draft, key, value, deepspeed.ACCUMULATE)


TRAINER: Table = {
    "strategy": Whole(_named),
    "precision": Whole(precision),
    "accumulate_grad_batches": Whole(_scheduled),
    "gradient_clip_val": Whole(_clipping),
    "gradient_clip_algorithm": By(
        {
            "NORM": always("by the norm of all gradients"),
            "NONE": always("by the norm of all gradients"),
            "VALUE": always("so.clip_by_value, with gradient_clip_val"),
        }
    ),
    "sync_batchnorm": flag(sets("sync_batch_norm= of functional", sync_batch_norm=True), always("the default")),
    "devices": Whole(_devices),
    "num_nodes": _START,
    "accelerator": By({"CPU": sets('device="cpu" of make_mesh', cpu=True)}, yours("make_mesh takes the accelerator")),
    "deterministic": yours("torch.use_deterministic_algorithms(True)"),
    "benchmark": yours("torch.backends.cudnn.benchmark"),
    "detect_anomaly": yours("sf.debug(nan=True), or torch.autograd.set_detect_anomaly(True)"),
    "use_distributed_sampler": yours("sf.run.batches(source, mesh, DATA, batch, seed)"),
    "inference_mode": yours("torch.no_grad()"),
    "plugins": missing("precision and checkpoints have arguments of their own", "None", "[]"),
    "max_steps": yours("steps= of sf.run.loop"),
    "max_time": yours("limit= of sf.run.loop"),
    "max_epochs": yours("epochs= of sf.run.batches, or steps= of sf.run.loop"),
    **dict.fromkeys(["logger", "loggers"], yours("report= of sf.run.loop: sf.run.jsonl, a function, ...")),
    "enable_progress_bar": yours("report= of sf.run.loop: sf.run.progress() is what it does by itself"),
    "callbacks": yours("functions: report= and evaluate= of sf.run.loop"),
    **dict.fromkeys(["enable_checkpointing", "default_root_dir"], yours("save= and every= of sf.run.loop")),
    **dict.fromkeys(
        ["val_check_interval", "check_val_every_n_epoch"], yours("evaluate=(function, steps) of sf.run.loop")
    ),
    **dict.fromkeys(
        [
            "fast_dev_run",
            "min_epochs",
            "min_steps",
            "limit_train_batches",
            "limit_val_batches",
            "limit_test_batches",
            "limit_predict_batches",
            "num_sanity_val_steps",
            "log_every_n_steps",
            "enable_model_summary",
            "profiler",
            "barebones",
            "reload_dataloaders_every_n_epochs",
            "enable_autolog_hparams",
            "model_registry",
            "overfit_batches",
        ],
        _LOOP,
    ),
}

STRATEGIES = {
    "FSDPStrategy": (FSDP, "fsdp", "full_shard"),
    "DeepSpeedStrategy": (DEEPSPEED, "deepspeed", "zero2"),
    "ModelParallelStrategy": (MODEL_PARALLEL, "fsdp2", "full_shard"),
    "DDPStrategy": (DDP, "ddp", "ddp"),
}


def translate(draft: Draft, strategy: Call | None, trainer: Mapping[str, Any]) -> None:
    """A strategy, and the arguments of a `Trainer` or `Fabric`, where there are any."""
    trainer, given = dict(trainer), dict(strategy.arguments) if strategy else {}
    draft.facts["clip_algorithm"] = trainer.get("gradient_clip_algorithm") or "norm"
    late = {"precision": given.pop("precision")} if "precision" in given else {}
    bits: dict[str, Any] = {
        k: given.pop(k) for k in ("loss_scale", "initial_scale_power", "loss_scale_window") if k in given
    }
    if strategy is not None:
        table, kind, cut = STRATEGIES[strategy.name]
        draft.facts["lightning"] = kind
        if kind == "deepspeed":
            _away("offload_optimizer", "optimizer", draft, given)
            _away("offload_parameters", "params", draft, given)
            given = {
                k: v for k, v in given.items() if v is not True or k not in ("offload_optimizer", "offload_parameters")
            }
        apply(draft, given, table, "", strategy.name)
        draft.facts.setdefault("cut", cut)
    first = {key: trainer.pop(key) for key in ("strategy",) if key in trainer}
    apply(draft, first, TRAINER, "", "Trainer")
    apply(draft, late, {"precision": Whole(precision)}, "", "Lightning")
    apply(draft, trainer, TRAINER, "", "Trainer")
    if draft.get("lightning_bits") == "torch.float16":
        deepspeed_bits.adapting(draft, "", strategy.arguments if strategy else {})
    apply(draft, bits, DEEPSPEED, "", "DeepSpeedStrategy")
    if draft.get("hybrid") and draft.get("cut") == "full_shard":
        draft.facts["cut"] = "hybrid_shard"
    draft.facts.setdefault("cut", "ddp")
