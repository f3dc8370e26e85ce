"""Files as guides print them: each key becomes something or is printed, and one that nobody knows is printed."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from sentence_transformers import SentenceTransformerTrainingArguments
from torch.distributed.fsdp import FSDPModule

from shardfn.cli import main
from shardfn.translate import fsdp, optimizers, translate
from shardfn.translate import transformers as of_transformers
from tests.translate.guides import AUTO, GUIDES, Guide

UNKNOWN = "no_such_key"


def written(guide: Guide, folder: Path) -> Path:
    file = folder / f"file{guide.suffix}"
    file.write_text(guide.text)
    return file


@pytest.mark.parametrize("name", GUIDES)
def test_a_file_of_a_guide_is_translated(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guide = GUIDES[name]
    assert main(["translate", str(written(guide, tmp_path))]) == guide.status
    printed = capsys.readouterr().out
    compile(printed[: printed.index("key of ")], name, "exec")
    for line in guide.lines:
        assert line in printed
    left = {row.key for row in translate(written(guide, tmp_path)).rows if row.status in ("missing", "open", "unknown")}
    assert set(guide.says) <= left
    assert bool(left) == bool(guide.status), left
    assert all(key in printed for key in left)


def paths(x: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Of leaves."""
    if isinstance(x, dict) and x:
        for key, one in x.items():
            yield from paths(one, (*path, key))
    else:
        yield path


def places(x: Any) -> Iterator[dict[str, Any]]:
    """Of all mappings."""
    if isinstance(x, dict):
        yield x
        for one in x.values():
            yield from places(one)


MAPPINGS = [name for name, one in GUIDES.items() if one.suffix != ".py"]
PROGRAMS = [name for name, one in GUIDES.items() if one.suffix == ".py"]


def read(guide: Guide) -> Any:
    return json.loads(guide.text) if guide.suffix == ".json" else yaml.safe_load(guide.text)


@pytest.mark.parametrize("name", MAPPINGS)
def test_each_key_has_a_row_and_an_unknown_one_is_printed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = GUIDES[name]
    rows = {row.key for row in translate(written(guide, tmp_path)).rows}
    assert {".".join(path) for path in paths(read(guide))} <= rows
    for number in range(len(list(places(read(guide))))):
        given = read(guide)
        list(places(given))[number][UNKNOWN] = 1
        check(guide._replace(text=json.dumps(given)), tmp_path, capsys)


def check(guide: Guide, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = main(["translate", str(written(guide, folder))]), capsys.readouterr()
    assert (status, UNKNOWN in said.out) == (1, True) or f"differ in {UNKNOWN}" in said.err


READ = {
    *fsdp.BESIDE, "FSDPStrategy", "Trainer", "fully_shard", "FSDP", "FullyShardedDataParallel", "MixedPrecisionPolicy",
    "CPUOffload", "init_device_mesh", "ModuleWrapPolicy", "DeepSpeedStrategy", *of_transformers.ARGUMENTS,
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_argument_has_a_row_and_an_unknown_one_is_printed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = GUIDES[name]
    tree = ast.parse(guide.text)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called(node) in READ]
    rows = {row.key for row in translate(written(guide, tmp_path)).rows}
    told = " ".join(rows)
    for call in calls:
        assert called(call) in told or all(word.arg is None or word.arg in told for word in call.keywords), rows
        call.keywords.append(ast.keyword(UNKNOWN, ast.Constant(1)))
        check(guide._replace(text=ast.unparse(tree)), tmp_path, capsys)
        call.keywords.pop()
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.Dict) and node.keys]:
        node.keys.append(ast.Constant(UNKNOWN))
        node.values.append(ast.Constant(1))
        check(guide._replace(text=ast.unparse(tree)), tmp_path, capsys)
        node.keys.pop()
        node.values.pop()


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def test_every_argument_of_transformers_and_every_method_of_fsdp_has_a_meaning() -> None:
    for kind in (
        transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments, SentenceTransformerTrainingArguments,
    ):  # fmt: skip
        fields = {one.name for one in dataclasses.fields(kind)}
        assert fields - set(of_transformers.TABLE) - {"fsdp", "fsdp_config", "deepspeed"} == set()
    trainer = set(inspect.signature(transformers.Trainer.__init__).parameters) - {"self"}
    assert trainer - set(of_transformers.TRAINER) == set()
    methods = {name for name in vars(FSDPModule) if not name.startswith("_")} - {"reshard", "unshard"}
    assert methods - set(fsdp.BESIDE) == set()


