"""Meanings of Composer's keys: FSDPConfig, FSDP2Config, TPConfig, `Trainer`, and the YAML of llm-foundry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardfn.translate import fsdp, optimizers, precision
from shardfn.translate.draft import TranslationBuilder, UndefinedName
from shardfn.translate.optimizers import OptimizerCounterpart, steps_of
from shardfn.translate.schema import By, Section, Table, always, flag, meant, missing, same_for, sets, unsaid, yours
from shardfn.translate.values import TranslateError, as_count, dtype, natural, number, upper_word, whole_or_all

_LOOP = yours("sf.run.loop is a function; what it is given is yours: docs/how-to/run-a-loop.md")
_DATA = yours("the data, the model and the tokenizer are yours")


def _mixed(draft: TranslationBuilder, key: str, value: Any) -> None:
    """Reads DEFAULT or PURE, which use the dtype of the trainer's precision."""
    trainer_dtype, pure = draft.get("low"), upper_word(value) == "PURE"
    if trainer_dtype == "torch.float32":
        draft.row(key, value, "always", "precision is float32: so is all")
        return
    low = trainer_dtype or draft.name("low", "the dtype of precision=, which the file does not have")
    for fact in ("gather_dtype", "buffer_dtype"):
        draft.say(fact, low, *((key, "precision") if trainer_dtype else (key,)))
    draft.say("cast_inputs", True, key)
    draft.say("reduce_dtype", low if pure else "torch.float32", key)
    same = f"gather_dtype=, input_dtype= of precision, reduce_dtype={'the same' if pure else 'torch.float32'}"
    none = "in the dtype of precision=, which the file does not have: the name low"
    draft.row(key, value, "becomes" if trainer_dtype else "open", same if trainer_dtype else none)


_MIXED = By(
    {**same_for("DEFAULT PURE", _mixed), "FULL": always("all in the dtype of the parameters")},
    precision.POLICIES.otherwise,
    said="DEFAULT, PURE or FULL",
)
FSDP: Table = {
    **{name: meaning for name, meaning in fsdp.SHARED.items() if name != "param_init_fn"},
    "sharding_strategy": fsdp.STRATEGY,
    "mixed_precision": _MIXED,
    "data_parallel_shard_degree": sets("the axis shard of make_mesh", dp_shard=whole_or_all),
    "data_parallel_replicate_degree": sets("the axis replica of make_mesh", dp_replicate=whole_or_all),
    "activation_checkpointing": fsdp.REMAT,
    "activation_checkpointing_reentrant": always("there is one implementation"),
    "activation_cpu_offload": fsdp.REMAT_AWAY,
    "auto_wrap": flag(always("stages are the layers"), fsdp.ONE_UNIT),
    "backward_prefetch_limit": sets("prefetch= of functional, forward too", prefetch=as_count),
    "forward_prefetch_limit": sets("prefetch= of functional, backward too", prefetch=as_count),
    "cpu_offload": fsdp.OFFLOAD,
    "flatten_parameters": always("a stage's shards are one flat buffer, with the original names and shapes"),
    "load_monolith_rank0_only": yours("interop.load(folder, model, mesh, strategy, src_rank=0)"),
    "state_dict_type": fsdp.STATES,
    "sharded_ckpt_prefix_dir": yours("the path that checkpoint.save is given"),
    "load_planner": missing("checkpoint.load takes names= and ignore=", "None"),
    "save_planner": missing("checkpoint.save writes the tree that it is given", "None"),
    "keep_low_precision_grads": precision.POLICY["keep_low_precision_grads"],
    "process_group": fsdp.FSDP1["process_group"],
    "device_mesh": fsdp.MESH,
    "te_checkpoint_wrapper": missing("remat=True recomputes stages of any code", "False"),
    "te_shard_fp8_weight": missing("quant.quantize, of frozen parameters; products are of 16 bits or more", "False"),
    "min_params": sets("min_num_params= of functional", min_num_params=as_count),
    "verbose": yours("what is printed"),
}
_IN_BOTH = (
    "mixed_precision activation_checkpointing activation_cpu_offload state_dict_type load_monolith_rank0_only "
    "device_mesh verbose"
)
FSDP2: Table = {**{name: FSDP[name] for name in _IN_BOTH.split()}, "reshard_after_forward": fsdp.RESHARD}
TP: Table = {
    "device_mesh": fsdp.MESH,
    "tensor_parallel_degree": sets("the axis tensor of make_mesh, and tensor= of functional", tensor=as_count),
    "layer_plan": missing('tensor="auto", or a table of ends of paths, of functional', "None", "{}"),
}


