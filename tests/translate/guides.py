"""Whole files in the forms that guides print them: of Accelerate, DeepSpeed, Lightning, Transformers and torch."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from shardfn.translate.values import strategy_path


class Guide(NamedTuple):
    suffix: str
    text: str
    status: int
    lines: tuple[str, ...] = ()
    """Of the program."""
    says: tuple[str, ...] = ()
    """Keys, each of which has a row that is no translation."""


HEAD = """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
fsdp_config:
"""
OLD = """  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_{prefetch}: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: {offload}
  fsdp_sharding_strategy: {cut}
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
"""
NEW = """  fsdp_version: 2
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: {kept}
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
"""


def accelerate(cut: object, prefetch: str = "backward_prefetch", offload: bool = False) -> str:
    return HEAD + OLD.format(cut=cut, prefetch=prefetch, offload=str(offload).lower())


AUTO = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
             "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW",
                  "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR",
                  "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip
STAGE2 = {
    "train_batch_size": 8, "steps_per_print": 2000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR",
                  "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
    "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False,
    "fp16": {"enabled": True, "fp16_master_weights_and_grads": False, "loss_scale": 0, "loss_scale_window": 500,
             "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15},
    "zero_optimization": {"stage": 2, "allgather_partitions": True, "reduce_scatter": True,
                          "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000, "overlap_comm": True,
                          "contiguous_gradients": True, "cpu_offload": True},
}  # fmt: skip
HF = "from transformers import AutoModelForCausalLM, Trainer, {kind}\n\nargs = {kind}(\n{arguments})\n" + (
    "trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=test, data_collator=collator)\n"
    "trainer.train()\n"
)


def hf(kind: str = "TrainingArguments", **arguments: object) -> str:
    lines = "".join(f"    {key}={value!r},\n" for key, value in {"output_dir": "out", **arguments}.items())
    return HF.format(kind=kind, arguments=lines)


LIGHTNING = """import lightning as L
from lightning.pytorch.strategies import FSDPStrategy, DeepSpeedStrategy

strategy = {strategy}
trainer = L.Trainer(accelerator="gpu", devices=4, strategy=strategy, precision="{precision}", max_epochs=3)
trainer.fit(model, data)
"""
TORCH = """import torch
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy

