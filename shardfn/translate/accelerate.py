"""Meanings of Accelerate's keys: its YAML, and the arguments of `Accelerator` and of its plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardfn.translate import deepspeed, fsdp, precision
from shardfn.translate.draft import TranslationBuilder
from shardfn.translate.schema import By, Section, Table, always, flag, meant, missing, read, same_for, sets, yours
from shardfn.translate.values import (
    SourceCall,
    TranslateError,
    as_count,
    as_switch,
    dtype,
    lower,
    shown,
    spellings,
    upper_word,
)

_ORDER = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_LAUNCH = yours("starting processes: torchrun")
TPU = yours("there are no TPUs here, and of a run on GPUs it says nothing")
CPU = flag(sets('device="cpu" of make_mesh', cpu=True), always("make_mesh takes the accelerator"))
_ONE = missing("for functions: see docs/how-to/tensor-parallel.md; a module has no such axis", "1", "None")
# By name, or by a number from 1, which is unambiguous in Accelerate's own files.
STRATEGY = By(
    {**fsdp.STRATEGY.choices, **{str(i): fsdp.STRATEGY.choices[name] for i, name in enumerate(_ORDER, 1)}},
    said=f"one of {', '.join(_ORDER)}, which are 1 to 5",
)


def _read_reshard(draft: TranslationBuilder, key: str, value: Any) -> None:
    """Reads `reshard_after_forward`: a strategy's name for FSDP1, true or false for FSDP2."""
    old = draft.get("kind", "fsdp1") == "fsdp1"
    if old == (isinstance(value, bool) or upper_word(value) in ("TRUE", "FALSE")):
        kind = "the name of a strategy" if old else "true or false"
        raise TranslateError(f"{key}: {shown(value)}; with fsdp_version {1 if old else 2} it is {kind}")
    meant(draft, key, value, STRATEGY if old else fsdp.RESHARD)


_WRAP = By(
    {
        "TRANSFORMER_BASED_WRAP": always("the default of functional, or its stages="),
        "SIZE_BASED_WRAP": always("min_num_params= of functional, by the key of that name"),
        "NO_WRAP": fsdp.ONE_UNIT,
        **fsdp.WRAP.choices,
    },
    fsdp.WRAP.otherwise,
    said="TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP",
)
_VERSION = By({"1": always("there is one, which does what both do"), "2": always("there is one")})
PLUGIN: Table = {
    **fsdp.SHARED,
    **same_for("fsdp_version version", _VERSION),
    "sharding_strategy": STRATEGY,
    "reshard_after_forward": _read_reshard,
    "backward_prefetch_policy": fsdp.PREFETCH,
    "mixed_precision_policy": precision.POLICIES,
    "auto_wrap_policy": _WRAP,
    **same_for("cpu_offload offload_params", fsdp.OFFLOAD),
    "state_dict_type": fsdp.STATES,
    "state_dict_config": yours("checkpoint.save and checkpoint.export_hf gather nothing on a device"),
    "optim_state_dict_config": yours("state is a tree of flat shards: checkpoint.save"),
    "activation_checkpointing": fsdp.REMAT,
    "activation_checkpointing_offload": fsdp.REMAT_AWAY,
    "cpu_ram_efficient_loading": yours("interop.load(folder, model, mesh, strategy), of a module from interop.meta()"),
    **same_for("transformer_cls_names_to_wrap transformer_layer_cls_to_wrap", fsdp.CLASSES),
    "min_num_params": fsdp.SIZE,
}


