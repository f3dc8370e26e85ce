"""Meanings of the arguments of Lightning and Fabric: of strategies, and of `Trainer` and `Fabric`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardfn.translate import accelerate, deepspeed, fsdp, precision
from shardfn.translate.draft import TranslationBuilder
from shardfn.translate.schema import By, Section, Table, always, flag, meant, missing, read, same_for, sets, yours
from shardfn.translate.values import SourceCall, as_count, dtype, positive, strategy_path, whole_or_all

_START = yours("starting processes: torchrun")
_LOOP = yours("sf.run.loop is a function; what it is given is yours: docs/how-to/run-a-loop.md")


def _low_precision(draft: TranslationBuilder, key: str, value: Any) -> None:
    """Reads a precision of 16 bits: the strategy says what is moved in it, and "true" that all is computed in it."""
    precision_name, kind = str(value).lower(), draft.get("kind")
    low_dtype = str(dtype(key, precision_name))
    text: list[str] = []
    if kind == "deepspeed":
        draft.put("low", low_dtype)
        text.append(precision.of_stages(draft, low_dtype, key, kind))
    elif precision_name.endswith("true"):
        draft.say("param_dtype", low_dtype, key)
        draft.say("cast_inputs", True, key)
        text.append(f"module.to({low_dtype})")
    if kind == "fsdp1" and "gather_dtype" not in draft.facts:
        text.append(precision.of_stages(draft, low_dtype, key, kind))
    elif kind == "fsdp1":
        draft.say("cast_inputs", True, key)
    if kind != "deepspeed" and not precision_name.endswith("true"):
        text.append(precision.of_autocast(draft, low_dtype, key))
    draft.row(key, value, "becomes", ", ".join(text))


_DOUBLE = "module.to(torch.float64), and input_dtype= of the stages"
PRECISION = By(
    {
        **same_for("none 32 32-true", always("the default: all in float32")),
        **same_for("64 64-true", sets(_DOUBLE, param_dtype="torch.float64", cast_inputs=True)),
        **same_for("16 bf16 16-mixed bf16-mixed 16-true bf16-true", _low_precision),
        **same_for("transformer-engine transformer-engine-float16", missing("products are of 16 bits or more")),
    },
    said="a precision, such as 32-true, bf16-mixed or 16-mixed",
)
_REMAT = sets("remat=True, for all stages", remat="True")
_PROCESSES: Table = {
    **same_for("accelerator parallel_devices cluster_environment process_group_backend", _START),
    **same_for("checkpoint_io precision_plugin start_method", _START),
    "timeout": yours("timeout= of make_mesh"),
}
FSDP: Table = {
    **fsdp.FSDP1,
    **_PROCESSES,
    "policy": fsdp.WRAP,
    **same_for("activation_checkpointing activation_checkpointing_policy", By({"none": always("the default")}, _REMAT)),
    "state_dict_type": fsdp.STATES,
    "precision": PRECISION,
}


_SHARDS, _SPLIT = (
    sets("the axis shard of make_mesh", shard=as_count),
    sets("the axis tensor of make_mesh", tensor=as_count),
)
MODEL_PARALLEL: Table = {
    **_PROCESSES,
    "data_parallel_size": By({"auto": sets("as many nodes as there are")}, _SHARDS),
    "tensor_parallel_size": By({}, _SPLIT, said="as many as a node has devices, which is to be written"),
    "parallelize_fn": missing('it says what is cut: tensor="auto", or a table, of functional', "None"),
    "save_distributed_checkpoint": flag(fsdp.STATES.choices["SHARDED"], fsdp.STATES.choices["FULL"]),
}
DDP: Table = {
    **_PROCESSES,
    "ddp_comm_state": missing("gradients are values: change them before optimizer.step", "None"),
    "ddp_comm_hook": missing("reduce_dtype=torch.bfloat16 of functional, or reduce_format=quant.int8()", "None"),
    "ddp_comm_wrapper": missing("reduce_dtype=torch.bfloat16 of functional", "None"),
    "model_averaging_period": missing("parameters are the same on all ranks, always", "None"),
    "find_unused_parameters": always("a parameter that the loss does not use has a gradient of zeros"),
    "static_graph": always("nothing is assumed of the graph"),
    "gradient_as_bucket_view": always("there are no buckets"),
    "bucket_cap_mb": always("there are no buckets: a stage's gradients of one dtype are one buffer"),
    "broadcast_buffers": missing("buffers are whole on every rank, and not broadcast", "False"),
}


def _config(draft: TranslationBuilder, key: str, value: Any) -> None:
    if value is None:
        draft.row(key, value, "always", "nothing more is said")
    elif isinstance(value, Mapping):
        draft.row(key, "a dict", "becomes", "its keys, below")
        read(draft, key, value, deepspeed.FILE)
    else:
        draft.row(key, value, "open", "a file: translate that, beside this one")


DEEPSPEED: Table = {
    **_PROCESSES,
    "stage": deepspeed.STAGE,
    "zero_optimization": flag(always("by stage="), sets("sf.ddp", cut="ddp")),
    "config": _config,
    "offload_optimizer": flag(deepspeed.STATE.choices["cpu"], always("the device")),
    "offload_parameters": flag(deepspeed.PARAMS.choices["cpu"], always("the device")),
    "offload_optimizer_device": By(same_for("cpu nvme", always("with offload_optimizer"))),
    "offload_params_device": By(same_for("cpu nvme", always("with offload_parameters"))),
    "nvme_path": deepspeed.SCRATCH,
    "remote_device": yours("sf.init_sharded makes each rank's part where the strategy keeps it"),
    **same_for(
        "contiguous_gradients overlap_comm allgather_partitions reduce_scatter allgather_bucket_size"
        " reduce_bucket_size sub_group_size pin_memory",
        always("one flat buffer a stage, in flight while others compute"),
    ),
    **same_for(
        "params_buffer_count params_buffer_size max_in_cpu optimizer_buffer_count block_size queue_depth single_submit"
        " overlap_events thread_count",
        always("buffers follow from prefetch=, and four threads read and write"),
    ),
    "zero_allow_untested_optimizer": deepspeed.CONFIG["zero_allow_untested_optimizer"],
    "logging_batch_size_per_gpu": yours("it is printed alone"),
    "logging_level": yours("what is logged"),
    **precision.SCALING,
    **deepspeed.CHECKPOINTING,
    "load_full_weights": yours("interop.load"),
    "exclude_frozen_parameters": yours("sf.shards.partition before checkpoint.save"),
    "precision": PRECISION,
}
STRATEGIES = {
    "FSDPStrategy": Section(FSDP, "FSDPStrategy", kind="fsdp1", cut="full_shard"),
    "DeepSpeedStrategy": Section(DEEPSPEED, "DeepSpeedStrategy", kind="deepspeed", cut="zero2"),
    "ModelParallelStrategy": Section(MODEL_PARALLEL, "ModelParallelStrategy", kind="fsdp2", cut="full_shard"),
    "DDPStrategy": Section(DDP, "DDPStrategy", kind="ddp", cut="ddp"),
}


def _strategy(kind: str, cut: str, tier: str | None = None) -> Any:
    """The meaning of a strategy's name; `tier` is where it offloads what it cuts."""
    offloaded = ("params", "grads", "state") if cut == "full_shard" else ("grads", "state")
    facts: dict[str, Any] = dict.fromkeys(offloaded, tier) if tier else {}
    facts |= {"scratch": "/local_nvme"} if tier == "disk" else {}
    return sets(
        f"the strategy {strategy_path(cut)}" + (", and .with_tiers(...)" if tier else ""), kind=kind, cut=cut, **facts
    )


