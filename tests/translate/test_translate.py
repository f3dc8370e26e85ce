"""What other systems' configurations become: every key, every program, what one process computes, and refusals."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config import config_args
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch.distributed import fsdp

import shardfn.optim as so
from shardfn.cli import main
from shardfn.testing import World
from shardfn.testing import world as make_world
from shardfn.translate import Row, TranslateError, precision, translate
from shardfn.translate import accelerate as of_accelerate
from shardfn.translate import fsdp as of_fsdp
from tests.translate import programs
from tests.translate.examples import EXAMPLES, NAMES, several, written
from tests.translate.keys import KEYS

each_example = pytest.mark.parametrize("name", EXAMPLES)


def fields(kind: Any) -> set[str]:
    return {one.name for one in dataclasses.fields(kind)}


def arguments(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def test_every_argument_of_fsdp_has_a_meaning():
    assert arguments(fsdp.FullyShardedDataParallel.__init__) - set(of_fsdp.FSDP1) == set()
    assert arguments(fsdp.fully_shard) - set(of_fsdp.FSDP2) == set()
    for kind in (fsdp.MixedPrecision, fsdp.MixedPrecisionPolicy):
        assert fields(kind) - set(precision.POLICY) == set()
    assert {one.name for one in fsdp.ShardingStrategy} - set(of_fsdp.CUTS) == set()
    assert {one.name for one in fsdp.BackwardPrefetch} - set(of_fsdp.PREFETCH.choices) == set()
    assert {one.name for one in fsdp.StateDictType} - set(of_fsdp.STATES.choices) == set()


def test_every_field_of_accelerate_has_a_meaning():
    assert fields(FullyShardedDataParallelPlugin) - set(of_accelerate.PLUGIN) == set()
    assert fields(DeepSpeedPlugin) - set(of_accelerate.DEEPSPEED) == set()
    for kind in (config_args.ClusterConfig, config_args.SageMakerConfig):
        assert fields(kind) - set(of_accelerate.CONFIG) == set()
    assert fields(ParallelismConfig) - set(of_accelerate.PARALLEL) - {"total_size"} == set()
    import accelerate

    assert arguments(accelerate.Accelerator.__init__) - set(of_accelerate.ACCELERATOR) == set()


def test_every_key_that_accelerate_asks_for_has_a_meaning():
    """The questions of `accelerate config`, from its own code."""
    from accelerate.commands.config import cluster

    text = inspect.getsource(cluster)
    asked = set(re.findall(r'fsdp_config\["fsdp_(\w+)"\]', text)) - {"version"}
    assert len(asked) > 10
    assert asked - set(of_accelerate.PLUGIN) == set()
    asked = set(re.findall(r'deepspeed_config\["(\w+)"\]', text))
    assert len(asked) > 10
    assert asked - set(of_accelerate.DEEPSPEED) == set()


@pytest.mark.parametrize("whose", KEYS)
def test_every_key_of_systems_that_are_not_installed_has_a_meaning(whose: str):
    table, keys = KEYS[whose]
    assert set(keys.split()) - set(table) == set()


@each_example
def test_a_translation_says_whether_it_is_all(name: str, tmp_path: Path):
    found = translate(written(name, tmp_path))
    left = [row for row in found.rows if row.status in ("missing", "open", "unknown")]
    assert (found.complete, bool(left)) == (EXAMPLES[name].status == 0, EXAMPLES[name].status == 1), left


@each_example
def test_lines_name_the_keys_that_they_come_from(name: str, tmp_path: Path):
    found = translate(written(name, tmp_path))
    comments = " ".join(re.findall(r"#.*", found.program))
    lines = [row for row in found.rows if row.status == "becomes" and not row.text.endswith(("below", "arguments"))]
    unnamed = [row.key for row in lines if row.key not in comments]
    assert [key for key in unnamed if key not in ("distributed_type", "strategy", "zero_optimization.offload")] == []
    assert max(map(len, found.program.splitlines())) < 200


@pytest.mark.world(1)
def test_programs_run_on_one_rank(world: World, tmp_path: Path):
    check_run(world, 1, tmp_path)


@pytest.mark.world(2)
def test_programs_run_on_two_ranks(world: World, tmp_path: Path):
    check_run(world, 2, tmp_path)


@pytest.mark.world(4)
def test_programs_run_on_four_ranks(world: World, tmp_path: Path):
    check_run(world, 4, tmp_path)


def trained_llama(file: Path) -> list[float]:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    space: dict[str, Any] = {
        "module": transformers.LlamaForCausalLM(config),
        "mean": lambda model, params, x: model(params, input_ids=x).logits.square().mean(),
        "optimizer": so.adamw(1e-2),
    }
    x = torch.arange(32).view(4, 8).chunk(2)
    space |= {"steps": 3, "batches": lambda start: [(x[space["mesh"].get_local_rank(space["DATA"])],)] * 3}
    exec(compile(translate(file).program, "program", "exec"), space)
    return list(space["run"].metrics["loss"].values())


def test_programs_with_a_tensor_axis_run(tmp_path: Path):
    values = []
    for size in (1, 2):
        file = tmp_path / f"{size}.yaml"
        sizes = f"{{dp_shard_size: 2, tp_size: {size}}}"
        file.write_text(
            f"distributed_type: FSDP\nuse_cpu: true\nfsdp_config: {{fsdp_version: 2}}\nparallelism_config: {sizes}\n"
        )
        first, *others = make_world(2 * size).with_deadline(120).run(trained_llama, file)
        assert all(other == pytest.approx(first) for other in others)
        values.append(first)
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert values[0][2] < values[0][0]


def check_run(world: World, ranks: int, folder: Path) -> None:
    """Each program runs, and what is full precision in it gives what one process gives."""
    names = [name for name, one in EXAMPLES.items() if one.ranks == ranks]
    for name in names:
        written(name, folder)
    first, *others = world.with_deadline(240).run(several, names, folder)
    for name in names:
        values, params, rows = first[name]
        assert all(torch.isfinite(p).all() for p in params.values()), name
        for other in others:
            assert other[name].values == values, name
            assert all(torch.equal(p, params[path]) for path, p in other[name].params.items()), name
        if name in REFERENCES:
            wanted, whole = programs.reference(rows, *REFERENCES[name])
            torch.testing.assert_close(values, wanted, rtol=CLOSE.get(name, 1e-4), atol=1e-5, msg=name)
            for path, p in params.items():
                torch.testing.assert_close(
                    p, whole[path], rtol=CLOSE.get(name, 1e-3), atol=CLOSE.get(name, 1e-5), msg=name
                )


def adamw(params: Any, decay: float = 0.01, b2: float = 0.999, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": list(params), **more}], lr=1e-2, betas=(0.9, b2), weight_decay=decay)


def of_json(params: Any) -> torch.optim.Optimizer:
    return adamw(params, 0.1, 0.95)


def of_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)


def of_adagrad(params: Any) -> torch.optim.Optimizer:
    rates = [0.0, 0.0, 0.1 * torch.tensor(2.0).log().item() / torch.tensor(2.0).log().item()]
    return torch.optim.Adagrad([{"params": list(params), "rate": lambda step: rates[step - 1]}], lr=0.1)


def of_foundry(params: Any) -> torch.optim.Optimizer:
    def rate(step: int) -> float:  # two steps of warmup, and a cosine to a tenth at the sixth
        done = step - 1
        return 1e-2 * (done / 2 if done < 2 else 0.1 + 0.45 * (1 + math.cos(math.pi * (done - 2) / 4)))

    return adamw(params, 1e-3 / 1e-2, 0.95, rate=rate)


def of_transformers(params: Any) -> torch.optim.Optimizer:
    every = list(params)
    groups = [{"params": [p for p in every if (p.ndim > 1) == cut], "weight_decay": 0.1 * cut,
               "rate": lambda step: 1e-2 * (4 - step) / 3} for cut in (True, False)]  # fmt: skip
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


# The optimizer, the norm that is clipped at, and the dtype of autocast.
REFERENCES: dict[str, tuple[Any, ...]] = {
    "accelerate-full": (adamw,),
    "accelerate-number": (adamw,),
    "accelerate-no-shard": (adamw,),
    "accelerate-hsdp": (adamw,),
    "accelerate-plugin": (adamw,),
    "accelerate-ddp": (adamw, None, torch.bfloat16),
    "zero1": (of_json, 0.1),
    "zero2": (of_sgd,),
    "zero3-disk": (of_json,),
    "mics": (adamw,),
    "mics-hierarchical": (adamw,),
    "cosine": (of_adagrad,),
    "lightning-name": (adamw,),
    "lightning-parallel": (adamw,),
    "composer-fsdp2": (adamw,),
    "foundry": (of_foundry, 1.0, torch.bfloat16),
    "torch-hpz": (adamw,),
    "transformers": (of_transformers, 0.1),
}
CLOSE = {"accelerate-ddp": 3e-2, "foundry": 3e-2}


def rows_of(file: Path, text: str) -> dict[str, Row]:
    file.write_text(text)
    return {row.key: row for row in translate(file).rows}


def test_an_unknown_key_is_named_with_the_closest(tmp_path: Path):
    rows = rows_of(
        tmp_path / "a.json", '{"zero_optimization": {"stage": 3, "overlap_coms": true}, "train_batchsize": 4}'
    )
    assert rows["zero_optimization.overlap_coms"].status == "unknown"
    assert rows["zero_optimization.overlap_coms"].text.endswith("the closest is overlap_comm")
    assert rows["train_batchsize"].text.endswith("the closest is train_batch_size")


def test_defaults_that_change_results_are_named(tmp_path: Path):
    rows = rows_of(tmp_path / "a.json", '{"fp16": {"enabled": true}, "zero_optimization": {"stage": 0}}')
    assert rows["fp16.hysteresis"].status == rows["fp16.min_loss_scale"].status == "missing"
    program = translate(tmp_path / "a.json").program
    assert "so.dynamic_loss_scale(optimizer, growth_interval=1000)" in program
    assert "reduce_dtype=torch.float16" in program


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('{"gradient_allreduce_op": "sum", "train_batch_size": 8}', ["sf.psum(mean(model, params, *batch), DATA)"]),
        ('{"gradient_clipping": 0.0, "train_batch_size": 8}', []),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}',
            ['strategy.with_tiers(params="host")'],
        ),
        ('{"bf16": {"enabled": true}, "communication_data_type": "fp32"}', ["reduce_dtype=torch.float32"]),
        ('{"fp16": {"enabled": false, "loss_scale": 3}, "train_batch_size": 8}', []),
        (
            '{"tensor_parallel": {"autotp_size": 2}, "train_batch_size": 8}',
            ["sf.make_mesh(data=-1, tensor=2)", 'tensor="auto"', "model.shard(mesh, strategy)"],
        ),
        ('{"zero_optimization": {"stage": 1, "zero_quantized_weights": true}}', []),
    ],
)
def test_values_become_lines(text: str, lines: list[str], tmp_path: Path):
    (tmp_path / "a.json").write_text(text)
    program = translate(tmp_path / "a.json").program
    assert [line for line in lines if line not in program] == []
    if not lines:
        assert "clip" not in program
        assert "scaled" not in program
        assert "float16" not in program
        assert "quant" not in program


@pytest.mark.parametrize(
    ("file", "text", "lines", "names"),
    [
        (
            "a.json",
            '{"max_duration": "20ba", "seed": 17, "device_train_microbatch_size": 4}',
            ["sf.run.batches(rows, mesh, DATA, 4 * mesh.size(), seed=17)", "batches, steps=20, seed=17)"],
            {"rows"},
        ),
        (
            "a.json",
            '{"train_batch_size": 32, "gradient_accumulation_steps": 2}',
            ["sf.run.batches(rows, mesh, DATA, 32, seed=0)", "sf.accumulate(loss, batch, micro=micro_batches)(params)"],
            {"rows", "steps"},
        ),
        ("a.py", "Trainer(strategy='fsdp', max_steps=5)", ["batches, steps=5)"], {"batches"}),
        ("a.py", "Trainer(strategy='fsdp', max_steps=-1)", ["batches, steps=steps)"], {"batches", "steps"}),
        (
            "a.py",
            "Trainer(strategy=FSDPStrategy(state_dict_type='sharded'), max_steps=n)",
            ["batches, steps=steps, save=folder)"],
            {"batches", "steps", "folder"},
        ),
        (
            "a.yaml",
            "max_duration: 1ba\nalgorithms: {gradient_clipping: {clipping_type: value, clipping_threshold: 0.5}}",
            ["so.clip_by_value(0.5)", "batches, steps=1)"],
            {"batches"},
        ),
    ],
)
def test_what_a_file_says_of_rows_and_steps_is_in_the_loop(
    file: str, text: str, lines: list[str], names: set[str], tmp_path: Path
):
    (tmp_path / file).write_text(text)
    found = translate(tmp_path / file)
    assert [line for line in lines if line not in found.program] == []
    assert {"rows", "batches", "steps", "folder"} & set(found.names) == names


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_min_lr": 0.01, "warmup_max_lr": 0.1}},
            [0.01, 0.01, 0.04876, 0.07143, 0.08752, 0.1],
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear"}},
            [0, 0, 0.06, 0.12, 0.18, 0.24],
        ),
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": 12, "warmup_num_steps": 4}},
            [0, 0, 0.0005, 0.00079, 0.001, 0.001, 0.00088, 0.00075],
        ),
        (
            {
                "type": "WarmupCosineLR",
                "params": {
                    "total_num_steps": 12,
                    "warmup_num_steps": 4,
                    "warmup_min_ratio": 0.1,
                    "cos_min_ratio": 0.01,
                },
            },
            [0.0, 0.03, 0.165, 0.24397, 0.3, 0.2887, 0.25651, 0.20833, 0.1515],
        ),
        ({"type": "LRRangeTest", "params": {"lr_range_test_step_size": 3}}, [0.001, 0.00133, 0.00167, 0.002]),
    ],
)
def test_learning_rates_are_those_of_deepspeeds_schedulers(scheduler: Any, rates: list[float], tmp_path: Path):
    """The numbers were taken from DeepSpeed 0.19's classes."""
    optimizer = {"type": "AdamW", "params": {"lr": 0.3}}
    (tmp_path / "a.json").write_text(json.dumps({"optimizer": optimizer, "scheduler": scheduler}))
    program = translate(tmp_path / "a.json").program
    space: dict[str, Any] = {}
    exec("import math\n" + program[program.index("def rate") : program.index("# optimizer.type")], space)
    assert [round(space["rate"](step + 1), 5) for step in range(len(rates))] == rates


