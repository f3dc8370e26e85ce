"""What the arguments of Transformers mean: of `TrainingArguments` and its kind, and of `Trainer` and its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardfn.translate import accelerate, deepspeed, fsdp
from shardfn.translate.draft import Draft, Name
from shardfn.translate.facts import Call, TranslateError
from shardfn.translate.meanings import Table, Whole, always, apply, flag, meant, missing, sets, yours
from shardfn.translate.values import is_auto, is_open, number, on, shown, whole, word

ARGUMENTS = {"TrainingArguments", "Seq2SeqTrainingArguments", "SentenceTransformerTrainingArguments", "SFTConfig"}
TRAINERS = {"Seq2SeqTrainer", "SentenceTransformerTrainer", "SFTTrainer"}
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "learning_rate": 5e-5,
    "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "optim": "adamw_torch_fused",
    "lr_scheduler_type": "linear", "warmup_steps": 0, "warmup_ratio": 0.0, "max_steps": -1,
    "bf16": False, "fp16": False, "average_tokens_across_devices": True,
}  # fmt: skip
_OF_TRL = {"learning_rate": 2e-5, "bf16": True, "gradient_checkpointing": True}
_LOOP = yours("what sf.run.loop is given: docs/how-to/run-a-loop.md")
_DATA = yours("what sf.run.batches is given: docs/how-to/feed-batches.md")
_HUB = yours("interop.save_pretrained writes a folder that can be uploaded")
_TPU = yours("there are no TPUs here, and of a run on GPUs it says nothing")
_READ = sets("of the optimizer and its rate, with all their arguments")
OPTIMIZERS = {
    **dict.fromkeys(["adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"], "adamw"),
    "sgd": "sgd", "lion_32bit": "lion", "adagrad": "torch.optim.Adagrad", "rmsprop": "torch.optim.RMSprop",
}  # fmt: skip
SCHEDULES = {"linear", "cosine", "constant", "constant_with_warmup"}


def _precision(draft: Draft, key: str, value: Any) -> None:
    if is_open(value) and word(value) not in ("TRUE", "FALSE"):
        draft.row(key, value, "open", "its value is not in the file; if it is true, torch.autocast around the model")
    elif on(key, value):
        accelerate.precision(draft, key, key)
    else:
        draft.row(key, value, "always", "the default: all in the dtype of the parameters")


def _compile(name: str) -> Whole:
    def read(draft: Draft, key: str, value: Any) -> None:
        if is_open(value):
            draft.row(key, value, "open", "its value is not in the file; compile= of functional")
            return
        if not draft.get("compiles") or value is None:
            draft.row(key, value, "always", "nothing is compiled" if not draft.get("compiles") else "the default")
            return
        if name:
            draft.facts["compile"] = {**draft.get("compile", {}), name: str(value)}
        draft.facts.setdefault("compile", {})
        draft.keys["compile"] = (*draft.of("compile"), key)
        draft.row(key, value, "becomes", "compile= of functional")

    return Whole(read)


def _clip(draft: Draft, key: str, value: Any) -> None:
    if value is None or (not is_open(value) and not number(key, value)):
        draft.row(key, value, "always", "nothing is clipped")
    else:
        meant(draft, key, value, deepspeed.CLIP)


def _accumulate(draft: Draft, key: str, value: Any) -> None:
    meant(draft, key, value, deepspeed.ACCUMULATE)


_OF_LOOP = [
    "output_dir", "num_train_epochs", "logging_dir", "logging_strategy", "logging_steps", "logging_first_step",
    "log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen", "include_tokens_per_second",
    "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id",
    "trackio_bucket_id", "trackio_static_space_id", "eval_strategy", "evaluation_strategy", "eval_steps",
    "eval_delay", "eval_on_start", "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object",
    "eval_accumulation_steps", "include_for_metrics", "include_inputs_for_metrics", "batch_eval_metrics",
    "save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit", "save_safetensors",
    "enable_jit_checkpoint", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    "ignore_data_skip", "restore_callback_states_from_checkpoint", "full_determinism", "seed", "debug",
    "skip_memory_metrics", "do_train", "do_eval", "do_predict", "resume_from_checkpoint", "overwrite_output_dir",
    "torch_empty_cache_steps", "bf16_full_eval", "fp16_full_eval", "per_device_eval_batch_size",
    "predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config", "eval_packing",
]  # fmt: skip
_OF_DATA = [
    "data_seed", "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory",
    "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context",
    "dataloader_in_order", "remove_unused_columns", "label_names", "train_sampling_strategy", "length_column_name",
    "group_by_length", "sortish_sampler", "batch_sampler", "multi_dataset_batch_sampler", "prompts",
    "dataset_text_field", "dataset_kwargs", "dataset_num_proc", "eos_token", "pad_token", "max_length",
    "max_seq_length", "packing", "packing_strategy", "padding_free", "pad_to_multiple_of", "completion_only_loss",
    "assistant_only_loss", "chat_template_path", "shuffle_dataset", "truncation_mode",
]  # fmt: skip
_OF_HUB = [
    "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision",
    "push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token",
]  # fmt: skip
TABLE: Table = {
    "bf16": Whole(_precision),
    "fp16": Whole(_precision),
    "max_grad_norm": Whole(_clip),
    "gradient_accumulation_steps": Whole(_accumulate),
    "per_device_train_batch_size": sets(
        "rows of a micro-batch on one rank", name="micro_batch_size", about="rows of one rank", micro_batch=whole
    ),
    "average_tokens_across_devices": flag(
        sets("a loss of the tokens of all ranks and micro-batches, each of which counts once", tokens="all"),
        sets("a loss of the tokens of all micro-batches of a rank, and its mean over ranks", tokens="own"),
    ),
    "gradient_checkpointing": fsdp.REMAT,
    "activation_checkpointing": fsdp.REMAT,
    **dict.fromkeys(
        ["gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"], always("there is one implementation")
    ),
    "torch_compile": _compile(""),
    "torch_compile_backend": _compile("backend"),
    "torch_compile_mode": _compile("mode"),
    "use_cpu": flag(sets('device="cpu" of make_mesh', cpu=True), always("make_mesh takes the accelerator")),
    "no_cuda": flag(sets('device="cpu" of make_mesh', cpu=True), always("make_mesh takes the accelerator")),
    "label_smoothing_factor": missing("of the loss, which is yours", "0.0", "0"),
    "neftune_noise_alpha": missing("noise on the embeddings, in your module", "None"),
    "optim_args": missing("arguments of the optimizer", "None"),
    "optim_target_modules": missing("sf.partition says what is trained", "None"),
    "lr_scheduler_kwargs": missing("a function of the step is yours", "None", "{}"),
    "learning_rate_mapping": missing("so.masked, or a rate by path", "None", "{}"),
    "router_mapping": yours("the model is yours"),
    "parallelism_config": missing("axes of make_mesh", "None"),
    "accelerator_config": _DATA,
    "sharded_ddp": missing("of FairScale: a strategy, such as sf.zero2", "''", "None", ""),
    "deepspeed_plugin": missing("deepspeed=", "None"),
    "ddp_find_unused_parameters": always("a parameter that the loss does not use has a gradient of zeros"),
    "ddp_static_graph": always("nothing is assumed of the graph"),
    "ddp_bucket_cap_mb": always("a stage's gradients of one dtype are one buffer"),
    "ddp_broadcast_buffers": missing("buffers are whole on every rank, and not broadcast", "False", "None"),
    "ddp_backend": yours("make_mesh takes the device's own"),
    "ddp_timeout": yours("timeout= of make_mesh"),
    "auto_find_batch_size": flag(
        missing('sf.accumulate(loss, batch, micro="auto"), for a loss that is a sum: docs/how-to/fit-batches.md'),
        always("off"),
    ),
    **dict.fromkeys(["learning_rate", "optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"], _READ),
    **dict.fromkeys(["lr_scheduler_type", "warmup_steps", "warmup_ratio", "max_steps"], _READ),
    **dict.fromkeys(_OF_LOOP, _LOOP),
    **dict.fromkeys(_OF_DATA, _DATA),
    **dict.fromkeys(_OF_HUB, _HUB),
    **dict.fromkeys(["tpu_num_cores", "tpu_metrics_debug", "use_mps_device", "use_ipex"], _TPU),
    "local_rank": yours("starting processes: torchrun"),
    "tf32": yours("torch.backends.cuda.matmul.allow_tf32"),
    "use_liger_kernel": yours("kernels of the module, which is yours"),
    "liger_kernel_config": yours("kernels of the module, which is yours"),
    "use_cache": yours("of the module's own configuration"),
    "model_init_kwargs": yours("the module is yours"),
    "activation_offloading": fsdp.REMAT_AWAY,
    "loss_type": missing("the loss is yours", "nll", "None"),
}
TRAINER: Table = {
    "args": yours("the arguments, in rows of their own"),
    "compute_loss_func": missing("the loss is yours", "None"),
    "optimizers": missing("the program has the optimizer that the arguments say", "(NONE, NONE)", "None"),
    "optimizer_cls_and_kwargs": missing("the program has the optimizer that the arguments say", "None"),
    "loss": yours("the loss is yours"),
    "peft_config": yours("sf.lora, or a module of peft: docs/how-to/train-adapters.md"),
    "formatting_func": _DATA,
    **dict.fromkeys(
        ["model", "model_init", "processing_class", "tokenizer", "data_collator", "train_dataset", "eval_dataset"],
        yours("the data, the model and the tokenizer are yours"),
    ),
    **dict.fromkeys(["compute_metrics", "callbacks", "preprocess_logits_for_metrics", "evaluator"], _LOOP),
}
# Of `fsdp_config`, beside the names that Accelerate has.
_FSDP: Table = {
    "cpu_offload": Whole(fsdp.offload),
    "xla": missing("there are no TPUs here", "False"),
    "xla_fsdp_v2": always("of no effect without xla"),
    "xla_fsdp_grad_ckpt": always("of no effect without xla"),
    "xla_fsdp_settings": always("of no effect without xla"),
}


def translate(draft: Draft, call: Call, trainer: Mapping[str, Any], linked: Callable[[str], dict[str, Any]]) -> None:
    """The arguments of a trainer; `linked` reads a file that they name."""
    given, own = dict(call.arguments), DEFAULTS | (_OF_TRL if call.name == "SFTConfig" else {})
    if call.name == "SentenceTransformerTrainingArguments":
        own["average_tokens_across_devices"] = False  # its losses are means over rows
        draft.facts["tokens"] = None
    own |= given
    draft.facts["compiles"] = any(one not in (None, False) and not is_open(one) for one in map(given.get, _COMPILE))
    config, sharded = given.pop("deepspeed", None), _sharded(draft, given, linked)
    draft.facts["fsdp"], draft.facts["deepspeed"] = sharded is not None, config is not None
    if config is not None and sharded is not None:
        raise TranslateError("fsdp and deepspeed: two strategies in one file; leave one of them")
    if sharded is not None:
        accelerate.plugin(draft, sharded, {**accelerate.PLUGIN, **_FSDP}, "fsdp_config.")
    if config is not None:
        _deepspeed(draft, config, own, linked)
    draft.facts.setdefault("cut", "ddp")
    apply(draft, given, TABLE, "", call.name)
    for key, fact in _SHOWN.items():
        if key not in given and own.get(key) and fact not in draft.facts:
            _default(draft, key, own[key])
    if draft.get("optimizer") is None:
        _optimizer(draft, own, given)
    if draft.get("schedule") is None:
        _schedule(draft, own, given)
    apply(draft, trainer, TRAINER, "", "Trainer")


_COMPILE = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
# What is so by itself, and changes results; and the fact that says it.
_SHOWN = {"max_grad_norm": "clip", "average_tokens_across_devices": "tokens", "bf16": "gather_dtype",
          "gradient_checkpointing": "remat"}  # fmt: skip


def _default(draft: Draft, key: str, value: Any) -> None:
    before = len(draft.rows)
    apply(draft, {key: value}, TABLE)
    draft.rows[before:] = [replace(row, value=f"{row.value}, the default") for row in draft.rows[before:]]


def _sharded(draft: Draft, given: dict[str, Any], linked: Callable[[str], dict[str, Any]]) -> dict[str, Any] | None:
    """What `fsdp=` and `fsdp_config=` say together, by the names of `fsdp_config`; None where nothing is sharded."""
    said, config = given.pop("fsdp", None), given.pop("fsdp_config", None)
    old = {key: given.pop(f"fsdp_{key}") for key in ("min_num_params", "transformer_layer_cls_to_wrap")
           if given.get(f"fsdp_{key}") not in (None, 0)}  # fmt: skip
    if is_open(said) and not isinstance(said, str):
        draft.row("fsdp", said, "open", "its value is not in the file: the strategy")
        return {}
    if said in (None, False, "", [], "False"):
        if config:
            draft.row("fsdp_config", config, "always", "of no effect without fsdp=")
        return None
    if isinstance(config, str):
        draft.row("fsdp_config", config, "becomes", "its keys, below")
        config = linked(config)
    if config is not None and not isinstance(config, Mapping):
        draft.row("fsdp_config", config, "open", "its value is not in the file; a dict of keys")
        config = {}
    found = {str(key).removeprefix("fsdp_"): one for key, one in (config or {}).items()} | old
    options = [word(one) for one in (said.split() if isinstance(said, str) else said if isinstance(said, list) else [])]
    cuts = [one for one in options if one in fsdp.CUT]
    unknown = [one for one in options if one not in (*fsdp.CUT, "OFFLOAD", "AUTO_WRAP", "TRUE")]
    if unknown or len(cuts) > 1:
        raise TranslateError(f"fsdp: {shown(said)} is not one strategy with offload and auto_wrap")
    kept = found.get("reshard_after_forward")
    first = {"sharding_strategy", "backward_prefetch"} & set(found) or cuts not in (
        [],
        ["FULL_SHARD"],
        ["SHARD_GRAD_OP"],
    )
    first = bool(first) and not isinstance(kept, bool)
    version = whole("fsdp_config.version", found.pop("version", 1 if first else 2))
    draft.row("fsdp", said, "becomes", f"the strategy, of FSDP{version}")
    if cuts and kept is None:
        found = {"reshard_after_forward": cuts[0] if version == 1 else cuts[0] == "FULL_SHARD", **found}
    if "OFFLOAD" in options:
        found.setdefault("cpu_offload", True)
    return {"version": version, **found}


def _deepspeed(draft: Draft, config: Any, own: Mapping[str, Any], linked: Callable[[str], dict[str, Any]]) -> None:
    if isinstance(config, str):
        draft.row("deepspeed", config, "becomes", "its keys, below")
        config = linked(config)
    if not isinstance(config, Mapping):
        draft.row("deepspeed", config, "open", "its value is not in the file: a file, or a dict; translate that")
        return
    deepspeed.translate(draft, _filled(draft, config, own, ""), "deepspeed.")


def _auto(own: Mapping[str, Any]) -> dict[str, Any]:
    """What `"auto"` stands for in a file of DeepSpeed's that Transformers reads."""
    warmup = own["warmup_steps"]
    return {
        "train_micro_batch_size_per_gpu": own["per_device_train_batch_size"],
        "gradient_accumulation_steps": own["gradient_accumulation_steps"],
        "gradient_clipping": own["max_grad_norm"],
        "optimizer.params.lr": own["learning_rate"],
        "optimizer.params.betas": [own["adam_beta1"], own["adam_beta2"]],
        "optimizer.params.eps": own["adam_epsilon"],
        "optimizer.params.weight_decay": own["weight_decay"],
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": own["learning_rate"],
        "scheduler.params.warmup_num_steps": max(1, warmup) if isinstance(warmup, int) else "auto",
        "scheduler.params.total_num_steps": own["max_steps"] if own["max_steps"] != -1 else "auto",
        "bf16.enabled": own["bf16"],
        "fp16.enabled": own["fp16"],
    }


