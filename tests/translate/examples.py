"""Configurations, by name: the file's ending, what is in it, the ranks that it runs on, and the exit status."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from tests.translate import programs


class Example(NamedTuple):
    suffix: str
    text: str
    ranks: int
    status: int = 0


def _ds(status: int = 0, ranks: int = 4, /, **given: Any) -> Example:
    return Example(".json", json.dumps(given), ranks, status)


def _accelerate(text: str, ranks: int = 4, status: int = 0) -> Example:
    head = f"compute_environment: LOCAL_MACHINE\nuse_cpu: true\nnum_processes: {ranks}\n"
    return Example(".yaml", head + text, ranks, status)


def _fsdp(keys: str, ranks: int = 4, status: int = 0, more: str = "") -> Example:
    lines = "\n".join(f"  fsdp_{line}" for line in keys.split("; "))
    return _accelerate(f"distributed_type: FSDP\n{more}fsdp_config:\n{lines}\n", ranks, status)


ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
LIGHTNING = "from lightning.pytorch import Trainer\n"
COMPOSER = "from composer import Trainer\n"
TORCH = "import torch\nfrom torch.distributed.fsdp import *\n"

EXAMPLES: dict[str, Example] = {
    "accelerate-full": _fsdp(
        "sharding_strategy: FULL_SHARD; auto_wrap_policy: NO_WRAP; state_dict_type: FULL_STATE_DICT"
    ),
    "accelerate-number": _fsdp("sharding_strategy: 2; auto_wrap_policy: SIZE_BASED_WRAP; min_num_params: 50"),
    "accelerate-no-shard": _fsdp("sharding_strategy: NO_SHARD", 1),
    "accelerate-hybrid": _fsdp(
        "sharding_strategy: HYBRID_SHARD_ZERO2; transformer_layer_cls_to_wrap: Block; backward_prefetch: NO_PREFETCH; "
        "activation_checkpointing: true; offload_params: true; state_dict_type: SHARDED_STATE_DICT",
        4,
        0,
        "num_machines: 2\nmixed_precision: bf16\n",
    ),
    "accelerate-fsdp2": _fsdp(
        "version: 2; reshard_after_forward: false; activation_checkpointing: true", 4, 0, "mixed_precision: fp16\n"
    ),
    "accelerate-hsdp": _accelerate(
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n"
        "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n"
        "  parallelism_config_tp_size: 1\n  parallelism_config_cp_size: 1\n"
    ),
    "accelerate-ddp": _accelerate("distributed_type: MULTI_CPU\nmixed_precision: bf16\n", 2),
    "accelerate-compile": _accelerate(
        "distributed_type: 'NO'\ndynamo_config: {dynamo_backend: EAGER, dynamo_use_dynamic: false}\n", 1
    ),
    "accelerate-deepspeed": _accelerate(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 2\n"
        "  gradient_accumulation_steps: 2\n  gradient_clipping: 1.0\n  offload_optimizer_device: cpu\n"
        "  offload_param_device: none\n  zero3_init_flag: false\n"
    ),
    "accelerate-plugin": Example(
        ".py",
        "plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True, cpu_offload=False)\n"
        "accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=3, cpu=True)\n",
        2,
    ),
    "zero1": _ds(
        train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps=2,
        train_batch_size=32,
        zero_optimization={"stage": 1},
        optimizer=ADAMW,
        gradient_clipping=0.1,
    ),
    "zero2": _ds(
        train_batch_size=32,
        train_micro_batch_size_per_gpu=4,
        zero_optimization={"stage": 2},
        optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    ),
    "zero3-disk": _ds(
        train_micro_batch_size_per_gpu=4,
        optimizer=ADAMW,
        zero_optimization={
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "SCRATCH", "buffer_count": 4},
            "offload_param": {"device": "nvme", "nvme_path": "SCRATCH"},
            "stage3_param_persistence_threshold": 20,
            "stage3_gather_16bit_weights_on_model_save": True,
            "contiguous_gradients": True,
        },
    ),
    "zero++": _ds(
        zero_optimization={
            "stage": 3,
            "zero_hpz_partition_size": 2,
            "zero_quantized_weights": True,
            "zero_quantized_gradients": True,
        }
    ),
    "mics": _ds(zero_optimization={"stage": 3, "mics_shard_size": 2, "mics_hierarchical_params_gather": False}),
    "mics-hierarchical": _ds(
        zero_optimization={"stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": True}
    ),
    "fp16": _ds(
        1,
        2,
        fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2},
        optimizer=ADAMW,
        zero_optimization={"stage": 3},
    ),
    "fp16-fixed": _ds(
        fp16={"enabled": True, "loss_scale": 128},
        communication_data_type="fp32",
        optimizer={"type": "Lion", "params": {"lr": 1e-3}},
    ),
    "lamb": _ds(optimizer={"type": "Lamb", "params": {"lr": 1e-3, "max_coeff": 0.3, "weight_decay": 0.01}}),
    "bf16": _ds(bf16={"enabled": True, "bf16_optimizer_states": True, "check_grad_overflow": True}, optimizer=ADAMW),
    "autos": _ds(
        1,
        train_batch_size="auto",
        gradient_accumulation_steps="auto",
        gradient_clipping="auto",
        train_micro_batch_size_per_gpu="auto",
        zero_optimization={"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
        bf16={"enabled": "auto"},
        optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
        scheduler={
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": "auto"},
        },
    ),
    "cosine": _ds(
        0,
        1,
        optimizer={"type": "Adagrad", "params": {"lr": 0.1}},
        scheduler={"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}},
    ),
    "range": _ds(
        0,
        1,
        optimizer={"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}},
        scheduler={"type": "LRRangeTest", "params": {"lr_range_test_staircase": True}},
    ),
    "not-there": _ds(
        1,
        1,
        optimizer={"type": "OneBitAdam", "params": {"lr": 0.1}},
        gradient_allreduce_op="sum",
        scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 0.1}},
        gradient_predivide_factor=2.0,
        activation_checkpointing={"partition_activations": True},
        zero_optimization={"stag": 3},
    ),
    "torch-autocast": _ds(0, 1, torch_autocast={"enabled": True, "dtype": "bfloat16"}, optimizer=ADAMW),
    "lightning-fsdp": Example(
        ".py",
        LIGHTNING + 'strategy = FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2), '
        "auto_wrap_policy={Block}, activation_checkpointing_policy={Block}, cpu_offload=True, "
        'state_dict_type="sharded", timeout=x)\n'
        'trainer = Trainer(strategy=strategy, precision="bf16-mixed", accumulate_grad_batches=2, '
        'gradient_clip_val=0.5, max_steps=10, accelerator="cpu", devices=4)\n',
        4,
    ),
    "lightning-true": Example(
        ".py",
        LIGHTNING + 'Trainer(strategy="ddp", precision="64-true", gradient_clip_val=0.5, '
        'gradient_clip_algorithm="value", sync_batchnorm=True)\n',
        2,
    ),
    "lightning-scaled": Example(".py", LIGHTNING + 'Trainer(strategy=FSDPStrategy(), precision="16-mixed")\n', 2),
    "lightning-ddp": Example(
        ".py", LIGHTNING + 'Trainer(strategy=DDPStrategy(find_unused_parameters=True), precision="16-mixed")\n', 2
    ),
    "lightning-deepspeed": Example(
        ".py",
        LIGHTNING + "Trainer(strategy=DeepSpeedStrategy(stage=3, offload_optimizer=True, "
        'offload_parameters=True, cpu_checkpointing=False), precision="bf16-mixed")\n',
        2,
    ),
    "lightning-name": Example(".py", LIGHTNING + 'Trainer(strategy="deepspeed_stage_3_offload")\n', 2),
    "lightning-parallel": Example(
        ".py", LIGHTNING + "Trainer(strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))\n", 2
    ),
    "composer-fsdp": Example(
        ".py",
        COMPOSER + 'parallelism_config = {"fsdp": {"sharding_strategy": "FULL_SHARD", "mixed_precision": "PURE", '
        '"activation_checkpointing": True, "activation_cpu_offload": False, "state_dict_type": "sharded", '
        '"sharded_ckpt_prefix_dir": "ba{batch}", "backward_prefetch": "BACKWARD_PRE", "limit_all_gathers": True, '
        '"data_parallel_replicate_degree": 2, "load_monolith_rank0_only": True, "te_checkpoint_wrapper": False}}\n'
        'Trainer(model=model, parallelism_config=parallelism_config, precision="amp_bf16", '
        'device_train_microbatch_size=4, save_num_checkpoints_to_keep=2, max_duration="10ba")\n',
        4,
    ),
    "composer-fsdp2": Example(
        ".py",
        COMPOSER + 'Trainer(precision=Precision.FP32, parallelism_config={"fsdp2": FSDP2Config('
        "reshard_after_forward=False)})\n",
        2,
    ),
    "composer-old": Example(
        ".py",
        'Trainer(fsdp_config=dict(sharding_strategy="SHARD_GRAD_OP", mixed_precision="DEFAULT"), '
        'precision="amp_fp16", device_train_microbatch_size="auto")\n',
        2,
        1,
    ),
    "foundry": Example(
        ".yaml",
        "precision: amp_bf16\nmax_duration: 6ba\nglobal_train_batch_size: 32\n"
        "device_train_microbatch_size: 4\nseed: 17\nmodel: {name: mpt}\n"
        "optimizer: {name: decoupled_adamw, lr: 1.0e-2, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 1.0e-3}\n"
        "scheduler: {name: cosine_with_warmup, t_warmup: 2ba, alpha_f: 0.1}\n"
        "algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: 1.0}}\n"
        "fsdp_config: {sharding_strategy: FULL_SHARD, mixed_precision: PURE, state_dict_type: full, verbose: false}\n",
        2,
    ),
    "torch-fsdp1": Example(
        ".py",
        TORCH + "model = FullyShardedDataParallel(module, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, "
        "cpu_offload=CPUOffload(offload_params=True), backward_prefetch=BackwardPrefetch.BACKWARD_PRE, "
        "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, "
        "buffer_dtype=torch.float32), auto_wrap_policy=partial(transformer_auto_wrap_policy, "
        "transformer_layer_cls={Block}), limit_all_gathers=True, use_orig_params=True, device_id=0)\n",
        2,
    ),
    "torch-fsdp2": Example(
        ".py",
        TORCH + 'mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))\n'
        "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)\n"
        "for layer in layers:\n    fully_shard(layer, mesh=mesh, mp_policy=policy)\n"
        "fully_shard(model, mesh=mesh, mp_policy=policy)\n",
        4,
    ),
    "torch-zero1": Example(
        ".py",
        TORCH + "with torch.autocast('cpu', dtype=torch.bfloat16):\n    loss = loss_of(ddp(x))\n"
        "ddp = DistributedDataParallel(module, find_unused_parameters=True)\n"
        "opt = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=1e-2)\n",
        2,
    ),
    "deepspeed-initialize": Example(
        ".py",
        "import deepspeed\nsettings = {'zero_optimization': {'stage': 2}, 'bf16': {'enabled': True}, "
        "'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-2}}}\n"
        "engine, *_ = deepspeed.initialize(model=module, config=settings)\n",
        2,
    ),
    "transformers-paged": Example(
        ".py",
        'TrainingArguments("out", use_cpu=True, max_steps=3, learning_rate=1e-2, optim="paged_adamw_8bit")\n',
        2,
    ),
    "transformers": Example(
        ".py",
        'TrainingArguments("out", use_cpu=True, fsdp="full_shard", max_steps=3, learning_rate=1e-2, weight_decay=0.1, '
        "gradient_accumulation_steps=2, max_grad_norm=0.1, adam_beta2=0.95)\n",
        2,
    ),
    "torch-hpz": Example(".py", TORCH + "fully_shard(model, reshard_after_forward=2)\n", 4),
}

NAMES: dict[str, Any] = {
    "lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 1.0, "micro_batches": 2,
    "persistence_threshold": 10, "total_num_steps": 100, "warmup_num_steps": 10, "warmup_max_lr": 1e-2,
    "train_batch_size": 32, "micro_batch_size": 4, "steps": 3,
}  # fmt: skip


def written(name: str, folder: Path) -> Path:
    """The file of an example."""
    one, scratch = EXAMPLES[name], folder / "scratch"
    scratch.mkdir(exist_ok=True)
    file = folder / f"{name}{one.suffix}"
    file.write_text(one.text.replace("SCRATCH", str(scratch)))
    return file


def several(names: list[str], folder: Path) -> dict[str, programs.Ran]:
    """Runs some in one world, and gives what each came to."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # as torchrun sets it
    found = {}
    for name in names:
        try:
            found[name] = programs.run(folder / f"{name}{EXAMPLES[name].suffix}", folder / f"{name}-saved", NAMES)
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    return found
