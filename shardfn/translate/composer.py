"""What Composer's keys mean: FSDPConfig, FSDP2Config, TPConfig, `Trainer`, and the YAML of llm-foundry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardfn.translate import fsdp
from shardfn.translate.draft import Draft
from shardfn.translate.facts import TranslateError
from shardfn.translate.meanings import (
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
from shardfn.translate.values import dtype, is_open, number, pair, shown, whole, whole_or_all, word

_LOOP = yours("sf.run.loop is a function; what it is given is yours: docs/how-to/run-a-loop.md")
_DATA = yours("the data, the model and the tokenizer are yours")


def _mixed(draft: Draft, key: str, value: Any) -> None:
    """DEFAULT, PURE or FULL, in the dtype of the trainer's precision; or a dict of dtypes."""
    if isinstance(value, Mapping):
        fsdp.precision(draft, key, dict(value))
        return
    kind = word(value)
    if kind not in ("DEFAULT", "PURE", "FULL"):
        if is_open(value):
            draft.row(key, value, "open", "its value is not in the file; DEFAULT, PURE or FULL")
            return
        raise TranslateError(f"{key}: {shown(value)} is not DEFAULT, PURE or FULL")
    made = draft.get("composer_dtype")
    if kind == "FULL":
        draft.row(key, value, "always", "all in the dtype of the parameters")
    elif made is None:
        about = "the dtype of precision=, which the file does not have"
        for fact in ("gather_dtype", "buffer_dtype", *(("reduce_dtype",) if kind == "PURE" else ())):
            draft.say(fact, draft.name("low", about), key)
        draft.say("cast_inputs", True, key)
        draft.row(key, value, "open", "in the dtype of precision=, which the file does not have: the name low")
    elif made == "torch.float32":
        draft.row(key, value, "always", "precision is float32: so is all")
    else:
        draft.say("gather_dtype", made, key, "precision")
        draft.say("buffer_dtype", made, key, "precision")
        draft.say("cast_inputs", True, key)
        draft.say("reduce_dtype", made if kind == "PURE" else "torch.float32", key)
        draft.row(
            key,
            value,
            "becomes",
            "gather_dtype=, input_dtype= of precision, reduce_dtype="
            + ("the same" if kind == "PURE" else "torch.float32"),
        )


FSDP: Table = {
    "sharding_strategy": Whole(fsdp.strategy),
    "mixed_precision": Whole(_mixed),
    "data_parallel_shard_degree": sets("the axis shard of make_mesh", dp_shard=lambda k, v: whole_or_all(k, v)),
    "data_parallel_replicate_degree": sets(
        "the axis replica of make_mesh", dp_replicate=lambda k, v: v and whole(k, v)
    ),
    "activation_checkpointing": fsdp.REMAT,
    "activation_checkpointing_reentrant": always("there is one implementation"),
    "activation_cpu_offload": fsdp.REMAT_AWAY,
    "auto_wrap": flag(always("stages are the layers"), fsdp.ONE_UNIT),
    "backward_prefetch": fsdp.PREFETCH,
    "backward_prefetch_limit": sets("prefetch= of functional, forward too", prefetch=whole),
    "forward_prefetch": fsdp.FORWARD,
    "forward_prefetch_limit": sets("prefetch= of functional, backward too", prefetch=whole),
    "limit_all_gathers": always("prefetch + 1 buffers, however deep the model"),
    "cpu_offload": Whole(fsdp.offload),
    "flatten_parameters": always("a stage's shards are one flat buffer, with the original names and shapes"),
    "use_orig_params": always("parameters have their own names and shapes"),
    "sync_module_states": fsdp.FSDP1["sync_module_states"],
    "load_monolith_rank0_only": yours("interop.load(folder, model, mesh, strategy, source=0)"),
    "state_dict_type": fsdp.STATES,
    "sharded_ckpt_prefix_dir": yours("the path that checkpoint.save is given"),
    "load_planner": missing("checkpoint.load takes names= and ignore=", "None"),
    "save_planner": missing("checkpoint.save writes the tree that it is given", "None"),
    "ignored_modules": fsdp.IGNORED,
    "keep_low_precision_grads": missing("a gradient has the dtype of its shard", "False"),
    "process_group": missing("write the mesh: its axes are the groups", "None"),
    "device_mesh": Whole(fsdp.mesh),
    "te_checkpoint_wrapper": missing("remat=True recomputes stages of any code", "False"),
    "te_shard_fp8_weight": missing("quant.quantize, of frozen parameters; products are of 16 bits or more", "False"),
    "min_params": sets("min_num_params= of functional", min_num_params=whole),
    "verbose": yours("what is printed"),
}