def _of_one_number(draft: TranslationBuilder, prefix: str, settings: dict[str, Any]) -> None:
    """Takes out the keys that other keys of the section overrule."""
    if settings.get("activation_checkpointing") and settings.get("activation_cpu_offload"):
        remat = settings.pop("activation_checkpointing")
        draft.row(f"{prefix}activation_checkpointing", remat, "becomes", "remat=, as activation_cpu_offload says")
        meant(draft, f"{prefix}activation_cpu_offload", settings.pop("activation_cpu_offload"), fsdp.REMAT_INPUTS_AWAY)
    forward = (
        upper_word(settings.get("forward_prefetch", False)) == "TRUE" and "backward_prefetch_limit" not in settings
    )
    backward = upper_word(settings.get("backward_prefetch", "BACKWARD_POST")) != "NONE"
    for name, counts in (("forward_prefetch_limit", forward), ("backward_prefetch_limit", backward)):
        if name in settings and not counts:
            draft.row(f"{prefix}{name}", settings.pop(name), "always", "prefetch= is one number for both directions")


def _mixed_by_default(draft: TranslationBuilder, prefix: str, settings: dict[str, Any]) -> None:
    if "mixed_precision" not in settings:
        _mixed(draft, f"{prefix}mixed_precision", "DEFAULT")


_FSDP, _FSDP2 = (
    Section(t, "Composer", cut="full_shard", before=_of_one_number, after=_mixed_by_default) for t in (FSDP, FSDP2)
)
_PARTS = {"fsdp": _FSDP, "fsdp2": _FSDP2, "tp": Section(TP, "Composer")}


def _one_of_two(draft: TranslationBuilder, prefix: str, settings: dict[str, Any]) -> None:
    if settings.get("fsdp") is not None and settings.get("fsdp2") is not None:
        raise TranslateError(f"{prefix}fsdp and fsdp2: two strategies in one file; leave one of them")


def _low_precision(draft: TranslationBuilder, key: str, value: Any) -> None:
    text = precision.of_autocast(draft, str(dtype(key, upper_word(value).lower())), key)
    draft.row(key, value, "becomes", f"{text}, and the dtype of mixed_precision")


_PRECISION = By(
    {
        "fp32": always("the default: all in float32"),
        **same_for("amp_fp16 amp_bf16", _low_precision),
        "amp_fp8": missing("products are of 16 bits or more"),
    }
)


def _read_optimizer(draft: TranslationBuilder, key: str, value: Any) -> None:
    name = optimizers.read_kind(key, value, "name", "decoupled_adamw")
    settings = {argument: x for argument, x in value.items() if argument != "name"}
    kind = OPTIMIZERS.get(name)
    if kind is None:
        optimizers.unread(draft, f"{key}.name", name, f"{key}.", settings)
        return
    draft.row(f"{key}.name", name, "becomes", kind.text)
    draft.say("optimizer", kind.ours, f"{key}.name")
    arguments = optimizers.arguments(draft, key, settings, kind)
    lr, decay = arguments["lr"], arguments.get("weight_decay")
    if kind.notes and decay:
        both_numbers = not isinstance(lr, UndefinedName) and not isinstance(decay, UndefinedName)
        arguments["weight_decay"] = (decay / lr if lr else 0.0) if both_numbers else UndefinedName(f"{decay} / {lr}")


_DECOUPLED = {"weight_decay": ", divided by lr: theirs is of the parameter, ours is multiplied by the rate"}
OPTIMIZERS = {
    "decoupled_adamw": OptimizerCounterpart("adamw", {"betas": (0.9, 0.95), "weight_decay": 1e-5}, _DECOUPLED),
    "decoupled_lionw": OptimizerCounterpart("lion", {"weight_decay": 0.0}, _DECOUPLED),
    **{name: OptimizerCounterpart(name) for name in ("adamw", "adam", "sgd")},
}


def _scheduler(draft: TranslationBuilder, key: str, value: Any) -> None:
    optimizers.read_kind(key, value, "name", "cosine_with_warmup")
    optimizers.schedule_of_composer(draft, key, value, draft.get("total"))


_TYPE = {"norm": always("so.clip_by_global_norm"), "value": sets("so.clip_by_value", by_value=True)}
_CLIPPING: Table = {
    "clipping_type": By(_TYPE, missing("no clipping that is known here")),
    "clipping_threshold": sets("so.clip_by_global_norm, or so.clip_by_value if clipping_type is value", clip=number),
}
_ALGORITHMS: Table = {"gradient_clipping": Section(_CLIPPING, "gradient_clipping"), "ema": missing("so.ema")}