_ENDS = ("", "_find_unused_parameters_true", "_find_unused_parameters_false")
_TIERS = {"": None, "_offload": "host", "_offload_nvme": "disk"}
_NAMED = By(
    {
        **{f"{name}()": sets("the strategy, by its own arguments") for name in STRATEGIES},
        "auto": _strategy("ddp", "ddp"),
        **{
            f"ddp{start}{end}": _strategy("ddp", "ddp")
            for start in ("", "_spawn", "_fork", "_notebook")
            for end in _ENDS
        },
        "fsdp": _strategy("fsdp1", "full_shard"),
        "fsdp_cpu_offload": _strategy("fsdp1", "full_shard", "host"),
        "deepspeed": _strategy("deepspeed", "zero2"),
        **{
            f"deepspeed_stage_{stage}{end}": _strategy("deepspeed", deepspeed.STAGES[stage], tier)
            for stage in (1, 2, 3)
            for end, tier in _TIERS.items()
        },
    },
    said="a strategy that is read: ddp, fsdp, deepspeed or an object",
)


def _scheduled(draft: TranslationBuilder, key: str, value: Any) -> None:
    if isinstance(value, Mapping):
        draft.row(key, value, "open", "a number that changes with the epoch: the batches of sf.accumulate are yours")
    else:
        meant(draft, key, value, deepspeed.ACCUMULATE)


