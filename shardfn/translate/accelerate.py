"""What the keys of Accelerate mean: its YAML, and the arguments of `Accelerator` and of its plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardfn.translate import deepspeed, deepspeed_bits, deepspeed_zero, fsdp
from shardfn.translate.draft import Draft
from shardfn.translate.facts import TranslateError
from shardfn.translate.meanings import By, Section, Table, Whole, always, apply, flag, meant, missing, sets, yours
from shardfn.translate.values import dtype, on, shown, whole, word

_ORDER = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_LAUNCH = yours("starting processes: torchrun")
_TPU = yours("there are no TPUs here, and of a run on GPUs it says nothing")
_ONE = missing("for functions: see docs/how-to/tensor-parallel.md; a module has no such axis", "1", "None")


def _strategy(draft: Draft, key: str, value: Any) -> None:
    """A name, or a number from 1, which in a file of Accelerate's own has one meaning."""
    if not isinstance(value, bool) and str(value).strip().isdecimal():
        if not 1 <= int(value) <= len(_ORDER):
            raise TranslateError(f"{key}: {value} is not one of 1 to 5, which are {', '.join(_ORDER)}")
        value = _ORDER[int(value) - 1]
    meant(draft, key, value, By(fsdp.CUT))


def _reshard(draft: Draft, key: str, value: Any) -> None:
    """A strategy's name for FSDP1, true or false for FSDP2."""
    old = draft.get("fsdp_version", 1) == 1
    if old == (isinstance(value, bool) or word(value) in ("TRUE", "FALSE")):
        kind = "the name of a strategy" if old else "true or false"
        raise TranslateError(f"{key}: {shown(value)}; with fsdp_version {1 if old else 2} it is {kind}")
    (_strategy if old else fsdp.reshard)(draft, key, value)


def _wrap(draft: Draft, key: str, value: Any) -> None:
    choices = {
        "TRANSFORMER_BASED_WRAP": always("the default of functional, or its stages="),
        "SIZE_BASED_WRAP": always("min_num_params= of functional, by the key of that name"),
        "NO_WRAP": fsdp.ONE_UNIT,
    }
    if isinstance(value, str) and word(value) not in choices:
        raise TranslateError(f"{key}: {value} is not one of {', '.join(choices)}")
    meant(draft, key, value, By(choices)) if isinstance(value, str) else fsdp.wrap(draft, key, value)


def _ignored(draft: Draft, key: str, value: Any) -> None:
    meant(draft, key, value, fsdp.IGNORED)


PLUGIN: Table = {
    "fsdp_version": By({"1": always("there is one, which does what both do"), "2": always("there is one")}),
    "version": By({"1": always("there is one, which does what both do"), "2": always("there is one")}),
    "sharding_strategy": Whole(_strategy),
    "reshard_after_forward": Whole(_reshard),
    "backward_prefetch": fsdp.PREFETCH,
    "backward_prefetch_policy": fsdp.PREFETCH,
    "mixed_precision_policy": Whole(fsdp.precision),
    "auto_wrap_policy": Whole(_wrap),
    "cpu_offload": Whole(fsdp.offload),
    "offload_params": Whole(fsdp.offload),
    "ignored_modules": Whole(_ignored),
    "state_dict_type": fsdp.STATES,
    "state_dict_config": yours("checkpoint.save and checkpoint.export gather nothing on a device"),
    "optim_state_dict_config": yours("state is a tree of flat shards: checkpoint.save"),
    "limit_all_gathers": always("prefetch + 1 buffers, however deep the model"),
    "use_orig_params": always("parameters have their own names and shapes"),
    "param_init_fn": fsdp.FSDP1["param_init_fn"],
    "sync_module_states": fsdp.FSDP1["sync_module_states"],
    "forward_prefetch": fsdp.FORWARD,
    "activation_checkpointing": fsdp.REMAT,
    "activation_checkpointing_offload": fsdp.REMAT_AWAY,
    "cpu_ram_efficient_loading": flag(
        yours("interop.load(folder, model, mesh, strategy) of a module from interop.meta(): each rank reads its part"),
        yours("the module has values on each rank"),
    ),
    "transformer_cls_names_to_wrap": fsdp.CLASSES,
    "transformer_layer_cls_to_wrap": fsdp.CLASSES,
    "min_num_params": fsdp.SIZE,
}


