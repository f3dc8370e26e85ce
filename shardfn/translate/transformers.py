"""Meanings of the arguments of Transformers: of `TrainingArguments`, of `Trainer`, and of their variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardfn.translate import accelerate, deepspeed, fsdp, optimizers
from shardfn.translate.draft import TranslationBuilder, UndefinedName
from shardfn.translate.schema import By, Section, Table, always, flag, missing, read, same_for, sets, yours
from shardfn.translate.values import (
    SourceCall,
    TranslateError,
    as_count,
    as_switch,
    is_auto,
    is_open,
    natural,
    number,
    shown,
    upper_word,
    whole_or_all,
)

ARGUMENTS = {"TrainingArguments", "Seq2SeqTrainingArguments", "SentenceTransformerTrainingArguments", "SFTConfig"}
TRAINERS = {"Seq2SeqTrainer", "SentenceTransformerTrainer", "SFTTrainer"}
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "learning_rate": 5e-5,
    "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "optim": "adamw_torch_fused",
    "lr_scheduler_type": "linear", "warmup_steps": 0, "warmup_ratio": 0.0, "max_steps": -1,
    "bf16": False, "fp16": False, "average_tokens_across_devices": True,
}  # fmt: skip
# Defaults of some variants that differ; losses of sentence-transformers are means over rows.
_OWN: dict[str, dict[str, Any]] = {
    "SFTConfig": {"learning_rate": 2e-5, "bf16": True, "gradient_checkpointing": True},
    "SentenceTransformerTrainingArguments": {"average_tokens_across_devices": False},
}
_LOOP = yours("what sf.run.loop is given: docs/how-to/run-a-loop.md")
_DATA = yours("what sf.run.batches is given: docs/how-to/feed-batches.md")
_HUB = yours("interop.save_pretrained writes a folder that can be uploaded")
_RATE = "of the rate, a function of the step"
_NO_OPTIMIZER = missing("not there: the program has the name optimizer for yours")
_NO_SCHEDULE = missing("not there: a function of the step is yours")
_ADAM = {
    "learning_rate": "lr", "weight_decay": "decay", "adam_epsilon": "eps", "adam_beta1": "beta1", "adam_beta2": "beta2",
}  # fmt: skip
OPTIMIZERS = {
    **same_for("adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused", "adamw"),
    **same_for("adamw_bnb_8bit adamw_torch_8bit adamw_8bit", "adamw8bit"), "lion_8bit": "lion8bit",
    "sgd": "sgd", **same_for("lion_32bit lion", "lion"),
    "adagrad": "torch.optim.Adagrad", "rmsprop": "torch.optim.RMSprop",
}  # fmt: skip
PAGED = {
    **same_for("paged_adamw_8bit paged_adamw_bnb_8bit", "adamw8bit"),
    **same_for("paged_adamw_32bit paged_adamw", "adamw"),
    "paged_lion_8bit": "lion8bit", **same_for("paged_lion_32bit paged_lion", "lion"),
}  # fmt: skip


def _precision(draft: TranslationBuilder, key: str, value: Any) -> None:
    if is_open(value) and upper_word(value) not in ("TRUE", "FALSE"):
        draft.open(key, value, "if it is true, torch.autocast around the model")
    elif as_switch(key, value):
        accelerate.low(draft, key, value, key)
    else:
        draft.row(key, value, "always", "the default: all in the dtype of the parameters")


TABLE: Table = {
    **same_for("bf16 fp16", _precision),
    "max_grad_norm": deepspeed.CLIP,
    "gradient_accumulation_steps": deepspeed.ACCUMULATE,
    "per_device_train_batch_size": sets(
        "rows of a micro-batch on one rank", name="micro_batch_size", about="rows of one rank", micro_batch=as_count
    ),
    "average_tokens_across_devices": flag(
        sets("a loss of the tokens of all ranks and micro-batches, each of which counts once", tokens="all"),
        sets("a loss of the tokens of all micro-batches of a rank, and its mean over ranks", tokens="own"),
    ),
    **same_for("gradient_checkpointing activation_checkpointing", fsdp.REMAT),
    "activation_offloading": fsdp.REMAT_AWAY,
    **same_for("gradient_checkpointing_kwargs activation_checkpointing_kwargs", always("there is one implementation")),
    "torch_compile": flag(sets("compile= of functional", compile=True), always("nothing is compiled")),
    "torch_compile_backend": accelerate.BACKEND,
    "torch_compile_mode": accelerate.MODE,
    **same_for("use_cpu no_cuda", accelerate.CPU),
    "label_smoothing_factor": missing("of the loss, which is yours", "0.0", "0"),
    "neftune_noise_alpha": missing("noise on the embeddings, in your module", "None"),
    "optim_args": missing("arguments of the optimizer", "None"),
    "optim_target_modules": missing("sf.shards.partition says what is trained", "None"),
    "lr_scheduler_kwargs": missing("a function of the step is yours", "None", "{}"),
    "learning_rate_mapping": missing("lr= of the optimizer takes a function of path and shape", "None", "{}"),
    "parallelism_config": missing("axes of make_mesh", "None"),
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
    "optim": By(
        {name: sets("the optimizer", optim=make) for name, make in OPTIMIZERS.items()}
        | {name: sets(f'so.{x}, and .with_tiers(state="host")', optim=x, state="host") for name, x in PAGED.items()}
        | {"adafactor": missing("so.adafactor scales steps by the size of parameters, which the Trainer's does not")},
        _NO_OPTIMIZER,
    ),
    "lr_scheduler_type": By(
        {kind: sets(_RATE, scheduler=kind) for kind in optimizers.LR_SCHEDULER_TYPES}, _NO_SCHEDULE
    ),
    "max_steps": sets(
        "steps= of sf.run.loop, and of the rate", name="steps", about="of the whole run", steps=whole_or_all
    ),
    **{key: sets("of the optimizer", name=key, about=key, **same_for(fact, number)) for key, fact in _ADAM.items()},
    **{key: sets(_RATE, name=key, about=key, **same_for(key, number)) for key in ("warmup_steps", "warmup_ratio")},
    **same_for(
        "output_dir num_train_epochs logging_dir logging_strategy logging_steps logging_first_step log_on_each_node"
        " logging_nan_inf_filter include_num_input_tokens_seen include_tokens_per_second log_level log_level_replica"
        " disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id"
        " eval_strategy evaluation_strategy eval_steps eval_delay eval_on_start prediction_loss_only"
        " eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics"
        " include_inputs_for_metrics batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node"
        " save_total_limit save_safetensors enable_jit_checkpoint load_best_model_at_end metric_for_best_model"
        " greater_is_better ignore_data_skip restore_callback_states_from_checkpoint full_determinism debug"
        " skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint overwrite_output_dir"
        " torch_empty_cache_steps bf16_full_eval fp16_full_eval per_device_eval_batch_size predict_with_generate"
        " generation_max_length generation_num_beams generation_config eval_packing",
        _LOOP,
    ),
    **same_for(
        "accelerator_config data_seed dataloader_drop_last dataloader_num_workers dataloader_pin_memory"
        " dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context"
        " dataloader_in_order remove_unused_columns label_names train_sampling_strategy length_column_name"
        " group_by_length sortish_sampler batch_sampler multi_dataset_batch_sampler prompts dataset_text_field"
        " dataset_kwargs dataset_num_proc eos_token pad_token max_length max_seq_length packing packing_strategy"
        " padding_free pad_to_multiple_of completion_only_loss assistant_only_loss chat_template_path shuffle_dataset"
        " truncation_mode",
        _DATA,
    ),
    **same_for(
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision"
        " push_to_hub_model_id push_to_hub_organization push_to_hub_token",
        _HUB,
    ),
    **same_for("tpu_num_cores tpu_metrics_debug use_mps_device use_ipex", accelerate.TPU),
    "seed": yours("seed= of sf.run.batches and sf.run.loop", seed=natural),
    "local_rank": yours("starting processes: torchrun"),
    "tf32": yours("torch.backends.cuda.matmul.allow_tf32"),
    **same_for("use_liger_kernel liger_kernel_config", yours("kernels of the module, which is yours")),
    "use_cache": yours("of the module's own configuration"),
    "model_init_kwargs": yours("the module is yours"),
    "router_mapping": yours("the model is yours"),
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
    **same_for(
        "model model_init processing_class tokenizer data_collator train_dataset eval_dataset",
        yours("the data, the model and the tokenizer are yours"),
    ),
    **same_for("compute_metrics callbacks preprocess_logits_for_metrics evaluator", _LOOP),
}
# The keys of `fsdp_config`: those of Accelerate, and these.
FSDP: Table = {
    **accelerate.PLUGIN,
    "xla": missing("there are no TPUs here", "False"),
    **same_for("xla_fsdp_v2 xla_fsdp_grad_ckpt xla_fsdp_settings", always("of no effect without xla")),
}
# Arguments whose defaults change results, with the facts that they say.
_SHOWN = {
    "max_grad_norm": "clip", "average_tokens_across_devices": "tokens", "bf16": "gather_dtype",
    "gradient_checkpointing": "remat", "per_device_train_batch_size": "micro_batch",
}  # fmt: skip


def read_arguments(
    draft: TranslationBuilder, call: SourceCall, trainer: Mapping[str, Any], linked: Callable[[str], dict[str, Any]]
) -> None:
    """Reads the arguments of a trainer; `linked` reads a file that they name."""
    explicit, values = dict(call.arguments), {**DEFAULTS, **_OWN.get(call.name, {}), **call.arguments}
    config, sharded = explicit.pop("deepspeed", None), _sharded(draft, explicit, linked)
    if config is not None and sharded is not None:
        raise TranslateError("fsdp and deepspeed: two strategies in one file; leave one of them")
    if sharded is not None:
        read(draft, "fsdp_config", sharded, accelerate.plugin(FSDP))
    if config is not None:
        draft.put("kind", "deepspeed")
        config = mapping(draft, "deepspeed", config, linked)
        read(draft, "deepspeed", _without_auto(draft, config, values, ""), deepspeed.FILE)
    read(draft, "", explicit, Section(TABLE, call.name))
    for key, fact in _SHOWN.items():
        if key not in explicit and values.get(key) and fact not in draft.facts:
            count = len(draft.rows)
            read(draft, "", {key: values[key]}, Section(TABLE))
            draft.rows[count:] = [replace(row, value=f"{row.value}, the default") for row in draft.rows[count:]]
    if draft.get("optimizer") is None:
        _trainer_optimizer(draft, values, explicit)
    if draft.get("schedule") is None:
        _schedule(draft, values, explicit)
    read(draft, "", trainer, Section(TRAINER, "Trainer"))


def mapping(
    draft: TranslationBuilder, key: str, value: Any, linked: Callable[[str], dict[str, Any]]
) -> Mapping[str, Any]:
    """A mapping, or the contents of the file that is named."""
    if isinstance(value, str):
        draft.row(key, value, "becomes", "its keys, below")
        value = linked(value)
    if value is not None and not isinstance(value, Mapping):
        draft.open(key, value, "a file, or a dict of keys; translate that")
    return value if isinstance(value, Mapping) else {}


def _sharded(
    draft: TranslationBuilder, explicit: dict[str, Any], linked: Callable[[str], dict[str, Any]]
) -> dict[str, Any] | None:
    """`fsdp=` and `fsdp_config=` together, under the names of `fsdp_config`; None if nothing is sharded."""
    mode, config = explicit.pop("fsdp", None), explicit.pop("fsdp_config", None)
    old = {key: explicit.pop(f"fsdp_{key}", None) for key in ("min_num_params", "transformer_layer_cls_to_wrap")}
    if is_open(mode) and not isinstance(mode, str):
        draft.open("fsdp", mode, "the strategy")
        return {}
    if mode in (None, False, "", [], "False"):
        if config:
            draft.row("fsdp_config", config, "always", "of no effect without fsdp=")
        return None
    keys = {key.removeprefix("fsdp_"): x for key, x in mapping(draft, "fsdp_config", config, linked).items()}
    keys |= {key: x for key, x in old.items() if x not in (None, 0)}
    options = [
        upper_word(x) for x in (mode.split() if isinstance(mode, str) else mode if isinstance(mode, list) else [])
    ]
    cuts = [x for x in options if x in fsdp.CUTS]
    if len(cuts) > 1 or set(options) - {*fsdp.CUTS, "OFFLOAD", "AUTO_WRAP", "TRUE"}:
        raise TranslateError(f"fsdp: {shown(mode)} is not one strategy with offload and auto_wrap")
    reshard = keys.get("reshard_after_forward")
    old_names = {"sharding_strategy", "backward_prefetch"} & set(keys) or set(cuts) - {"FULL_SHARD", "SHARD_GRAD_OP"}
    is_fsdp1 = old_names and not isinstance(reshard, bool)
    version = as_count("fsdp_config.version", keys.pop("version", 1 if is_fsdp1 else 2))
    draft.row("fsdp", mode, "becomes", f"the strategy, of FSDP{version}")
    if cuts and reshard is None:
        keys = {"reshard_after_forward": cuts[0] if version == 1 else cuts[0] == "FULL_SHARD", **keys}
    if "OFFLOAD" in options:
        keys.setdefault("cpu_offload", True)
    return {"version": version, **keys}


def _auto(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `"auto"` in a DeepSpeed file that Transformers reads."""
    warmup = values["warmup_steps"]
    return {
        "train_micro_batch_size_per_gpu": values["per_device_train_batch_size"],
        "gradient_accumulation_steps": values["gradient_accumulation_steps"],
        "gradient_clipping": values["max_grad_norm"],
        "optimizer.params.lr": values["learning_rate"],
        "optimizer.params.betas": [values["adam_beta1"], values["adam_beta2"]],
        "optimizer.params.eps": values["adam_epsilon"],
        "optimizer.params.weight_decay": values["weight_decay"],
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": values["learning_rate"],
        "scheduler.params.warmup_num_steps": max(1, warmup) if isinstance(warmup, int) else "auto",
        "scheduler.params.total_num_steps": values["max_steps"] if values["max_steps"] != -1 else "auto",
        "bf16.enabled": values["bf16"],
        "fp16.enabled": values["fp16"],
    }