FSDP2: Table = {
    **{
        name: FSDP[name]
        for name in (
            [
                "mixed_precision",
                "activation_checkpointing",
                "activation_cpu_offload",
                "state_dict_type",
                "load_monolith_rank0_only",
                "device_mesh",
                "verbose",
            ]
        )
    },
    "reshard_after_forward": Whole(fsdp.reshard),
}

TP: Table = {
    "device_mesh": Whole(fsdp.mesh),
    "tensor_parallel_degree": sets("the axis tensor of make_mesh, and tensor= of functional", tensor=whole),
    "layer_plan": missing('tensor="auto", or a table of ends of paths, of functional', "None", "{}"),
}


def _parallel(draft: Draft, key: str, value: Any) -> None:
    if value is None or value == {}:
        return
    if not isinstance(value, Mapping):
        raise TranslateError(f"{key}: {shown(value)} is not a mapping of keys")
    if value.get("fsdp") is not None and value.get("fsdp2") is not None:
        raise TranslateError(f"{key}: fsdp and fsdp2: two strategies in one file; leave one of them")
    for name, one in value.items():
        if name not in ("fsdp", "fsdp2", "tp"):
            draft.row(f"{key}.{name}", one, "unknown", "no key of a parallelism_config; it has fsdp, fsdp2 and tp")
        elif one is not None:
            section(draft, f"{key}.{name}", one, {"fsdp": FSDP, "fsdp2": FSDP2, "tp": TP}[name])


def section(draft: Draft, key: str, value: Any, table: Table) -> None:
    """FSDPConfig, FSDP2Config or TPConfig, with the defaults that matter."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise TranslateError(f"{key}: {shown(value)} is not a mapping of keys")
    given = dict(value)
    if given.get("activation_checkpointing") and given.get("activation_cpu_offload"):
        given.pop("activation_checkpointing")
        draft.row(f"{key}.activation_checkpointing", True, "becomes", "remat=, as activation_cpu_offload says")
    backward = word(given.get("backward_prefetch", "BACKWARD_POST"))
    for name, off in (
        ("forward_prefetch_limit", word(given.get("forward_prefetch", False)) != "TRUE"),
        ("backward_prefetch_limit", backward == "NONE"),
    ):
        if name in given and (off or (name[0] == "f" and "backward_prefetch_limit" in given)):
            draft.row(f"{key}.{name}", given.pop(name), "always", "prefetch= is one number for both directions")
    apply(draft, given, table, f"{key}.", "Composer")
    if table is not TP:
        if "mixed_precision" not in given:
            _mixed(draft, f"{key}.mixed_precision", "DEFAULT")
        draft.facts.setdefault("cut", "full_shard")
        replicas, cut = draft.get("dp_replicate"), draft.get("cut")
        if (replicas or draft.get("hybrid")) and cut in ("full_shard", "shard_grad_op"):
            draft.facts["cut"] = "hybrid_shard" if cut == "full_shard" else "hybrid_shard_zero2"
        for fact, size in (("replica", replicas), ("shard", draft.get("dp_shard"))):
            if size:
                draft.say(fact, size, *draft.of("dp_replicate" if fact == "replica" else "dp_shard"))


def _precision(draft: Draft, key: str, value: Any) -> None:
    said = word(value)
    if said == "AMP_FP8":
        draft.row(key, value, "missing", "products are of 16 bits or more")
        return
    if said not in ("FP32", "AMP_FP16", "AMP_BF16"):
        if not is_open(value):
            raise TranslateError(f"{key}: {shown(value)} is not fp32, amp_fp16, amp_bf16 or amp_fp8")
        draft.row(key, value, "open", "its value is not in the file")
        return
    made = dtype(key, str(getattr(value, "text", value)).rpartition(".")[2].lower())
    draft.facts["composer_dtype"] = made
    if said == "FP32":
        draft.row(key, value, "always", "the default: all in float32")
        return
    draft.say("autocast", made, key)
    text = "torch.autocast around the model, and the dtype of mixed_precision"
    if said == "AMP_FP16":
        draft.say("scaled", {}, key)
        text += ", and so.loss_scaled"
    draft.row(key, value, "becomes", text)


def _micro(draft: Draft, key: str, value: Any) -> None:
    if word(value) == "AUTO":
        draft.row(
            key,
            value,
            "open",
            'sf.accumulate(loss, batch, micro="auto") finds it, for a loss that is a sum: docs/how-to/fit-batches.md',
        )
    else:
        meant(draft, key, value, sets("rows of a micro-batch on one rank", micro_batch=whole))


def _steps(value: Any, total: int | None = None) -> int | None:
    """In batches; None where it is said in epochs, tokens, samples or not at all."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = re.fullmatch(r"([0-9.]+)(ba|dur)", str(value).replace("_", "").strip())
    if found is None:
        return None
    if found[2] == "ba":
        return int(float(found[1]))
    return None if total is None else int(float(found[1]) * total)