def _plugin(draft: Draft, key: str, value: Any) -> None:
    """The section fsdp_config, whose keys begin with `fsdp_`."""
    if value is None or value == {}:
        return
    if not isinstance(value, Mapping):
        raise TranslateError(f"{key}: {shown(value)} is not a mapping of keys")
    said = {f"fsdp_{name}": meaning for name, meaning in PLUGIN.items()} | {"fsdp_version": PLUGIN["fsdp_version"]}
    plugin(draft, value, said, f"{key}.", "fsdp_")


def plugin(draft: Draft, given: Mapping[str, Any], table: Table = PLUGIN, prefix: str = "", name: str = "") -> None:
    """Arguments of FullyShardedDataParallelPlugin, under the names of the table."""
    version = given.get("fsdp_version", given.get("version", 1))
    draft.facts["fsdp_version"] = whole(f"{prefix}fsdp_version", version)
    wrapped, asked = given.get(f"{name}auto_wrap_policy"), dict(given)
    for key, policy in (
        ("transformer_layer_cls_to_wrap", "TRANSFORMER_BASED_WRAP"),
        ("transformer_cls_names_to_wrap", "TRANSFORMER_BASED_WRAP"),
        ("min_num_params", "SIZE_BASED_WRAP"),
    ):
        if f"{name}{key}" in asked and isinstance(wrapped, str) and word(wrapped) != policy:
            value = asked.pop(f"{name}{key}")
            draft.row(f"{prefix}{name}{key}", value, "always", f"of no effect with {word(wrapped)}, there as here")
    if draft.facts["fsdp_version"] == 2 and f"{name}backward_prefetch" in asked:
        value = asked.pop(f"{name}backward_prefetch")
        draft.row(f"{prefix}{name}backward_prefetch", value, "always", "of no effect with FSDP2")
    if f"{name}activation_checkpointing_offload" in asked and on(
        name, asked[f"{name}activation_checkpointing_offload"]
    ):
        on_too = asked.pop(f"{name}activation_checkpointing", None)
        if on_too is not None:
            draft.row(f"{prefix}{name}activation_checkpointing", on_too, "becomes", "remat=, as the next key says")
    draft.facts.setdefault("cut", "full_shard")
    draft.facts.pop("cut") if {f"{name}sharding_strategy", f"{name}reshard_after_forward"} & set(asked) else None
    apply(draft, asked, table, prefix, "Accelerate's FSDP")


def _linked(draft: Draft, key: str, value: Any) -> None:
    """Keys of the section deepspeed_config; those of a linked file have been put into `"deepspeed_config_file"`."""
    if value is None or value == {}:
        return
    if not isinstance(value, Mapping):
        raise TranslateError(f"{key}: {shown(value)} is not a mapping of keys")
    apply(draft, value, DEEPSPEED, f"{key}.", "Accelerate's DeepSpeed")


def _file(draft: Draft, key: str, value: Any) -> None:
    if isinstance(value, Mapping):
        draft.row(key, "a file", "becomes", "its keys, below")
        deepspeed.translate(draft, value, "")
    elif value is not None:
        draft.row(key, value, "open", "its value is not in the file")


def _offload(kind: str) -> Whole:
    def read(draft: Draft, key: str, value: Any) -> None:
        deepspeed_zero.device(draft, key, value, kind)

    return Whole(read)


def _accumulate(draft: Draft, key: str, value: Any) -> None:
    meant(draft, key, value, deepspeed.ACCUMULATE)