def test_defaults_are_those_of_transformers() -> None:
    known = {one.name: one.default for one in dataclasses.fields(transformers.TrainingArguments)}
    ours = {key: value for key, value in of_transformers.DEFAULTS.items() if key != "warmup_ratio"}
    assert ours == {key: known[key] for key in ours}


@pytest.mark.parametrize("warmup", [0, 3, 0.25])
@pytest.mark.parametrize("kind", sorted(optimizers.LR_SCHEDULER_TYPES))
def test_learning_rates_are_those_of_transformers(kind: str, warmup: float, tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        f"TrainingArguments(lr_scheduler_type={kind!r}, warmup_steps={warmup}, max_steps=12, learning_rate=0.3)"
    )
    program = translate(file).program
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.3)
    steps = math.ceil(12 * warmup) if 0 < warmup < 1 else warmup
    scheduler = transformers.get_scheduler(kind, optimizer, num_warmup_steps=int(steps), num_training_steps=12)
    space: dict[str, Any] = {"math": math, "rate": lambda step: 0.3}
    if "def rate" in program:
        exec(program[program.index("def rate") : program.index("optimizer = ")], space)
    for step in range(1, 13):
        assert space["rate"](step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-15)
        optimizer.step()
        scheduler.step()


def test_a_file_that_an_argument_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    (tmp_path / "a.py").write_text('TrainingArguments("out", deepspeed="ds.json", max_steps=10, fp16=True)')
    found = translate(tmp_path / "a.py")
    assert "so.dynamic_loss_scale(optimizer, growth_interval=1000, scale=65536.0)" in found.program
    assert [row.key for row in found.rows if row.status == "open"] == []


@pytest.mark.parametrize(("text", "key"), [
    ("kw = {}\nif low:\n    kw['mp_policy'] = MixedPrecisionPolicy()\nfully_shard(model, **kw)", "**kw"),
    ("kw = dict(stage=3)\nkw.update(cpu_checkpointing=True)\nTrainer(strategy=DeepSpeedStrategy(**kw))", "**kw"),
    ("rate = 1e-3\nrate *= 8\nTrainingArguments(max_steps=5, learning_rate=rate)", "learning_rate"),
    ("steps = 5\nfor steps in (10, 20):\n    TrainingArguments(max_steps=steps)", "max_steps"),
    ("def run(steps=5):\n    TrainingArguments(max_steps=steps)\n\nsteps = 7", "max_steps"),
    ("TrainingArguments(max_steps=-1)", "max_steps"),
    ("TrainingArguments(max_steps=5, warmup_ratio=part)", "warmup_ratio"),
    ("TrainingArguments(max_steps=5, fp16=half)", "fp16"),
    ("TrainingArguments(max_steps=5, torch_compile=args.compile)", "torch_compile"),
    ("args = TrainingArguments(max_steps=5)\nargs.max_grad_norm = 0.5", "args.max_grad_norm"),
    ("args = SFTConfig(max_steps=5)\nargs.set_optimizer(name='sgd')", "args.set_optimizer(name='sgd')"),
    ("a = Accelerator()\na.state.deepspeed_plugin.deepspeed_config['x'] = 4",
     "a.state.deepspeed_plugin.deepspeed_config['x']"),
])  # fmt: skip
def test_what_a_program_changes_or_decides_is_open(text: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(text)
    found = translate(tmp_path / "a.py")
    assert key in [row.key for row in found.rows if row.status == "open"]
    assert not found.complete


def test_what_a_partial_is_given_is_read(tmp_path: Path) -> None:
    text = "shard = functools.partial(fully_shard, reshard_after_forward=False)\nfor layer in layers:\n    shard(layer)"
    (tmp_path / "a.py").write_text(text)
    assert "sf.strategies.shard_grad_op(" in translate(tmp_path / "a.py").program


@pytest.mark.parametrize(("text", "says"), [
    ("Trainer(model=model, args=args)", "takes one set of arguments"),
    ("TrainingArguments(fsdp='full_shard', deepspeed={'zero_optimization': {}})", "two strategies in one file"),
    ("TrainingArguments(fsdp='full_shard hybrid_shard')", "is not one strategy"),
    ("TrainingArguments(gradient_accumulation_steps=2, deepspeed={'gradient_accumulation_steps': 4})", "contradict"),
    ("Trainer(strategy='deepspeed_stage_4')", "is not a strategy that is read"),
    ("Trainer(strategy='fsdpx')", "is not a strategy that is read"),
])  # fmt: skip
def test_what_contradicts_itself_is_status_two(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text(text)
    assert main(["translate", str(tmp_path / "a.py")]) == 2
    assert says in capsys.readouterr().err