_BY_VALUE = sets("so.clip_by_value, with gradient_clip_val", by_value=True)
_CLIPS = "so.clip_by_global_norm, or so.clip_by_value if gradient_clip_algorithm is value"
_AVERAGES = "StochasticWeightAveraging WeightAveraging EMAWeightAveraging"
_CALLBACKS = {
    **same_for(_AVERAGES, "so.ema(optimizer, ...): docs/how-to/evaluate-averaged-parameters.md"),
    "GradientAccumulationScheduler": "sf.accumulate, by the step",
    "LearningRateFinder": "docs/how-to/use-optimizers.md has a loop that finds a rate",
    "BatchSizeFinder": 'sf.accumulate(loss, batch, micro="auto")',
    **same_for("BaseFinetuning BackboneFinetuning", "frozen= of shard: docs/how-to/freeze-parameters.md"),
    "ModelPruning": "a mask of the parameters, in the step",
}


def _callbacks(draft: TranslationBuilder, key: str, value: Any) -> None:
    """Reads a list of callbacks, of which some change what is trained."""
    each_one = value if isinstance(value, (list, tuple)) else [value]
    changing = [callback for callback in each_one if isinstance(callback, SourceCall) and callback.name in _CALLBACKS]
    for callback in changing:
        draft.row(f"{key}.{callback.name}", callback, "missing", _CALLBACKS[callback.name])
    if len(changing) < len(each_one):
        draft.row(key, value, "yours", "functions: report= and evaluate= of sf.run.loop")


TRAINER: Table = {
    "strategy": _NAMED,
    "precision": PRECISION,
    "accumulate_grad_batches": _scheduled,
    "gradient_clip_val": sets(_CLIPS, off="nothing is clipped", name="clip", clip=positive),
    "gradient_clip_algorithm": By(
        {**same_for("norm none", always("by the norm of all gradients")), "value": _BY_VALUE}
    ),
    "sync_batchnorm": flag(sets("sync_batch_norm= of functional", sync_batch_norm=True), always("the default")),
    "devices": _START,
    "num_nodes": _START,
    "accelerator": By({"cpu": accelerate.CPU.choices["true"]}, yours("make_mesh takes the accelerator")),
    "deterministic": yours("torch.use_deterministic_algorithms(True)"),
    "benchmark": yours("torch.backends.cudnn.benchmark"),
    "detect_anomaly": yours("sf.debug(nan=True), or torch.autograd.set_detect_anomaly(True)"),
    "use_distributed_sampler": yours("sf.run.batches(source, mesh, DATA, batch, seed)"),
    "inference_mode": yours("torch.no_grad()"),
    "plugins": missing("precision and checkpoints have arguments of their own", "None", "[]"),
    "max_steps": yours("steps= of sf.run.loop", steps=whole_or_all),
    "max_time": yours("time_limit= of sf.run.loop"),
    "max_epochs": yours("epochs= of sf.run.batches, or steps= of sf.run.loop"),
    **same_for("logger loggers", yours("report= of sf.run.loop: sf.run.jsonl, a function, ...")),
    "enable_progress_bar": yours("report= of sf.run.loop: sf.run.progress() is what it does by itself"),
    "callbacks": _callbacks,
    **same_for("enable_checkpointing default_root_dir", yours("save= and save_every= of sf.run.loop")),
    **same_for("val_check_interval check_val_every_n_epoch", yours("evaluate=(function, steps) of sf.run.loop")),
    **same_for(
        "fast_dev_run min_epochs min_steps limit_train_batches limit_val_batches limit_test_batches"
        " limit_predict_batches num_sanity_val_steps log_every_n_steps enable_model_summary profiler barebones"
        " reload_dataloaders_every_n_epochs enable_autolog_hparams model_registry overfit_batches",
        _LOOP,
    ),
}


def read_trainer(draft: TranslationBuilder, strategy: SourceCall | None, trainer: Mapping[str, Any]) -> None:
    """Reads a strategy and the arguments of a `Trainer` or `Fabric`, if there are any."""
    later: dict[str, Any] = {}
    settings = dict(strategy.arguments) if strategy else {}
    if strategy is not None:
        later = {name: settings.pop(name) for name in ("precision", *precision.ADAPTING) if name in settings}
        for name, device in (("offload_optimizer", deepspeed.STATE), ("offload_parameters", deepspeed.PARAMS)):
            if strategy.name == "DeepSpeedStrategy" and settings.get(name) is True:
                place = settings.get(name.replace("parameters", "params") + "_device", "cpu")
                meant(draft, name, settings.pop(name) and place, device)
        read(draft, "", settings, STRATEGIES[strategy.name])
    read(draft, "", {"precision": later.pop("precision")} if "precision" in later else {}, Section(FSDP))
    read(draft, "", trainer, Section(TRAINER, "Trainer", first="strategy"))
    half = draft.get("low") == "torch.float16"
    off = same_for(" ".join(precision.ADAPTING), always("of no effect without 16 bits"))
    read(
        draft, "", later, Section(precision.SCALING if half else off, before=precision.where_adapting if half else None)
    )
    if half:
        precision.defaults(draft, "", dict(strategy.arguments) if strategy else {})