DEEPSPEED: Table = {
    "deepspeed_config_file": Whole(_file),
    "hf_ds_config": Whole(_file),
    "zero_stage": Whole(deepspeed_zero.stage),
    "gradient_accumulation_steps": Whole(_accumulate),
    "gradient_clipping": deepspeed.CLIP,
    "offload_optimizer_device": _offload("optimizer"),
    "offload_param_device": _offload("param"),
    "offload_optimizer_nvme_path": deepspeed_zero.SCRATCH,
    "offload_param_nvme_path": deepspeed_zero.SCRATCH,
    "zero3_init_flag": yours("interop.meta(), and interop.load or sf.init_sharded: no rank has the whole"),
    "zero3_save_16bit_model": yours("checkpoint.export(..., dtype=torch.bfloat16) or interop.save_pretrained"),
    "is_train_batch_min": yours("how a batch's size is found"),
    "transformer_moe_cls_names": missing("stages={...} of functional: the outermost match is one stage", "None"),
    "deepspeed_moe_layer_cls_names": missing("stages={...} of functional: the outermost match is one stage", "None"),
    "enable_msamp": missing("products are of 16 bits or more", "False", "None"),
    "msamp_opt_level": always("of no effect without enable_msamp"),
    "deepspeed_multinode_launcher": _LAUNCH,
    "deepspeed_hostfile": _LAUNCH,
    "deepspeed_exclusion_filter": _LAUNCH,
    "deepspeed_inclusion_filter": _LAUNCH,
}

PARALLEL: Table = {
    "dp_replicate_size": sets("the axis replica of make_mesh", dp_replicate=whole),
    "dp_shard_size": sets("the axis shard of make_mesh", dp_shard=whole),
    "tp_size": sets("the axis tensor of make_mesh, and tensor= of functional", tensor=whole),
    "cp_size": _ONE,
    "sp_size": _ONE,
    "cp_backend": always("of no effect without cp_size"),
    "sp_backend": always("of no effect without sp_size"),
    "cp_comm_strategy": always("of no effect without cp_size"),
    "sp_seq_length": always("of no effect without sp_size"),
    "sp_seq_length_is_variable": always("of no effect without sp_size"),
    "sp_attn_implementation": always("of no effect without sp_size"),
    "tp_handler": missing("tensor= of functional", "None"),
    "cp_handler": missing("for functions only", "None"),
    "sp_handler": missing("for functions only", "None"),
    "device_mesh": missing("the sizes of make_mesh's axes", "None"),
}


def _parallel(draft: Draft, key: str, value: Any) -> None:
    if value is None or value == {}:
        return
    if not isinstance(value, Mapping):
        raise TranslateError(f"{key}: {shown(value)} is not a mapping of keys")
    prefixed = {f"parallelism_config_{name}": meaning for name, meaning in PARALLEL.items()}
    apply(draft, value, {**PARALLEL, **prefixed}, f"{key}.", "Accelerate")


def _dynamo(draft: Draft, key: str, value: Any) -> None:
    if value is None or value == {}:
        return
    if not isinstance(value, Mapping):
        raise TranslateError(f"{key}: {shown(value)} is not a mapping of keys")
    plain = {_of_compile(str(name)): name for name in value}
    off = "backend" not in plain or word(value[plain["backend"]]) in ("NO", "NONE", "")
    off = off or ("disable" in plain and on(key, value[plain["disable"]]))
    for name, said in plain.items():
        where, one = f"{key}.{said}", value[said]
        if off:
            draft.row(where, one, "always", "nothing is compiled")
        elif name in ("backend", "mode"):
            draft.say("compile", {**draft.facts.pop("compile", {}), name: str(one).lower()}, where)
            draft.row(where, one, "becomes", "compile= of functional: an argument of torch.compile")
        elif name in ("fullgraph", "dynamic"):
            draft.say(
                "compile", {**draft.facts.pop("compile", {}), name: None if one is None else on(where, one)}, where
            )
            draft.row(where, one, "becomes", "compile= of functional: an argument of torch.compile")
        elif name in ("use_regional_compilation", "disable"):
            draft.row(where, one, "always", "each stage is compiled, once for all layers")
        else:
            draft.row(where, one, "open", "compile= of functional takes a dict of torch.compile's arguments")


def _of_compile(name: str) -> str:
    """`dynamic` of `dynamo_use_dynamic`."""
    plain = name.removeprefix("dynamo_")
    return plain.removeprefix("use_") if plain in ("use_dynamic", "use_fullgraph") else plain


