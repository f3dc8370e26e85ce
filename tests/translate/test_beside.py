"""Calls beside the one that shards a program: each has a row, and one that is not read is no status 0."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from shardfn.cli import main
from shardfn.translate import Translation, translate
from shardfn.translate import fsdp as of_fsdp
from tests.translate.test_scripts import HEAD

TRAINER = "trainer = Trainer(model=model, args=TrainingArguments(output_dir='o', max_steps=9, {}), train_dataset=d)\n"


def translated(folder: Path, text: str) -> tuple[Translation, dict[str, str]]:
    file = folder / "train.py"
    file.write_text(text)
    found = translate(file)
    compile(found.program, "program", "exec")
    return found, {row.key: row.status for row in found.rows}


BESIDE = {
    "plugin": ("p = FullyShardedDataParallelPlugin(cpu_offload=True)\n", "FullyShardedDataParallelPlugin"),
    "accelerator": ("a = Accelerator(mixed_precision='bf16')\nmodel = a.prepare_model(model)\n", "Accelerator"),
    "deepspeed": ("a = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))\n", "DeepSpeedPlugin"),
    "four bits": (
        "q = BitsAndBytesConfig(load_in_4bit=True)\nm = load(n, quantization_config=q)\n",
        "BitsAndBytesConfig",
    ),
    "gptq": ("from transformers import GPTQConfig\nq = GPTQConfig(bits=4)\n", "GPTQConfig"),
    "adapters": ("model = get_peft_model(model, LoraConfig(r=8))\n", "LoraConfig"),
    "k-bit": ("model = prepare_model_for_kbit_training(model)\n", "prepare_model_for_kbit_training"),
    "ddp": ("model = DistributedDataParallel(model)\n", "DistributedDataParallel"),
    "a config of nobody": ("from elsewhere import GrowConfig\nc = GrowConfig(1)\n", "GrowConfig"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_not_read_beside_a_trainer_is_missing(name: str, tmp_path: Path) -> None:
    text, key = BESIDE[name]
    found, statuses = translated(tmp_path, text + TRAINER.format(""))
    assert statuses[key] == "missing"
    assert main(["translate", str(tmp_path / "train.py")]) == 1
    assert translated(tmp_path, TRAINER.format(""))[0].complete
    assert not found.complete


BESIDE_DDP = {
    "for g in optimizer.param_groups:\n    g['lr'] = rate(i)\n": "param_groups",
    "optimizer.param_groups[0]['weight_decay'] *= 0.5\n": "param_groups",
    "average = torch.optim.swa_utils.AveragedModel(model)\n": "AveragedModel",
    "later = torch.optim.swa_utils.SWALR(optimizer, 0.1)\n": "SWALR",
    "a = Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=8)])\n": "kwargs_handlers.GradScalerKwargs",
    "a = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook='fp16')])\n": (
        "kwargs_handlers.DistributedDataParallelKwargs"
    ),
    "t = Trainer(strategy='fsdp', callbacks=[StochasticWeightAveraging(1e-2), Mine()])\n": (
        "callbacks.StochasticWeightAveraging"
    ),
}
QUIET_BESIDE_DDP = (
    "for g in optimizer.param_groups:\n    print(g['lr'])\n",
    "a = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])\n",
    "t = Trainer(strategy='fsdp', callbacks=[Mine()])\n",
)


def _of_torch(text: str) -> str:
    data_parallel = "" if "(strategy" in text or "Accelerator" in text else "model = DistributedDataParallel(model)\n"
    return f"{HEAD}{'import lightning' if '(strategy' in text else ''}\n{data_parallel}{text}"


@pytest.mark.parametrize("text", BESIDE_DDP)
def test_what_changes_numbers_beside_a_plain_loop_is_missing(text: str, tmp_path: Path) -> None:
    found, statuses = translated(tmp_path, _of_torch(text))
    assert statuses[BESIDE_DDP[text]] == "missing"
    assert not found.complete


@pytest.mark.parametrize("text", QUIET_BESIDE_DDP)
def test_what_changes_no_number_beside_a_plain_loop_is_no_gap(text: str, tmp_path: Path) -> None:
    assert translated(tmp_path, _of_torch(text))[0].complete


def test_settings_of_the_model_or_of_the_file_itself_are_yours(tmp_path: Path) -> None:
    text = (
        "from transformers import GrowConfig\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass RunConfig:\n    n: int = 1\n\nc, r = GrowConfig(width=8), RunConfig(n=2)\n"
    )
    found, statuses = translated(tmp_path, text + TRAINER.format(""))
    assert (statuses["GrowConfig"], statuses["RunConfig"], found.complete) == ("yours", "yours", True)


def test_what_is_an_argument_of_a_call_that_is_read_has_no_second_row(tmp_path: Path) -> None:
    text = "p = FullyShardedDataParallelPlugin(state_dict_config=FullStateDictConfig(offload_to_cpu=True))\n"
    found, statuses = translated(tmp_path, f"{text}a = Accelerator(fsdp_plugin=p)\n")
    assert set(statuses) == {"state_dict_config"}
    assert found.complete


OPTIM = {
    "adamw_bnb_8bit": ("so.adamw8bit(rate, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0)", False),
    "paged_adamw_8bit": ("so.adamw8bit(rate, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0)", True),
    "paged_adamw_32bit": ("so.adamw(rate, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0)", True),
    "paged_lion_8bit": ("so.lion8bit(rate, b1=0.9, b2=0.999)", True),
}


@pytest.mark.parametrize("name", OPTIM)
def test_optimizers_that_the_page_maps_are_translated(name: str, tmp_path: Path) -> None:
    line, paged = OPTIM[name]
    found, _ = translated(tmp_path, TRAINER.format(f"optim={name!r}"))
    assert found.complete
    assert line in found.program
    assert ('strategy.with_tiers(state="host")' in found.program) == paged


def test_data_parallel_modules_are_read(tmp_path: Path) -> None:
    text = (
        "m = DDP(model, device_ids=[rank], find_unused_parameters=True)\no = torch.optim.AdamW(m.parameters(), 1e-3)\n"
    )
    head = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    found, statuses = translated(tmp_path, HEAD + head + text)
    assert found.complete
    assert statuses["find_unused_parameters"] == "always"
    assert "strategy = sf.ddp(DATA)" in found.program
    assert set(inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters) <= set(of_fsdp.DDP)
    assert translated(tmp_path, HEAD + head + "DDP(model, process_group=g)\n")[1]["process_group"] == "missing"


def test_state_of_an_optimizer_that_is_cut_is_zero1(tmp_path: Path) -> None:
    text = "m = DistributedDataParallel(model)\no = ZeroRedundancyOptimizer(m.parameters(), {}, lr=0.02)\n"
    found, statuses = translated(tmp_path, HEAD + text.format("optimizer_class=torch.optim.SGD"))
    assert found.complete
    assert statuses["ZeroRedundancyOptimizer"] == statuses["SGD"] == "becomes"
    assert "strategy = sf.strategies.zero1(DATA)" in found.program
    assert "so.sgd(0.02" in found.program
    found, statuses = translated(tmp_path, HEAD + text.format("chosen"))
    assert statuses["ZeroRedundancyOptimizer.optimizer_class"] == "open"


def test_deepspeed_initialize_is_read(tmp_path: Path) -> None:
    settings = "{'train_micro_batch_size_per_gpu': 2, 'zero_optimization': {'stage': 2}, 'gradient_clipping': 0.5}"
    text = "import deepspeed\nC = {}\ne, *_ = deepspeed.initialize(model=model, config=C{})\n"
    found, statuses = translated(tmp_path, text.format(settings, ""))
    assert (found.system, found.complete) == ("DeepSpeed", True)
    assert statuses["zero_optimization.stage"] == "becomes"
    assert "strategy = sf.zero2(DATA)" in found.program
    assert "so.clip_by_global_norm(0.5)" in found.program
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    assert "sf.full_shard(DATA)" in translated(tmp_path, text.format("'ds.json'", ""))[0].program
    assert translated(tmp_path, "import deepspeed\ndeepspeed.initialize(args=args, model=m)\n")[1]["config"] == "open"
    assert translated(tmp_path, text.format("{}", ", mpu=grid"))[1]["mpu"] == "missing"


def test_backends_that_torch_compile_does_not_have_are_missing(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    for backend, complete in (("NVFUSER", False), ("INDUCTOR", True)):
        file.write_text(f"distributed_type: MULTI_GPU\nnum_processes: 2\ndynamo_config:\n  dynamo_backend: {backend}\n")
        assert translate(file).complete == complete


MESHES = {
    "(world,)": ("sf.make_mesh(shard=-1)", True),
    "(4, world // 4)": ("sf.make_mesh(replica=4, shard=-1)", True),
    "(nodes, gpus)": ("sf.hybrid_shard", False),
}


@pytest.mark.parametrize("sizes", MESHES)
def test_one_size_of_a_mesh_that_is_not_said_is_the_rest(sizes: str, tmp_path: Path) -> None:
    line, complete = MESHES[sizes]
    strategy = ", sharding_strategy=ShardingStrategy.HYBRID_SHARD" if "," in sizes[:-2] else ""
    text = f"FSDP(model, device_mesh=init_device_mesh('cuda', {sizes}){strategy})\n"
    found, _ = translated(tmp_path, HEAD + text)
    assert found.complete == complete
    assert line in found.program


LINES = {
    "m = torch.compile(model, backend='eager', fullgraph=True)": 'compile={"backend": "eager", "fullgraph": True}',
    "with torch.autocast('cuda', dtype=torch.bfloat16):\n    f(x)": "torch.autocast(mesh.device_type, torch.bfloat16)",
    "model = SyncBatchNorm.convert_sync_batchnorm(model)": "sync_batch_norm=DATA",
    "model.gradient_checkpointing_enable()": "remat=True",
}


@pytest.mark.parametrize("text", LINES)
def test_calls_that_change_training_become_lines(text: str, tmp_path: Path) -> None:
    found, _ = translated(tmp_path, f"{HEAD}fully_shard(model)\n{text}\n")
    assert found.complete
    assert LINES[text] in found.program
    assert "re.compile" not in [
        row.key for row in translated(tmp_path, f"{HEAD}fully_shard(m)\nre.compile('x')\n")[0].rows
    ]


def test_the_batch_that_a_mesh_does_not_make_is_named_as_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "foundry.yaml"
    file.write_text(
        "precision: fp32\nmax_duration: 6ba\nglobal_train_batch_size: 32\ndevice_train_microbatch_size: 4\n"
    )
    assert 'ValueError("global_train_batch_size is not what this mesh makes")' in translate(file).program


@pytest.mark.parametrize(
    ("order", "line"),
    [("2.0", "(1.0)"), ("1", "(1.0, order=1)"), ("torch.inf", "(1.0, order=float('inf'))"), ("3", None)],
)
def test_orders_of_clipping(order: str, line: str | None, tmp_path: Path) -> None:
    clips = f"torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type={order})\n"
    found, statuses = translated(tmp_path, HEAD + "fully_shard(model)\n" + clips)
    assert found.complete is (line is not None)
    assert line is not None or statuses["clip_grad_norm_.norm_type"] == "missing"
    assert line is None or f"so.clip_by_global_norm{line}" in found.program