def plugin(table: Table = PLUGIN, name: str = "") -> Section:
    """The section of FullyShardedDataParallelPlugin's arguments; in YAML their names begin with `fsdp_`."""
    prefixed = {key if key.startswith(name) else f"{name}{key}": meaning for key, meaning in table.items()}

    def before(draft: TranslationBuilder, prefix: str, settings: dict[str, Any]) -> None:
        version = as_count(f"{prefix}fsdp_version", settings.get("fsdp_version", settings.get("version", 1)))
        draft.put("kind", "fsdp2" if version == 2 else "fsdp1")
        offloaded, checkpointed = f"{name}activation_checkpointing_offload", f"{name}activation_checkpointing"
        ignored = {}
        policy = settings.get(f"{name}auto_wrap_policy")
        if isinstance(policy, str):
            wraps = same_for("transformer_layer_cls_to_wrap transformer_cls_names_to_wrap", "TRANSFORMER_BASED_WRAP")
            for key, policy_of_key in {**wraps, "min_num_params": "SIZE_BASED_WRAP"}.items():
                if upper_word(policy) != policy_of_key:
                    ignored[f"{name}{key}"] = always(f"of no effect with {upper_word(policy)}, there as here")
        if version == 2:
            ignored[f"{name}backward_prefetch"] = always("of no effect with FSDP2")
        if offloaded in settings and as_switch(f"{prefix}{offloaded}", settings[offloaded]):
            ignored[checkpointed] = sets("remat=, as the next key says")
        for key, meaning in ignored.items():
            if key in settings:
                meant(draft, f"{prefix}{key}", settings.pop(key), meaning)

    return Section(prefixed, "Accelerate's FSDP", cut="full_shard", before=before)


def _of_file(draft: TranslationBuilder, key: str, value: Any) -> None:
    """Reads DeepSpeed's own file, whose contents have replaced its name."""
    if isinstance(value, Mapping):
        draft.row(key, "a file", "becomes", "its keys, below")
        read(draft, "", value, deepspeed.FILE)
    elif value is not None:
        draft.open(key, value)


_MOE = missing("stages={...} of functional: the outermost match is one stage", "None")
DEEPSPEED: Table = {
    **same_for("deepspeed_config_file hf_ds_config", _of_file),
    "zero_stage": deepspeed.STAGE,
    "gradient_accumulation_steps": deepspeed.ACCUMULATE,
    "gradient_clipping": deepspeed.CLIP,
    "offload_optimizer_device": deepspeed.STATE,
    "offload_param_device": deepspeed.PARAMS,
    **same_for("offload_optimizer_nvme_path offload_param_nvme_path", deepspeed.SCRATCH),
    "zero3_init_flag": yours("interop.meta(), and interop.load or sf.init_sharded: no rank has the whole"),
    "zero3_save_16bit_model": yours("checkpoint.export_hf(..., dtype=torch.bfloat16) or interop.save_pretrained"),
    "is_train_batch_min": yours("how a batch's size is found"),
    **same_for("transformer_moe_cls_names deepspeed_moe_layer_cls_names", _MOE),
    "enable_msamp": missing("products are of 16 bits or more", "False", "None"),
    "msamp_opt_level": always("of no effect without enable_msamp"),
    **same_for("deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter", _LAUNCH),
    "deepspeed_inclusion_filter": _LAUNCH,
}


_UNCUT = always("of no effect without cp_size or sp_size")
PARALLEL: Table = {
    "dp_replicate_size": sets("the axis replica of make_mesh", dp_replicate=as_count),
    "dp_shard_size": sets("the axis shard of make_mesh", dp_shard=as_count),
    "tp_size": sets("the axis tensor of make_mesh, and tensor= of functional", tensor=as_count),
    **same_for("cp_size sp_size", _ONE),
    **same_for("cp_backend cp_comm_strategy sp_backend sp_seq_length sp_seq_length_is_variable", _UNCUT),
    "sp_attn_implementation": _UNCUT,
    "tp_handler": missing("tensor= of functional", "None"),
    **same_for("cp_handler sp_handler", missing("for functions only", "None")),
    "device_mesh": missing("the sizes of make_mesh's axes", "None"),
}