def _algorithms(draft: TranslationBuilder, key: str, value: Any) -> None:
    if isinstance(value, Mapping):
        meant(draft, key, value, Section(_ALGORITHMS, "algorithms"))
    else:
        draft.row(key, value, "open", "of Python's: so.clip_by_global_norm for GradientClipping, so.ema for EMA")


_FITS = 'sf.accumulate(loss, batch, micro="auto") finds it, for a loss that is a sum: docs/how-to/fit-batches.md'
_EACH_ONCE = "a loss of sf.psum(total, DATA) / sf.psum(count, DATA), with the count of all micro-batches"
CONFIG: Table = {
    "parallelism_config": Section(_PARTS, "fsdp, fsdp2 and tp", before=_one_of_two),
    "fsdp_config": _FSDP,
    "tp_config": Section(TP, "Composer"),
    "precision": _PRECISION,
    "device_train_microbatch_size": By(
        {"auto": unsaid(_FITS)}, sets("rows of a micro-batch on one rank", micro_batch=as_count)
    ),
    "accumulate_train_batch_on_tokens": flag(missing(_EACH_ONCE), always("micro-batches weigh by their rows")),
    "global_train_batch_size": sets("rows of a step, on all ranks", train_batch=as_count),
    "algorithms": _algorithms,
    "optimizer": _read_optimizer,
    "scheduler": _scheduler,
    "max_duration": yours("steps= of sf.run.loop, and of the schedule", steps=lambda key, value: steps_of(value)),
    "save_num_checkpoints_to_keep": sets("keep_last= of sf.run.loop", keep=whole_or_all, save="sharded"),
    "seed": yours("seed= of sf.run.batches and sf.run.loop", seed=natural),
    "deterministic_mode": yours("torch.use_deterministic_algorithms(True)"),
    "dist_timeout": yours("timeout= of make_mesh"),
    "ddp_sync_strategy": always("gradients are summed over replicas once, after the last micro-batch"),
    "device": yours("make_mesh takes the accelerator"),
    "compile_config": missing("compile= of functional: torch.compile's arguments", "None"),
    "precision_config": missing("products are of 16 bits or more", "None"),
    "scale_schedule_ratio": missing("the steps of the schedule", "1.0", "1"),
    "step_schedulers_every_batch": yours("the schedule is of the step"),
    "load_path": yours("checkpoint.load"),
    **same_for(
        "load_object_store load_weights_only load_strict_model_weights load_progress_bar load_ignore_keys"
        " load_exclude_algorithms autoresume",
        yours("resume= of sf.run.loop, or checkpoint.load(path, like, ignore=[...], strict=...)"),
    ),
    **same_for(
        "save_folder save_filename save_latest_filename save_overwrite save_interval save_weights_only"
        " save_ignore_keys save_metrics",
        yours("save=, save_every= and keep_last= of sf.run.loop, or checkpoint.save"),
    ),
    **same_for(
        "model train_dataloader train_dataloader_label train_loader eval_loader eval_dataloader tokenizer", _DATA
    ),
    **same_for("max_seq_len tokenizer_name data_local data_remote global_seed dataset_name variables icl_tasks", _DATA),
    **same_for("train_subset_num_batches eval_subset_num_batches spin_dataloaders eval_first", _DATA),
    **same_for("device_eval_batch_size dataloader_timeout", _DATA),
    "optimizers": missing("of Python's: so.adamw and others", "None"),
    "eval_interval": yours("evaluate=(function, steps) of sf.run.loop"),
    "callbacks": yours("functions: report= and evaluate= of sf.run.loop"),
    "loggers": yours("report= of sf.run.loop: sf.run.jsonl, sf.run.tensorboard, a function"),
    "progress_bar": yours("report= of sf.run.loop: sf.run.progress() is what it does by itself"),
    "schedulers": missing("of Python's: so.warmup_cosine and others", "None"),
    **same_for(
        "algorithm_passes run_name log_to_console console_stream console_log_interval log_traces auto_log_hparams"
        " profiler python_log_level log_config eval_gauntlet",
        _LOOP,
    ),
}


def _one_strategy(draft: TranslationBuilder, prefix: str, settings: dict[str, Any]) -> None:
    if settings.get("parallelism_config") and settings.get("fsdp_config"):
        raise TranslateError("parallelism_config and fsdp_config: two strategies in one file; leave one of them")
    draft.put("total", steps_of(settings.get("max_duration")))
    mode = upper_word(settings.get("precision", "")).lower()
    draft.put("low", dtype("precision", mode) if mode in ("fp32", "amp_fp16", "amp_bf16") else None)


FILE = Section(CONFIG, "Composer", first="precision", before=_one_strategy)