def _without_auto(
    draft: TranslationBuilder, config: Mapping[str, Any], arguments: Mapping[str, Any], prefix: str
) -> dict[str, Any]:
    """A file in which every `"auto"` that stands for an argument of the trainer is replaced by its value."""
    values, filled = _auto(arguments), {}
    for key, x in config.items():
        path = f"{prefix}{key}"
        if isinstance(x, Mapping):
            filled[key] = _without_auto(draft, x, arguments, f"{path}.")
        elif is_auto(x) and path == "train_batch_size":
            text = "the product of ranks, micro-batches and rows of each"
            draft.row("deepspeed.train_batch_size", x, "always", text)
        else:
            filled[key] = values.get(path, x) if is_auto(x) else x
    return filled


def _trainer_optimizer(draft: TranslationBuilder, values: Mapping[str, Any], explicit: Mapping[str, Any]) -> None:
    """Adds the optimizer that Trainer makes from the arguments or their defaults."""
    make = draft.get("optim", None if "optim" in explicit else "adamw")
    lr, decay, eps, b1, b2 = (draft.get(fact, values[key]) for key, fact in _ADAM.items())
    arguments: dict[str, Any] = {"lr": lr}
    draft.put("optimizer_params", arguments, *draft.keys_for_facts(*_ADAM.values()))
    if make is None:
        return
    draft.say("optimizer", make, *draft.keys_for_facts("optim"))
    if make.removesuffix("8bit") in ("adamw", "lion"):
        arguments["betas"] = (b1, b2)
    if make.removesuffix("8bit") == "adamw":
        arguments["eps"] = eps
    if decay and "." not in make:  # not of biases and norms
        draft.say("decayed", decay, "weight_decay")
    if decay or make.removesuffix("8bit") == "adamw":
        arguments["weight_decay"] = UndefinedName("decay") if draft.get("decayed") else decay


def _schedule(draft: TranslationBuilder, values: Mapping[str, Any], explicit: Mapping[str, Any]) -> None:
    kind = draft.get("scheduler", None if "lr_scheduler_type" in explicit else values["lr_scheduler_type"])
    keys = draft.keys_for_facts("scheduler", "warmup_steps", "warmup_ratio", "steps")
    if kind == "constant":
        draft.put("optimizer_params", draft.get("optimizer_params"), *keys)
    if kind in (None, "constant"):
        return
    if draft.get("steps") is None:
        max_steps = explicit.get("max_steps", "not said")
        draft.row("max_steps", max_steps, "open", "the steps of the run: the program has the name steps")
        draft.put("steps", draft.name("steps", "of the whole run"))
    steps, ratio = draft.get("warmup_steps", 0.0), draft.get("warmup_ratio", 0.0)
    if not isinstance(steps, UndefinedName) and 0 < steps < 1:
        steps, ratio = 0, steps
    if not steps and ratio:
        steps = UndefinedName(f"math.ceil({draft.get('steps')} * {ratio})")
    warmup = steps if isinstance(steps, UndefinedName) else int(steps)
    draft.say("schedule", (kind, {"warmup": warmup, "steps": draft.get("steps")}), *keys)