_COMPILED = "compile= of functional: an argument of torch.compile"
BACKEND = By(
    same_for("inductor eager aot_eager aot_ts ts cudagraphs openxla tvm", sets(_COMPILED, compile_backend=lower)),
    missing("torch.compile has no such backend: inductor is its own"),
)
MODE = sets(_COMPILED, compile_mode=lower)
_DYNAMO: Table = {
    "backend": BACKEND,
    "mode": MODE,
    **same_for("fullgraph use_fullgraph", sets(_COMPILED, compile_fullgraph=as_switch)),
    **same_for(
        "dynamic use_dynamic", sets(_COMPILED, compile_dynamic=lambda key, x: None if x is None else as_switch(key, x))
    ),
    **same_for("use_regional_compilation disable", always("each stage is compiled, once for all layers")),
    "options": missing("compile= of functional takes a dict of torch.compile's arguments"),
}


def _if_compiled(draft: TranslationBuilder, prefix: str, settings: dict[str, Any]) -> None:
    """Leaves the arguments of torch.compile to read if anything is compiled."""
    unprefixed = {name.removeprefix("dynamo_"): setting for name, setting in settings.items()}
    if not {"NO", "NONE", ""}.intersection(spellings(unprefixed.get("backend"))) and not as_switch(
        f"{prefix}disable", unprefixed.get("disable", False)
    ):
        return
    for name, setting in settings.items():
        draft.row(f"{prefix}{name}", setting, "always", "nothing is compiled")
    settings.clear()


_PRECISION = By(
    {
        "no": always("the default: all in the dtype of the parameters"),
        **same_for("bf16 fp16", lambda draft, key, value: low(draft, key, value, value)),
        "fp8": missing("products are of 16 bits or more"),
    }
)


def low(draft: TranslationBuilder, key: str, value: Any, spelling: Any) -> None:
    """Reads a precision of 16 bits, whose meaning depends on the strategy, which was read before."""
    low_dtype, kind = str(dtype(key, spelling)), draft.get("kind", "ddp")
    text = [] if kind == "ddp" else [precision.of_stages(draft, low_dtype, key, kind)]
    if kind != "deepspeed":
        text.append(precision.of_autocast(draft, low_dtype, key))
    draft.row(key, value, "becomes", ", and ".join(text))


_DDP = sets("sf.ddp", cut="ddp")
_KINDS = By(
    {
        "FSDP": sets("the strategy, by fsdp_config"),
        "DEEPSPEED": sets("the strategy, by deepspeed_config"),
        **same_for("MULTI_GPU MULTI_CPU", _DDP),
        "NO": sets("sf.ddp, on one process", cut="ddp"),
    },
    otherwise=missing("read are FSDP, DEEPSPEED, MULTI_GPU, MULTI_CPU and NO"),
)
_BOTH = {**_DYNAMO, **{f"dynamo_{name}": meaning for name, meaning in _DYNAMO.items()}}
CONFIG: Table = {
    "distributed_type": _KINDS,
    "fsdp_config": plugin(name="fsdp_"),
    "deepspeed_config": Section(DEEPSPEED, "Accelerate's DeepSpeed", kind="deepspeed"),
    "parallelism_config": Section(
        {**PARALLEL, **{f"parallelism_config_{name}": meaning for name, meaning in PARALLEL.items()}}, "Accelerate"
    ),
    "mixed_precision": _PRECISION,
    "num_processes": sets("the size of the mesh: torchrun starts as many", ranks=as_count),
    "num_machines": sets("of hybrid strategies the axis replica", machines=as_count),
    "gradient_accumulation_steps": deepspeed.ACCUMULATE,
    "dynamo_config": Section(_BOTH, "torch.compile", before=_if_compiled),
    "use_cpu": CPU,
    "fp8_config": missing("products are of 16 bits or more", "None", "{}"),
    "megatron_lm_config": missing("axes of the mesh: see docs/how-to/tensor-parallel.md", "None", "{}"),
    "debug": yours("SHARDFN_DEBUG=collectives, of one run"),
    **same_for("mpirun_config compute_environment machine_rank gpu_ids main_process_ip main_process_port", _LAUNCH),
    **same_for("rdzv_backend same_network main_training_function enable_cpu_affinity command_file commands", _LAUNCH),
    **same_for("downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env", TPU),
    **same_for(
        "ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version transformers_version"
        " py_version sagemaker_inputs_file sagemaker_metrics_file additional_args",
        yours("starting machines, not training"),
    ),
}