_PRECISION = By(
    {
        "NO": always("the default: all in the dtype of the parameters"),
        "BF16": sets("see below", amp="torch.bfloat16"),
        "FP16": sets("see below", amp="torch.float16"),
        "FP8": missing("products are of 16 bits or more"),
    }
)


def precision(draft: Draft, key: str, value: Any) -> None:
    """`mixed_precision`: what it means depends on the strategy, which has been read."""
    if word(value) not in ("BF16", "FP16"):
        meant(draft, key, value, _PRECISION)
        return
    made = dtype(key, value)
    if draft.get("fsdp"):
        for fact in ("gather_dtype", "reduce_dtype", *(("buffer_dtype",) if draft.get("fsdp_version") == 1 else ())):
            draft.say(fact, made, key)
        draft.say("cast_inputs", True, key)
        if draft.get("fsdp_version") == 2:
            draft.say("output_dtype", made, key)
        text = "gather_dtype=, reduce_dtype= and input_dtype= of the stages, and torch.autocast around the model"
    elif draft.get("deepspeed"):
        deepspeed_bits.sixteen_bits(draft, str(made), key)
        draft.row(key, value, "becomes", "gather_dtype=, reduce_dtype= and input_dtype= of the stages")
        return
    else:
        text = "torch.autocast around the model"
    draft.say("autocast", made, key)
    if made == "torch.float16":
        draft.say("scaled", {}, key)
        text += ", and so.loss_scaled, whose defaults are those of GradScaler"
    draft.row(key, value, "becomes", text)


_KINDS = {
    "FSDP": "the strategy, by fsdp_config",
    "DEEPSPEED": "the strategy, by deepspeed_config",
    "MULTI_GPU": "sf.ddp",
    "MULTI_CPU": "sf.ddp",
    "NO": "sf.ddp, on one process",
}


def _kind(draft: Draft, key: str, value: Any) -> None:
    kind = word(value)
    if kind in _KINDS:
        draft.row(key, value, "becomes", _KINDS[kind])
        if kind in ("MULTI_GPU", "MULTI_CPU", "NO"):
            draft.say("cut", "ddp", key)
    else:
        draft.row(key, value, "missing", "read are FSDP, DEEPSPEED, MULTI_GPU, MULTI_CPU and NO")


CONFIG: Table = {
    "distributed_type": Whole(_kind),
    "fsdp_config": Whole(_plugin),
    "deepspeed_config": Whole(_linked),
    "parallelism_config": Whole(_parallel),
    "mixed_precision": Whole(precision),
    "num_processes": sets("the size of the mesh: torchrun starts as many", ranks=whole),
    "num_machines": sets("of hybrid strategies the axis replica", machines=whole),
    "gradient_accumulation_steps": Whole(_accumulate),
    "dynamo_config": Whole(_dynamo),
    "use_cpu": flag(sets('device="cpu" of make_mesh', cpu=True), always("make_mesh takes the accelerator")),
    "fp8_config": missing("products are of 16 bits or more", "None", "{}"),
    "megatron_lm_config": missing("axes of the mesh: see docs/how-to/tensor-parallel.md", "None", "{}"),
    "mpirun_config": _LAUNCH,
    "compute_environment": _LAUNCH,
    "debug": yours("SHARDFN_DEBUG=collectives, of one run"),
    **dict.fromkeys(
        [
            "machine_rank",
            "gpu_ids",
            "main_process_ip",
            "main_process_port",
            "rdzv_backend",
            "same_network",
            "main_training_function",
            "enable_cpu_affinity",
            "command_file",
            "commands",
        ],
        _LAUNCH,
    ),
    **dict.fromkeys(
        ["downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"], _TPU
    ),
    **dict.fromkeys(
        [
            "ec2_instance_type",
            "iam_role_name",
            "image_uri",
            "profile",
            "region",
            "base_job_name",
            "pytorch_version",
            "transformers_version",
            "py_version",
            "sagemaker_inputs_file",
            "sagemaker_metrics_file",
            "additional_args",
        ],
        yours("starting machines, not training"),
    ),
}