def test_a_linked_file_is_read_in_the_place_of_its_name(tmp_path: Path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}')
    file = tmp_path / "a.yaml"
    file.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n")
    found = translate(file)
    assert found.complete
    assert "sf.zero2(DATA)" in found.program
    assert "clip_by_global_norm(1.0)" in found.program


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: MULTI_GPU\nmixed_precision: {}",
        "distributed_type: {}\nnum_processes: 1\ndowncast_bf16: {}",
        "distributed_type: FSDP\nmixed_precision: {}\nfsdp_config: {{fsdp_offload_params: {}}}",
        "distributed_type: MULTI_GPU\ndynamo_config: {{dynamo_backend: {}, dynamo_use_fullgraph: true}}",
    ],
)
def test_no_without_quotes_is_the_word(text: str, tmp_path: Path):
    """YAML reads it as false."""
    file, found = tmp_path / "a.yaml", []
    for spelling in ("'no'", "no", "NO"):
        file.write_text(text.replace("{}", spelling).format())
        found.append(translate(file))
    assert len({one.program for one in found}) == 1
    assert [[(row.key, row.status, row.text) for row in one.rows] for one in found[1:]] == [
        [(row.key, row.status, row.text) for row in found[0].rows]
    ] * 2
    assert found[0].complete


def test_python_is_parsed_and_not_run(tmp_path: Path):
    file, trace = tmp_path / "a.py", tmp_path / "trace"
    file.write_text(f"open({str(trace)!r}, 'w')\nx = 2\nfully_shard(model, reshard_after_forward=x)\n")
    assert "sf.strategies.hpz" in translate(file).program
    assert not trace.exists()