def _scheduler(draft: Draft, key: str, value: Any, total: int | None) -> None:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise TranslateError(f"{key}: {shown(value)} has no name, such as cosine_with_warmup")
    name = value["name"]
    warmup = _steps(value.get("t_warmup", 0), total)
    steps = _steps(value.get("t_max", "1dur"), total)
    known = {"cosine_with_warmup", "linear_decay_with_warmup", "constant_with_warmup"}
    fine = name in known and warmup is not None and (steps is not None or name == "constant_with_warmup")
    fine = fine and value.get("alpha_i", 1.0) in (1, 1.0) and not value.get("scale_warmup", False)
    why = (
        "not there: a function of the step is yours"
        if name not in known
        else "not in batches: a function of the step is yours"
    )
    for one in value:
        if one not in ("name", "t_warmup", "t_max", "alpha_f", "alpha_i", "alpha", "scale_warmup"):
            draft.row(f"{key}.{one}", value[one], "unknown", "no key of a scheduler that is known here")
        else:
            draft.row(
                f"{key}.{one}", value[one], "becomes" if fine else "open", "a function of the step" if fine else why
            )
    if fine:
        alpha = number(f"{key}.alpha_f", value.get("alpha_f", 0.0))
        said = {"name": name, "warmup": warmup, "steps": max(steps or 0, warmup or 0), "alpha_f": alpha}
        draft.say("schedule", ("composer", tuple(said.items())), *(f"{key}.{one}" for one in value))


_OPTIMIZERS = {"decoupled_adamw": "adamw", "decoupled_lionw": "lion", "adamw": "adamw", "adam": "adam", "sgd": "sgd"}