def _filled(draft: Draft, config: Mapping[str, Any], own: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """A file in which every `"auto"` that an argument of the trainer stands for has its value.

    Raises:
        TranslateError: the two contradict each other.
    """
    values, found = _auto(own), {}
    for key, one in config.items():
        path = f"{prefix}{key}"
        if isinstance(one, Mapping):
            found[key] = _filled(draft, one, own, f"{path}.")
        elif is_auto(one) and path == "train_batch_size":
            draft.row(
                "deepspeed.train_batch_size", one, "always", "the product of ranks, micro-batches and rows of each"
            )
        elif is_auto(one) and path in values:
            found[key] = values[path]
        else:
            found[key] = one
    return found


def _optimizer(draft: Draft, own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """The optimizer that Trainer makes, and its learning rate."""
    kind = str(getattr(own["optim"], "text", own["optim"])).rpartition(".")[2].lower()
    names = [key for key in ("optim", "learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay")
             if key in given]  # fmt: skip
    make = OPTIMIZERS.get(kind)
    found: dict[str, Any] = {"lr": _number(draft, "learning_rate", own["learning_rate"])}
    draft.facts["optimizer_params"] = found
    if make is None:
        draft.row("optim", own["optim"], "missing", "not there: the program has the name optimizer for yours")
        return
    draft.say("optimizer", make, *names)
    if make in ("adamw", "lion"):
        found["betas"] = tuple(_number(draft, key, own[key]) for key in ("adam_beta1", "adam_beta2"))
    if make == "adamw":
        found["eps"] = _number(draft, "adam_epsilon", own["adam_epsilon"])
    decay = _number(draft, "weight_decay", own["weight_decay"])
    if decay:  # not of biases and norms
        found["weight_decay"] = decay if "." in make else Name("decay")
        draft.say("decayed", None if "." in make else decay, "weight_decay")
    elif make == "adamw":
        found["weight_decay"] = 0.0


def _number(draft: Draft, key: str, value: Any) -> Any:
    if is_open(value):
        draft.row(key, value, "open", f"its value is not in the file: the program has the name {key} for it")
        return draft.name(key, "of the arguments")
    return number(key, value)


def _schedule(draft: Draft, own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    kind = str(getattr(own["lr_scheduler_type"], "text", own["lr_scheduler_type"])).rpartition(".")[2].lower()
    names = [key for key in ("lr_scheduler_type", "warmup_steps", "warmup_ratio", "max_steps") if key in given]
    if kind not in SCHEDULES:
        draft.row("lr_scheduler_type", kind, "missing", "not there: a function of the step is yours")
        return
    if kind == "constant":
        draft.facts["optimizer_keys"] = (*draft.get("optimizer_keys", ()), *names)
        return
    total, ratio = own["max_steps"], own["warmup_ratio"]
    if is_open(total) or number("max_steps", total, -1) <= 0:
        said = given.get("max_steps", "not said")
        draft.row("max_steps", said, "open", "the steps of the run: the program has the name total_steps")
        total = draft.name("total_steps", "the steps of the whole run")
    steps = own["warmup_steps"]
    if not is_open(steps) and 0 < number("warmup_steps", steps) < 1:
        ratio, steps = steps, 0
    if not is_open(steps) and not steps and (is_open(ratio) or number("warmup_ratio", ratio)):
        steps = Name(f"math.ceil({total} * {_number(draft, 'warmup_ratio', ratio)})")
    elif is_open(steps):
        steps = _number(draft, "warmup_steps", steps)
    draft.say("schedule", ("transformers", (("name", kind), ("warmup", steps), ("steps", total))), *names)