fsdp_kwargs = {{"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}}
for layer in model.layers:
    fully_shard(layer, **fsdp_kwargs)
fully_shard(model, **fsdp_kwargs{root})
{calls}
optim = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(epochs):
    loss = model(x).sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optim.step()
    optim.zero_grad()
"""
FSDP1 = """from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, CPUOffload
from torch.optim.lr_scheduler import StepLR

model = FSDP(model, auto_wrap_policy=my_auto_wrap_policy, cpu_offload=CPUOffload(offload_params=True),
             backward_prefetch=BackwardPrefetch.BACKWARD_PRE, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
             device_id=torch.cuda.current_device())
scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
for x, y in loader:
    with model.no_sync():
        loss(model(x), y).backward()
    model.clip_grad_norm_(0.5)
"""

FULL = ("sf.full_shard(DATA)", 'stages={"BertLayer"}', "gather_dtype=torch.bfloat16")
CUTS = ("full_shard", "shard_grad_op", "ddp", "hybrid_shard", "hybrid_shard_zero2")
NAMES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
WHOLE: dict[str, Any] = {"max_steps": 100, "learning_rate": 2e-5, "gradient_accumulation_steps": 2}
TOKENS = ("/ tokens", "tokens = sf.psum(", "so.clip_by_global_norm(1.0)")

GUIDES: dict[str, Guide] = {
    **{f"accelerate-{name}": Guide(".yaml", accelerate(name), 0, (f"{strategy_path(ours)}(", "prefetch=1"))
       for name, ours in zip(NAMES, CUTS, strict=True)},
    **{f"accelerate-{number}": Guide(".yaml", accelerate(number), 0, (f"{strategy_path(ours)}(",))
       for number, ours in enumerate(CUTS, 1)},
    "accelerate-old-prefetch": Guide(".yaml", accelerate(1, "backward_prefetch_policy"), 0, (*FULL, "prefetch=1")),
    "accelerate-offload": Guide(".yaml", accelerate("FULL_SHARD", offload=True), 0,
                                ('strategy.with_tiers(params="host"',)),
    "accelerate-2": Guide(".yaml", HEAD + NEW.format(kept="true"), 0, ("sf.full_shard(", "remat=True")),
    "accelerate-2-kept": Guide(".yaml", HEAD + NEW.format(kept="false"), 0, ("sf.strategies.shard_grad_op(",)),
    "deepspeed-2": Guide(".json", json.dumps(STAGE2), 1, ("sf.zero2(", "dynamic_loss_scale"), ("fp16.hysteresis",)),
    "deepspeed-auto": Guide(".json", json.dumps(AUTO), 1, ("sf.full_shard(",), ("optimizer.params.lr",)),
    **{f"transformers-{said.replace(' ', '-')}": Guide(".py", hf(fsdp=said, bf16=True, **WHOLE), 0, (cut, *TOKENS))
       for said, cut in (("full_shard", "sf.full_shard("), ("full_shard auto_wrap", "sf.full_shard("),
                         ("shard_grad_op auto_wrap", "sf.strategies.shard_grad_op("),
                         ("hybrid_shard", "sf.hybrid_shard("),
                         ("full_shard offload", '.with_tiers(params="host"'))},
    "transformers-true": Guide(".py", hf(fsdp=True, **WHOLE, fsdp_config={
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "activation_checkpointing": True,
        "reshard_after_forward": True, "cpu_ram_efficient_loading": True, "state_dict_type": "SHARDED_STATE_DICT",
    }), 0, ('stages={"LlamaDecoderLayer"}', "remat=True", *TOKENS)),
    "transformers-1": Guide(".py", hf(fsdp=["shard_grad_op", "auto_wrap"], **WHOLE, fsdp_config={
        "version": 1, "backward_prefetch": "backward_pre", "forward_prefetch": "false", "limit_all_gathers": True,
        "use_orig_params": True, "sync_module_states": True, "min_num_params": 0, "xla": False,
    }), 0, ("sf.strategies.shard_grad_op(", "prefetch=1")),
    "transformers-prefixed": Guide(".py", hf(fsdp="full_shard", **WHOLE, fsdp_config={
        "fsdp_transformer_layer_cls_to_wrap": "BertLayer", "fsdp_backward_prefetch": "backward_pre",
    }), 0, ('stages={"BertLayer"}',)),
    "transformers-deepspeed": Guide(".py", hf(deepspeed=AUTO, bf16=True, warmup_steps=10, **WHOLE), 0, (
        "sf.full_shard(", '.with_tiers(params="host", grads="host", state="host")', "2e-05", "micro_batches = 2",
        "sf.run.batches(rows, mesh, DATA, 8 * micro_batches * mesh.size(), seed=0)", "steps=100",
    )),
    "transformers-fp16": Guide(".py", hf(fp16=True, weight_decay=0.1, lr_scheduler_type="cosine", **WHOLE), 0, (
        "sf.ddp(", "so.dynamic_loss_scale", "return 0.1 * (len(shape) > 1)", "math.cos",
    )),
    "transformers-epochs": Guide(".py", hf(num_train_epochs=3), 1, ("steps=steps",), ("max_steps",)),
    "transformers-adafactor": Guide(".py", hf(optim="adafactor", max_steps=5), 1, (), ("optim",)),
    "transformers-seq2seq": Guide(".py", hf(
        "Seq2SeqTrainingArguments", predict_with_generate=True, label_smoothing_factor=0.1, **WHOLE
    ), 1, TOKENS, ("label_smoothing_factor",)),
    "sentence-transformers": Guide(".py", hf("SentenceTransformerTrainingArguments", batch_sampler="no_duplicates",
                                             warmup_ratio=0.1, fsdp="full_shard", **WHOLE), 0, (
        "sf.pmean(mean(model, params, *batch), DATA) / micro_batches", "math.ceil(100 * 0.1)",
    )),
    "trl": Guide(".py", hf("SFTConfig", packing=True, max_length=512, max_steps=10), 0, (
        "remat=True", "torch.autocast(mesh.device_type, torch.bfloat16)", "2e-05",
    )),
    **{f"lightning-{name}": Guide(".py", LIGHTNING.format(strategy=f'"{name}"', precision="32-true"), 0, (line,))
       for name, line in (("fsdp", "sf.full_shard("), ("ddp", "sf.ddp("), ("deepspeed_stage_2", "sf.zero2("),
                          ("deepspeed_stage_3", "sf.full_shard("), ("fsdp_cpu_offload", '.with_tiers(params="host"'),
                          ("deepspeed_stage_2_offload", '.with_tiers(grads="host", state="host")'),
                          ("deepspeed_stage_3_offload", '.with_tiers(params="host", grads="host", state="host")'),
                          ("deepspeed_stage_3_offload_nvme", 'scratch="/local_nvme"'),
                          ("ddp_find_unused_parameters_true", "sf.ddp("))},
    **{f"lightning-fp16-{number}": Guide(".py", LIGHTNING.format(strategy=said, precision=bits), 1, (
        "gather_dtype=torch.float16", "so.dynamic_loss_scale(optimizer, growth_interval=1000)",
    ), ("hysteresis", "min_loss_scale")) for number, (said, bits) in enumerate([
        ("DeepSpeedStrategy(stage=3)", "16-mixed"), ("'deepspeed_stage_2'", "16-true"), ("'deepspeed'", "16"),
    ])},
    "lightning-policy": Guide(".py", LIGHTNING.format(strategy=(
        'FSDPStrategy(auto_wrap_policy={torch.nn.TransformerEncoderLayer}, limit_all_gathers=True, cpu_offload=False,\n'
        '    activation_checkpointing_policy={torch.nn.TransformerEncoderLayer}, sharding_strategy="SHARD_GRAD_OP",\n'
        '    state_dict_type="sharded", backward_prefetch="BACKWARD_PRE", forward_prefetch=True)'
    ), precision="bf16-mixed"), 0, ("sf.strategies.shard_grad_op(", "remat=True", "prefetch=1")),
    "torch": Guide(".py", TORCH.format(root="", calls=""), 0, ("sf.full_shard(", "clip_by_global_norm(1.0)")),
    "torch-root": Guide(".py", TORCH.format(root=", reshard_after_forward=False", calls=""), 0, ("sf.full_shard(",)),
    "torch-kept": Guide(".py", TORCH.format(root="", calls="").replace(
        "fully_shard(model, ", "fully_shard([model.norm, model.output], **fsdp_kwargs, reshard_after_forward=False)\n"
                               "fully_shard(model, "), 1, ("sf.full_shard(",), ("reshard_after_forward in line 7",)),
    "torch-prefetch": Guide(".py", TORCH.format(root="", calls=(
        "for i, layer in enumerate(model.layers[:-2]):\n"
        "    layer.set_modules_to_forward_prefetch([model.layers[i + 1], model.layers[i + 2]])\n"
        "    layer.set_modules_to_backward_prefetch([model.layers[i - 1]])"
    )), 0, ("sf.full_shard(",)),
    "torch-factor": Guide(".py", TORCH.format(root="", calls="model.set_gradient_divide_factor(4.0)"), 0, (
        "sf.psum(mean(model, params, *batch), DATA) / 4.0",
    )),
    "torch-old-factor": Guide(".py", TORCH.format(root="", calls="model.set_reduce_scatter_divide_factor(n)"), 1, (
        "/ divide_factor",
    ), ("set_reduce_scatter_divide_factor.factor",)),
    "torch-sync": Guide(".py", TORCH.format(root="", calls="model.set_requires_gradient_sync(False)"), 1, (),
                        ("set_requires_gradient_sync",)),
    "torch-1": Guide(".py", FSDP1, 1, (
        "sf.strategies.shard_grad_op(", '.with_tiers(params="host"', "clip_by_global_norm(0.5)",
    ), (
        "StepLR", "no_sync", "auto_wrap_policy",
    )),
}  # fmt: skip