def _optimizer(draft: Draft, key: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise TranslateError(f"{key}: {shown(value)} has no name, such as decoupled_adamw")
    name, given = value["name"], {k: v for k, v in value.items() if k != "name"}
    make = _OPTIMIZERS.get(name)
    if make is None or "lr" not in given or is_open(given["lr"]):
        draft.row(
            f"{key}.name", name, "missing" if make is None else "open", "the program has the name optimizer for yours"
        )
        for one, what in given.items():
            draft.row(f"{key}.{one}", what, "open", "an argument of that optimizer")
        return
    draft.row(f"{key}.name", name, "becomes", f"so.{make}")
    draft.say("optimizer", make, f"{key}.name")
    lr = number(f"{key}.lr", given["lr"])
    found: dict[str, Any] = {}
    decoupled = name.startswith("decoupled")
    takes = {"lr", "betas", "eps", "weight_decay"} - ({"eps"} if make == "lion" else set())
    takes = {"lr", "momentum", "weight_decay", "nesterov"} if make == "sgd" else takes
    for one, what in given.items():
        if one not in takes:
            draft.row(f"{key}.{one}", what, "unknown", f"no argument of so.{make}")
            continue
        text = f"{one}= of so.{make}"
        if one == "betas":
            found[one] = pair(f"{key}.{one}", what)
        elif one == "nesterov":
            found[one] = what
        elif one == "weight_decay" and decoupled:
            found[one] = number(f"{key}.{one}", what) / lr if lr else 0.0
            text += ", divided by lr: theirs is of the parameter, ours is multiplied by the rate"
        else:
            found[one] = number(f"{key}.{one}", what)
        draft.row(f"{key}.{one}", what, "becomes", text)
        draft.facts["optimizer_keys"] = (*draft.get("optimizer_keys", ()), f"{key}.{one}")
    defaults: dict[str, dict[str, Any]] = {
        "decoupled_adamw": {"betas": (0.9, 0.95), "weight_decay": 1e-5 / lr if lr else 0.0},
        "decoupled_lionw": {"weight_decay": 0.0},
    }
    draft.facts["optimizer_params"] = {**defaults.get(name, {}), **found}


def _algorithms(draft: Draft, key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        draft.row(key, value, "open", "of Python's: so.clip_by_global_norm for GradientClipping, so.ema for EMA")
        return
    for name, given in value.items():
        where, given = f"{key}.{name}", given or {}
        kind = given.get("clipping_type") if isinstance(given, Mapping) else None
        if name == "gradient_clipping" and kind in ("norm", "value"):
            fact = "clip" if kind == "norm" else "clip_value"
            draft.say(fact, number(where, given.get("clipping_threshold")), where)
            draft.row(where, given, "becomes", "so.clip_by_global_norm" if kind == "norm" else "so.clip_by_value")
            strangers(draft, where, given, "clipping_type clipping_threshold")
        else:
            draft.row(where, given, "missing", "no algorithm that is known here")


def _tokens(draft: Draft, key: str, value: Any) -> None:
    meant(
        draft,
        key,
        value,
        flag(
            missing("a loss of sf.psum(total, DATA) / sf.psum(count, DATA), with the count of all micro-batches"),
            always("micro-batches weigh by their rows"),
        ),
    )


CONFIG: Table = {
    "parallelism_config": Whole(_parallel),
    "fsdp_config": Whole(lambda draft, key, value: section(draft, key, value, FSDP)),
    "tp_config": Whole(lambda draft, key, value: section(draft, key, value, TP)),
    "precision": Whole(_precision),
    "device_train_microbatch_size": Whole(_micro),
    "accumulate_train_batch_on_tokens": Whole(_tokens),
    "global_train_batch_size": sets("rows of a step, on all ranks", train_batch=whole),
    "algorithms": Whole(_algorithms),
    "optimizer": Whole(_optimizer),
    "scheduler": Whole(lambda draft, key, value: _scheduler(draft, key, value, draft.get("total"))),
    "max_duration": Meaning("yours", "steps= of sf.run.loop, and of the schedule", {}),
    "save_num_checkpoints_to_keep": sets(
        "keep= of checkpoint.save", keep=lambda k, v: whole_or_all(k, v), save="sharded"
    ),
    "seed": yours("torch.manual_seed, the same on all ranks until parameters are placed"),
    "deterministic_mode": yours("torch.use_deterministic_algorithms(True)"),
    "dist_timeout": yours("timeout= of make_mesh"),
    "ddp_sync_strategy": always("gradients are summed over replicas once, after the last micro-batch"),
    "device": yours("make_mesh takes the accelerator"),
    "compile_config": missing("compile= of functional: torch.compile's arguments", "None"),
    "precision_config": missing("products are of 16 bits or more", "None"),
    "scale_schedule_ratio": missing("the steps of the schedule", "1.0", "1"),
    "step_schedulers_every_batch": yours("the schedule is of the step"),
    "load_path": yours("checkpoint.load"),
    **dict.fromkeys(
        [
            "load_object_store",
            "load_weights_only",
            "load_strict_model_weights",
            "load_progress_bar",
            "load_ignore_keys",
            "load_exclude_algorithms",
            "autoresume",
        ],
        yours("resume= of sf.run.loop, or checkpoint.load(path, like, ignore=[...], strict=...)"),
    ),
    **dict.fromkeys(
        [
            "save_folder",
            "save_filename",
            "save_latest_filename",
            "save_overwrite",
            "save_interval",
            "save_weights_only",
            "save_ignore_keys",
            "save_metrics",
        ],
        yours("save=, every= and keep= of sf.run.loop, or checkpoint.save"),
    ),
    **dict.fromkeys(
        [
            "model",
            "train_dataloader",
            "train_dataloader_label",
            "train_loader",
            "eval_loader",
            "eval_dataloader",
            "tokenizer",
            "max_seq_len",
            "tokenizer_name",
            "data_local",
            "data_remote",
            "global_seed",
            "dataset_name",
            "variables",
            "train_subset_num_batches",
            "eval_subset_num_batches",
            "spin_dataloaders",
            "icl_tasks",
            "eval_first",
            "device_eval_batch_size",
            "dataloader_timeout",
        ],
        _DATA,
    ),
    "optimizers": missing("of Python's: so.adamw and others", "None"),
    "eval_interval": yours("evaluate=(function, steps) of sf.run.loop"),
    "callbacks": yours("functions: report= and evaluate= of sf.run.loop"),
    "loggers": yours("report= of sf.run.loop: sf.run.jsonl, sf.run.tensorboard, a function"),
    "progress_bar": yours("report= of sf.run.loop: sf.run.progress() is what it does by itself"),
    "schedulers": missing("of Python's: so.warmup_cosine and others", "None"),
    **dict.fromkeys(
        [
            "algorithm_passes",
            "run_name",
            "log_to_console",
            "console_stream",
            "console_log_interval",
            "log_traces",
            "auto_log_hparams",
            "profiler",
            "python_log_level",
            "log_config",
            "eval_gauntlet",
        ],
        _LOOP,
    ),
}


def translate(draft: Draft, given: Mapping[str, Any]) -> None:
    """Arguments of `Trainer`, or the YAML."""
    if given.get("parallelism_config") and given.get("fsdp_config"):
        raise TranslateError("parallelism_config and fsdp_config: two strategies in one file; leave one of them")
    draft.facts["total"] = _steps(given.get("max_duration"))
    apply(draft, {k: given[k] for k in ("precision",) if k in given}, CONFIG, "", "Composer")
    apply(draft, {k: v for k, v in given.items() if k != "precision"}, CONFIG, "", "Composer")
    draft.facts.setdefault("cut", "ddp")