def translate(draft: Draft, given: Mapping[str, Any]) -> None:
    """Accelerate's YAML."""
    both = [key for key in ("fsdp_config", "deepspeed_config") if given.get(key)]
    if len(both) == 2:
        raise TranslateError("fsdp_config and deepspeed_config: two strategies in one file; leave one of them")
    draft.facts["fsdp"] = bool(given.get("fsdp_config"))
    draft.facts["deepspeed"] = bool(given.get("deepspeed_config"))
    kind = word(given.get("distributed_type", "NO"))
    for name, section in (("FSDP", "fsdp_config"), ("DEEPSPEED", "deepspeed_config")):
        if kind == name and not given.get(section):
            raise TranslateError(f"distributed_type: {kind}, but there is nothing in {section}")
        if given.get(section) and "distributed_type" in given and kind != name:
            raise TranslateError(f"distributed_type: {kind}, but {section} says how {name} is to shard; leave one")
    first = [key for key in ("distributed_type", "fsdp_config", "deepspeed_config") if key in given]
    apply(draft, {key: given[key] for key in [*first, *(k for k in given if k not in first)]}, CONFIG, "", "Accelerate")
    sizes(draft)


def sizes(draft: Draft) -> None:
    """The axes that the sizes of parallelism_config and the number of machines make."""
    replicas, shards = draft.get("dp_replicate", 1), draft.get("dp_shard", 1)
    if replicas > 1:
        whole_cut = {"full_shard": "hybrid_shard", "shard_grad_op": "hybrid_shard_zero2"}
        cut = draft.get("cut")
        if cut in whole_cut:
            draft.facts["cut"] = whole_cut[cut]
            draft.keys["cut"] = draft.of("cut", "dp_replicate")
        draft.say("replica", replicas, *draft.of("dp_replicate"))
    if shards > 1:
        draft.say("shard", shards, *draft.of("dp_shard"))
    ranks, machines = draft.get("ranks"), draft.get("machines", 1)
    if draft.get("cut", "").startswith("hybrid") and "replica" not in draft.facts and ranks:
        if ranks % machines:
            raise TranslateError(f"num_processes: {ranks} does not divide by num_machines: {machines}")
        draft.say("replica", machines, *draft.of("machines"))
    product = replicas * shards * draft.get("tensor", 1)
    if ranks and draft.of("dp_replicate", "dp_shard") and product != ranks:
        raise TranslateError(f"parallelism_config: its sizes make {product} ranks, and num_processes is {ranks}")


def accelerator(draft: Draft, given: Mapping[str, Any]) -> None:
    """Arguments of `Accelerator(...)` without its plugins, which have been read."""
    apply(draft, given, ACCELERATOR, "", "Accelerator")


ACCELERATOR: Table = {
    "mixed_precision": Whole(precision),
    "gradient_accumulation_steps": Whole(_accumulate),
    "cpu": CONFIG["use_cpu"],
    "fsdp_plugin": Section({}),
    "deepspeed_plugin": Section({}),
    "deepspeed_plugins": missing("one strategy", "None"),
    **dict.fromkeys(
        [
            "device_placement",
            "split_batches",
            "dataloader_config",
            "log_with",
            "project_dir",
            "project_config",
            "step_scheduler_with_optimizer",
            "rng_types",
            "kwargs_handlers",
        ],
        yours("what sf.run.batches and sf.run.loop are given: docs/how-to/feed-batches.md, docs/how-to/run-a-loop.md"),
    ),
    "dynamo_backend": missing("compile= of functional", "None", "no"),
    "dynamo_plugin": missing("compile= of functional", "None"),
    "megatron_lm_plugin": missing("axes of the mesh: see docs/how-to/tensor-parallel.md", "None"),
    "torch_tp_plugin": missing("tensor= of functional", "None"),
    "parallelism_config": missing("axes of make_mesh", "None"),
    "gradient_accumulation_plugin": missing("sf.accumulate", "None"),
}

__all__ = ["CONFIG", "DEEPSPEED", "PLUGIN", "accelerator", "plugin", "sizes", "translate"]