def _one_strategy(draft: TranslationBuilder, prefix: str, settings: dict[str, Any]) -> None:
    if settings.get("fsdp_config") and settings.get("deepspeed_config"):
        raise TranslateError("fsdp_config and deepspeed_config: two strategies in one file; leave one of them")
    kind = upper_word(settings.get("distributed_type", "NO"))
    for name, section in (("FSDP", "fsdp_config"), ("DEEPSPEED", "deepspeed_config")):
        if kind == name and not settings.get(section):
            raise TranslateError(f"distributed_type: {kind}, but there is nothing in {section}")
        if settings.get(section) and "distributed_type" in settings and kind != name:
            raise TranslateError(f"distributed_type: {kind}, but {section} says how {name} is to shard; leave one")
    for section in ("fsdp_config", "deepspeed_config"):
        if section in settings and settings[section] in (None, {}):
            draft.row(section, settings.pop(section), "always", "it says nothing")


FILE = Section(CONFIG, "Accelerate", first="distributed_type fsdp_config deepspeed_config", before=_one_strategy)
PLUGINS = {
    "FullyShardedDataParallelPlugin": plugin(),
    "DeepSpeedPlugin": Section(DEEPSPEED, "DeepSpeedPlugin", kind="deepspeed"),
}
_QUIET = ("DistributedDataParallelKwargs", "InitProcessGroupKwargs", "ProfileKwargs")
_HOOKS = {"comm_hook", "comm_wrapper", "comm_state_option"}


def _handlers(draft: TranslationBuilder, key: str, value: Any) -> None:
    """Reads a list of handlers, of which some change numbers: scales, autocast, what DDP sends."""
    if value is not None and not isinstance(value, (list, tuple)):
        draft.open(key, value, "a list of calls, each of which has a row")
    for handler in value if isinstance(value, (list, tuple)) else ():
        name = handler.name if isinstance(handler, SourceCall) else "?"
        quiet = isinstance(handler, SourceCall) and name in _QUIET and not _HOOKS & handler.arguments.keys()
        text = "no number changes" if quiet else "so.dynamic_loss_scale, torch.autocast or compressed strategies"
        draft.row(f"{key}.{name}", handler, "yours" if quiet else "missing", text)


ACCELERATOR: Table = {
    "mixed_precision": _PRECISION,
    "gradient_accumulation_steps": deepspeed.ACCUMULATE,
    "cpu": CPU,
    "fsdp_plugin": PLUGINS["FullyShardedDataParallelPlugin"],
    "deepspeed_plugin": PLUGINS["DeepSpeedPlugin"],
    "deepspeed_plugins": missing("one strategy", "None"),
    **same_for(
        "device_placement split_batches dataloader_config log_with project_dir project_config"
        " step_scheduler_with_optimizer rng_types",
        yours("what sf.run.batches and sf.run.loop are given: docs/how-to/feed-batches.md, docs/how-to/run-a-loop.md"),
    ),
    "kwargs_handlers": _handlers,
    "dynamo_backend": missing("compile= of functional", "None", "no"),
    "dynamo_plugin": missing("compile= of functional", "None"),
    "megatron_lm_plugin": missing("axes of the mesh: see docs/how-to/tensor-parallel.md", "None"),
    "torch_tp_plugin": missing("tensor= of functional", "None"),
    "parallelism_config": missing("axes of make_mesh", "None"),
    "gradient_accumulation_plugin": missing("sf.accumulate", "None"),
}