def test_the_command_prints_a_program_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = written("zero1", tmp_path)
    assert main(["translate", str(file)]) == 0
    out = capsys.readouterr().out
    assert "strategy = sf.strategies.zero1(DATA)  # zero_optimization.stage\n" in out
    assert re.search(r"gradient_clipping\s+0\.1\s+becomes\s+so\.clip_by_global_norm", out)
    assert main(["translate", str(written("not-there", tmp_path))]) == 1


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["translate", "--json", str(written("autos", tmp_path))]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["system"], found["complete"]) == ("DeepSpeed", False)
    assert {"key": "optimizer.params.lr", "value": "auto", "status": "open"}.items() <= next(
        row for row in found["rows"] if row["key"] == "optimizer.params.lr"
    ).items()
    assert set(found["names"]) >= {"lr", "micro_batches", "module", "mean"}


def test_yaml_asks_for_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(TranslateError, match=r"pip install '.\[translate\]'"):
        translate(written("foundry", tmp_path))


OF_FSDP, OF_DEEPSPEED = "distributed_type: FSDP\nfsdp_config: ", "distributed_type: DEEPSPEED\ndeepspeed_config: "
WRONG: dict[str, tuple[str, str | bytes | None, str]] = {
    "no such file": ("a.yaml", None, "no such file"),
    "empty": ("a.yaml", " \n", "empty"),
    "binary": ("a.json", b"\xff\xfe\x00\x81", "not text in UTF-8"),
    "zero bytes": ("a.yaml", b"a: \x00", "zero bytes"),
    "not JSON": ("a.json", '{"stage": 3,,}', "line 1: not JSON"),
    "not YAML": ("a.yaml", "a: [1\nb: }", "not YAML"),
    "not Python": ("a.py", "FSDPStrategy(", "line 1: not Python"),
    "a list": ("a.json", "[1, 2]", "a list"),
    "a string": ("a.yaml", "hello", "a mapping of keys"),
    "numbers for keys": ("a.yaml", "1: 2", "keys that are strings"),
    "nobody's": ("a.json", '{"color": 3}', "no configuration that is known here"),
    "no call": ("a.py", "print(1)", "no call that is read"),
    "deep JSON": ("a.json", '{"a": ' * 100_000, "nested too deeply"),
    "deep YAML": ("a.yaml", "a: " + "[" * 5_000, "nested too deeply"),
    "large": ("a.json", " " * 1_000_001, "more than a configuration has"),
    "a key twice in JSON": ("a.json", '{"fp16": {}, "fp16": {}}', "the key fp16 stands twice"),
    "a key twice in YAML": ("a.yaml", "num_machines: 1\nnum_machines: 2\n", "stands twice"),
    "a product that does not hold": (
        "a.json",
        '{"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}',
        "train_batch_size: 9 is not the product",
    ),
    "stage 5": ("a.json", '{"zero_optimization": {"stage": 5}}', "5 is not one of 0, 1, 2, 3"),
    "stage is a word": ("a.json", '{"zero_optimization": {"stage": "three"}}', "three is not one of 0, 1, 2, 3"),
    "a boolean for a section": ("a.json", '{"zero_optimization": true}', "old spelling"),
    "a number for a section": ("a.json", '{"zero_optimization": 3}', "not a mapping of keys"),
    "both of 16 bits": ("a.json", '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "both enabled"),
    "hpz at stage 2": ("a.json", '{"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}}', "for stage 3"),
    "clipping by a word": ("a.json", '{"gradient_clipping": "much"}', "gradient_clipping: much is not a number"),
    "a tape for a tier": (
        "a.json",
        '{"zero_optimization": {"offload_optimizer": {"device": "tape"}}}',
        "tape is not one of none, cpu, nvme",
    ),
    "no type": ("a.json", '{"optimizer": {"params": {}}, "train_batch_size": 1}', "has no type"),
    "Accelerate's 6": (
        "a.yaml",
        "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 6}",
        "6 is not one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, which are 1 to 5",
    ),
    "an unknown strategy": ("a.yaml", OF_FSDP + "{fsdp_sharding_strategy: SOME}", "SOME is not one of FULL_SHARD"),
    "a bare number": (
        "a.py",
        "Trainer(fsdp_config={'sharding_strategy': 3})",
        "different things to different libraries",
    ),
    "a bare number of Lightning": ("a.py", "FSDPStrategy(sharding_strategy=3)", "different things"),
    "true for FSDP1": (
        "a.yaml",
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 1, fsdp_reshard_after_forward: true}",
        "with fsdp_version 1 it is the name of a strategy",
    ),
    "both in YAML": (
        "a.yaml",
        "fsdp_config: {fsdp_version: 1}\ndeepspeed_config: {zero_stage: 1}",
        "two strategies in one file",
    ),
    "both in Python": ("a.py", "FSDPStrategy()\nDeepSpeedStrategy()", "two strategies in one file"),
    "two systems": ("a.yaml", "num_machines: 1\nmax_duration: 1ba", "those of Accelerate and Composer"),
    "a circle": ("a.yaml", OF_DEEPSPEED + "{deepspeed_config_file: a.yaml}", "back to the file itself"),
    "no linked file": ("a.yaml", OF_DEEPSPEED + "{deepspeed_config_file: b.json}", "b.json: no such file"),
    "nothing to link": ("a.yaml", "distributed_type: DEEPSPEED", "nothing in deepspeed_config"),
    "sizes that do not fit": (
        "a.yaml",
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n"
        "parallelism_config: {dp_replicate_size: 3, dp_shard_size: 2}",
        "make 6 ranks, and num_processes is 8",
    ),
    "no precision": ("a.py", "Trainer(strategy='ddp', precision='17')", "is not a precision"),
    "deep Python": ("a.py", f"x = {'-' * 100_000}1\nFSDPStrategy()", "nested too deeply"),
    "a word for a degree": ("a.yaml", "fsdp_config: {data_parallel_shard_degree: x}", "x is not a number"),
    "one beta": ("a.yaml", "max_duration: 1ba\noptimizer: {name: adamw, lr: 1, betas: 3}", "3 is not two numbers"),
    "no strategy": ("a.py", "Trainer(strategy='tpu_spawn')", "is not a strategy that is read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_read_is_one_line_and_status_two(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, text, says = WRONG[name]
    if text is not None:
        (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["translate", str(tmp_path / file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert len(captured.err) < 1000
    assert says in captured.err


def test_values_of_any_size_are_shown_in_few_words(tmp_path: Path):
    """Anchors of YAML make a value of a million lists out of a few lines."""
    lines = ["num_machines: 1", "a0: &a0 [1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9))]
    rows = rows_of(tmp_path / "a.yaml", "\n".join(lines))
    assert len(rows) == 10
    assert max(len(row.value) for row in rows.values()) < 200


def test_a_folder_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["translate", str(tmp_path)]) == 2
    assert "a folder" in capsys.readouterr().err


def test_names_that_the_examples_give_are_asked_for(tmp_path: Path):
    asked = {name for example in EXAMPLES for name in translate(written(example, tmp_path)).names}
    given = {"module", "mean", "total", "count", "optimizer", "rows", "batches", "folder"}
    assert asked - given <= set(NAMES)
