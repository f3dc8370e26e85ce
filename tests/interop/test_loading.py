"""Modules that are built without memory, loaded from files of their own libraries, and saved for them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfn as sf
from shardfn import P, checkpoint, interop
from shardfn.checkpoint import CheckpointError, huggingface
from shardfn.checkpoint.boxes import Box, flaw, whole
from shardfn.interop import loading, saving
from shardfn.interop.assembled import lazy
from shardfn.shards.layout import is_flat
from shardfn.testing import World
from tests.checkpoint.test_huggingface import peak
from tests.interop import zoo
from tests.interop.test_functional import data_mesh
from tests.models import STRATEGIES

safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

THEIRS = ["llama", "llama_tied", "gpt2", "bert", "bert_mlm", "albert", "t5", "vit", "mixtral", "clip"]
NAMES = list(zoo.ZOO)


def shell(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> nn.Module:
    with interop.meta():
        return zoo.build(name, **more).to(dtype)


def model_of(module: nn.Module, name: str = "") -> interop.Functional:
    return interop.functional(module, **{"small": 512, **(zoo.ZOO[name].options if name else {})})


def on_first(run: Callable[[], Any]) -> None:
    """What the first rank does, while others wait."""
    if dist.get_rank() == 0:
        run()
    dist.barrier()


def written(module: Any, folder: Path, most: str = "50GB") -> None:
    """By the module's own library."""
    if hasattr(module, "save_pretrained"):
        module.save_pretrained(folder, max_shard_size=most)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        values = {name: x.clone() for name, x in module.state_dict().items()}
        safetensors.save_file(values, folder / "model.safetensors")


def read_back(name: str, folder: Path, **more: Any) -> Any:
    """By the module's own library, which must find all that it wants and nothing else."""
    module: Any = zoo.build(name).eval()
    if not hasattr(module, "save_pretrained"):
        module.load_state_dict(safetensors.load_file(folder / "model.safetensors"))
        return module
    how = {"experts_implementation": "eager"} if name == "mixtral" else {}
    again, told = type(module).from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", **how, **more
    )
    assert not any(told.values()), told
    return again.eval()


def outputs(module: Any, name: str) -> list[Tensor]:
    dtype = next(module.parameters()).dtype
    batch = {k: x.to(dtype) if x.is_floating_point() else x for k, x in zoo.ZOO[name].batch().items()}
    found = module(**batch)
    return [found] if isinstance(found, Tensor) else [x for x in found.to_tuple() if isinstance(x, Tensor)]


def same(a: Any, b: Any) -> bool:
    a, b = (list(x.values()) if isinstance(x, dict) else list(x) for x in (a, b))
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def tensors_in(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors.load_file(file)
    return dict(sorted(found.items()))


# --- modules without values ---


class Shares(nn.Module):
    """One parameter under two names, before it is a module's."""

    def __init__(self) -> None:
        super().__init__()
        p: Any = nn.Parameter(torch.randn(4))
        p.mark = "kept"
        self.a, self.b, self.c = p, p, nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("square", torch.arange(4) ** 2)


def test_parameters_stay_one_and_keep_what_is_known_of_them() -> None:
    with interop.meta():
        module: Any = Shares()
        later = threading.Thread(target=lambda: others.append(nn.Linear(2, 2)))
        others: list[nn.Module] = []
        later.start()
        later.join()
    assert module.a is module.b
    assert module.a.mark == "kept"
    assert module.a.is_meta
    assert not module.c.requires_grad
    assert module.square.tolist() == [0, 1, 4, 9]
    assert not any(p.is_meta for p in others[0].parameters())
    assert not any(p.is_meta for p in nn.Linear(2, 2).parameters())


def test_parameters_take_no_memory() -> None:
    def build() -> None:
        with interop.meta():
            kept.append(nn.Sequential(nn.Linear(2**14, 2**14), nn.Embedding(2**20, 2**18), nn.Linear(2**20, 2**18)))
            kept.append(nn.ParameterDict({"zeros": nn.Parameter(torch.zeros(2**28))}))
            kept.append(nn.ParameterDict({"most": nn.Parameter(torch.empty(2**20, 2**19, dtype=torch.bfloat16))}))
            x = torch.zeros(2**22, dtype=torch.float64)  # large, and no parameter
            x[7] = 3
            found.append(x.sum())

    kept: list[nn.Module] = []
    found: list[Tensor] = []
    assert peak(build) < 2**22
    assert found == [3]
    assert all(p.is_meta for module in kept for p in module.parameters())


# --- there and back ---


def there_and_back(strategy: str, name: str, root: Path, theirs: str, ours: int) -> list[str]:
    """What is wrong."""
    mesh, checks = data_mesh(dist.get_world_size()), dict[str, bool]()
    module, source, folder, half = zoo.build(name).eval(), root / "theirs", root / "back", root / "half"
    on_first(lambda: written(module, source, theirs))
    built = shell(name).eval()
    checks["on meta"] = all(p.is_meta for p in built.parameters())
    checks["buffers"] = same(dict(built.named_buffers()), dict(module.named_buffers()))
    model = model_of(built, name)
    params = interop.load(source, model, mesh, STRATEGIES[strategy])
    whole = dict(module.named_parameters(remove_duplicate=False))
    found = model.state_dict(params)
    checks["values"] = found.keys() == whole.keys() and same(found, {k: whole[k] for k in found})
    interop.save_pretrained(folder, model, params, max_shard_bytes=ours)
    checks["files"] = same(tensors_in(folder), tensors_in(source))
    checks["names"] = tensors_in(folder).keys() == tensors_in(source).keys()
    checks["others"] = others_in(folder) == others_in(source)
    if name in THEIRS:
        interop.save_pretrained(half, model, params, dtype=torch.bfloat16)
        small = model_of(shell(name, torch.bfloat16), name)
        found = small.state_dict(interop.load(source, small, mesh, STRATEGIES[strategy]))
        checks["converted"] = same(found, {k: whole[k].bfloat16() for k in found})
    if dist.get_rank() == 0:
        checks["outputs"] = same(outputs(read_back(name, folder), name), outputs(module, name))
    if dist.get_rank() == 0 and name in THEIRS:
        wanted, again = read_back(name, source, dtype=torch.bfloat16), read_back(name, half)
        checks["half"] = {p.dtype for p in again.parameters()} == {torch.bfloat16}
        checks["half's outputs"] = same(outputs(again, name), outputs(wanted, name))
    dist.barrier()
    return [what for what, right in checks.items() if not right]


def others_in(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if not name.startswith("model")}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.world(2, "processes")
def test_files_of_every_model_are_loaded_and_written(world: World, tmp_path: Path, name: str) -> None:
    assert world.run(there_and_back, "full_shard", name, tmp_path, "50GB", 2**30) == [[]] * 2


@pytest.mark.parametrize("name", ["llama_tied", "t5", "vit", "mixtral", "clip", "joint"])
@pytest.mark.world(4, "processes")
def test_files_in_several_parts(world: World, tmp_path: Path, name: str) -> None:
    assert world.run(there_and_back, "hybrid_shard", name, tmp_path, "20KB", 15_000) == [[]] * 4
    assert len([*(tmp_path / "back").glob("*.safetensors")]) > (name != "joint")


# --- what only one rank has ---


class Normed(nn.Module):
    """With statistics, and a layer that is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net = zoo.Pictures()
        self.again = self.net.head

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found


def normed() -> Normed:
    torch.manual_seed(3)
    module = Normed().double()
    for name, b in module.named_buffers():
        b.copy_(torch.rand(b.shape) if b.is_floating_point() else torch.tensor(len(name)))
    return module.eval()


def made(name: str) -> nn.Module:
    return normed() if name == "normed" else zoo.build(name).eval()


def from_first(root: Path, strategy: str, sizes: dict[str, int]) -> list[str]:
    """What is wrong when only the first rank has anything."""
    mesh, first, wrong = sf.make_mesh(**sizes, device="cpu"), dist.get_rank() == 0, list[str]()
    for name in ("llama_tied", "vit", "mixtral", "normed") if strategy == "hybrid_shard" else ("mixtral", "normed"):
        module = made(name)
        on_first(lambda name=name, module=module: written(module, root / name))  # type: ignore[misc]
        whole: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        specs: Any = P()
        if "tensor" in sizes:
            rules = [
                (r".*(q_proj|k_proj|embed_tokens)\.weight", P("tensor")),
                (r".*(o_proj|down_proj)(\.weight)?", P(None, "tensor")),
                (r".*experts\.gate_up_proj", P(None, "tensor")),
            ]
            specs = sf.by_path(rules, strict=False)
        sources: dict[str, Any] = {
            "everybody's folder": root / name,
            "folder": root / name if first else "/nowhere",
            "module": module if first else None,
            "mapping": dict(module.state_dict()) if first else None,
            "itself": None,
        }
        for kind, source in sources.items():
            with contextlib.nullcontext() if kind == "itself" and first else interop.meta():
                model = model_of(made(name))
            if kind == "itself":
                source = model if first else None
            else:
                for x in (b for key, b in model.buffers.items() if key in model.module.state_dict()):
                    x.zero_()
            of = None if kind == "everybody's folder" else 0
            params = interop.load(source, model, mesh, STRATEGIES[strategy], source=of, specs=specs)
            found = model.state_dict(params)
            if not same(found, {k: whole[k] for k in found}):
                wrong.append(f"{name} from {kind}: values")
            buffers = dict(module.named_buffers(remove_duplicate=False))
            if not same({k: model.buffers[k] for k in buffers}, buffers):
                wrong.append(f"{name} from {kind}: buffers")
    return wrong


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        pytest.param("hybrid_shard", {"replica": 2, "shard": 2}, marks=pytest.mark.world(4, "processes")),
        pytest.param("full_shard", {"replica": 1, "shard": 2, "tensor": 2}, marks=pytest.mark.world(4, "processes")),
    ],
)
def test_one_rank_has_it_and_all_get_their_parts(
    world: World, tmp_path: Path, strategy: str, sizes: dict[str, int]
) -> None:
    assert world.run(from_first, tmp_path, strategy, sizes) == [[]] * world.size


# --- what is refused ---


def refused(run: Callable[[], Any], kind: type[Exception] = CheckpointError) -> str:
    try:
        run()
    except kind as error:
        return str(error)
    raise AssertionError("it was not refused")


def changed(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A copy of a folder with other tensors."""
    if dist.get_rank() == 0:
        shutil.copytree(folder, to)
        tensors = safetensors.load_file(to / "model.safetensors")
        change(tensors)
        safetensors.save_file(tensors, to / "model.safetensors", {"format": "pt"})
    dist.barrier()
    return to


HEAD, EXPERT, NORM = "lm_head.weight", "model.layers.1.block_sparse_moe.experts.2.w1.weight", "model.norm.weight"
CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda x: x.pop(NORM), "missing in the checkpoint: model.norm.weight"),
    "extra": (lambda x: x.update(odd=torch.ones(2)), "in the checkpoint, but not in the tree: odd; ignore= names"),
    "shape": (lambda x: x.update({NORM: torch.ones(7)}), "model.norm.weight is float32 [7] there, float64 [32] in"),
    "expert": (lambda x: x.pop(EXPERT), "model.layers.1.mlp.experts.gate_up_proj cannot be made of"),
    "kind": (lambda x: x.update({NORM: torch.ones(32, dtype=torch.int8)}), "model.norm.weight is int8 [32] there"),
    "scaled": (
        lambda x: x.update({NORM: torch.ones(32).to(torch.float8_e4m3fn)}),
        "model.norm.weight is float8_e4m3fn [32] there",
    ),
}


def refusals(root: Path, source: int | None) -> dict[str, str]:
    mesh, first, good = data_mesh(dist.get_world_size()), dist.get_rank() == 0, root / "good"
    module = zoo.build("mixtral")
    on_first(lambda: written(module, good, "20KB"))
    on_first(lambda: written(module, root / "one"))
    model, plan = model_of(shell("mixtral")), STRATEGIES["full_shard"]
    mine = source is None or first

    def load(folder: Any, model: Any = model, **more: Any) -> Any:
        return interop.load(folder if mine else "/nowhere", model, mesh, plan, source=source, **more)

    bad = {name: changed(root / "one", root / name, f) for name, (f, _) in CHANGES.items()}
    told = {name: refused(lambda path=path: load(path)) for name, path in bad.items()}  # type: ignore[misc]
    load(root / "extra", ignore="odd")
    file = sorted(good.glob("model-*.safetensors"))[1]
    dist.barrier()
    on_first(lambda: file.write_bytes(file.read_bytes()[:-9]))
    told["damaged"] = refused(lambda: load(good))
    on_first(file.unlink)
    told["gone"] = refused(lambda: load(good))
    told["nowhere"] = refused(lambda: load(root / "nothing"))
    told["nothing"] = refused(lambda: load(None))
    told["on the Hub"] = refused(lambda: interop.load("meta-llama/Llama-3-8B", model, mesh, plan, source=source))
    for name in ("another", "saved"):
        on_first((root / name).mkdir)
    on_first(lambda: (root / "another" / "weights.gguf").touch())
    told["another"] = refused(lambda: load(root / "another"))
    checkpoint.save(root / "saved" / "step", {"model": torch.ones(2)})
    told["a checkpoint"] = refused(lambda: load(root / "saved" / "step"))
    told["no shell"] = refused(lambda: load(good, zoo.build("llama")), TypeError)
    told["in another's place"] = refused(lambda: interop.load(good, model, plan, mesh), TypeError)  # type: ignore[arg-type]
    told["sources"] = refused(lambda: interop.load(root / "one", model, mesh, plan, source=dist.get_rank()), ValueError)
    with torch.device("meta"):
        bare = model_of(zoo.build("llama"))
    on_first(lambda: written(zoo.build("llama"), root / "buffers"))
    told["bare"] = refused(lambda: load(root / "buffers", bare))
    tied = model_of(shell("llama_tied"))
    on_first(lambda: written(zoo.build("llama"), root / "untied"))
    told["tied"] = refused(lambda: load(root / "untied", tied))
    built = model_of(zoo.build("mixtral"))
    built.tree[""][NORM].mul_(3)
    found = built.state_dict(load(root / "missing", built, strict=False))
    whole = {**dict(module.named_parameters()), NORM: built.tree[""][NORM]}
    assert same(found, {name: whole[name] for name in found})
    told["no value"] = refused(lambda: load(root / "missing", strict=False))
    told["source"] = refused(lambda: interop.load(good, model, mesh, plan, source=99), ValueError)
    if source is None:
        joint, values = model_of(shell("joint"), "joint"), zoo.build("joint").state_dict()
        values["scale"] = values["scale"] + dist.get_rank()
        told["modules differ"] = refused(lambda: load(values, joint))
        folder = root / str(dist.get_rank())
        folder.mkdir()
        safetensors.save_file(values, folder / "model.safetensors")
        told["files differ"] = refused(lambda: load(folder, joint))
    return told


@pytest.mark.parametrize("source", [None, 0])
@pytest.mark.world(2, "processes")
def test_what_cannot_be_loaded_is_an_error_on_every_rank(world: World, tmp_path: Path, source: int | None) -> None:
    for told in world.run(refusals, tmp_path, source):
        for name, (_, words) in CHANGES.items():
            assert words in told[name], told[name]
        assert re.search(r"model-00002-of-\d+.safetensors cannot be read", told["damaged"])
        assert re.search(r"model-00002-of-\d+.safetensors cannot be read: No such file", told["gone"])
        assert "not from None" in told["nothing"]
        assert "Llama-3-8B does not exist here: of a model on the Hub pass the folder" in told["on the Hub"]
        assert (
            "another holds weights.gguf, and none of model.safetensors, model.safetensors.index.json" in told["another"]
        )
        assert "step is a checkpoint: checkpoint.load(folder, params, part=...)" in told["a checkpoint"]
        assert "model is of type LlamaForCausalLM, not what interop.functional returns" in told["no shell"]
        assert "the mesh is of type Placement, not a DeviceMesh" in told["in another's place"]
        assert "ranks name different sources, [0, 1]: source= is the one rank" in told["sources"]
        assert "values for the buffers model.rotary_emb.inv_freq" in told["bare"]
        assert "build the module under interop.meta()" in told["bare"]
        assert "does not exist here" in told["nowhere"]
        assert "model.embed_tokens.weight and lm_head.weight are one parameter of the module" in told["tied"]
        assert "the module has no values for model.norm.weight either" in told["no value"]
        assert "source=99 is not a rank of the mesh" in told["source"]
        for name in ("modules differ", "files differ") if source is None else ():
            assert "what is read differs between ranks" in told[name]


def wrong_saves(folder: Path) -> dict[str, str]:
    mesh, plan = data_mesh(dist.get_world_size()), STRATEGIES["full_shard"]
    model = model_of(zoo.build("llama"))
    params = sf.shard(model.tree, mesh, plan)
    net = model_of(normed())
    statistics = sf.shard(net.tree, mesh, plan)
    interop.save_pretrained(folder, model, params)
    before = tensors_in(folder)
    told = {
        "buffers": refused(lambda: interop.save_pretrained(folder, net, statistics), ValueError),
        "others": refused(lambda: interop.save_pretrained(folder, model, statistics), ValueError),
        "paths": refused(lambda: interop.save_pretrained(folder / str(dist.get_rank()), model, params)),
        "dtype": refused(lambda: interop.save_pretrained(folder, model, params, dtype=torch.int8), TypeError),
        "swapped": refused(lambda: interop.save_pretrained(folder, params, model), TypeError),
        "tokenizer": refused(lambda: interop.save_pretrained(folder, model, params, tokenizer="gpt2"), TypeError),
    }
    for where, name in ((1, "_write"), (0, "_finish"), (0, "begin")):
        kept = getattr(saving, name)
        if dist.get_rank() == where:
            setattr(saving, name, full)
        try:
            told[name] = refused(lambda: interop.save_pretrained(folder, model, params))
        finally:
            setattr(saving, name, kept)
        assert same(tensors_in(folder), before)
    told["left"] = " ".join(sorted(os.listdir(folder)))
    return told


def full(*args: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.world(2, "processes")
def test_what_cannot_be_saved_is_an_error_on_every_rank(world: World, tmp_path: Path) -> None:
    for told in world.run(wrong_saves, tmp_path / "a"):
        assert "pass buffers=" in told["buffers"]
        assert "have the structure of `tree`" in told["others"]
        assert "ranks were given different paths" in told["paths"]
        assert "pass a floating-point dtype" in told["dtype"]
        assert "model is of type dict, not what interop.functional returns" in told["swapped"]
        assert "tokenizer='gpt2' has no save_pretrained" in told["tokenizer"]
        assert "rank 1: OSError: [Errno 28] No space left" in told["_write"]
        assert "rank 0: OSError: [Errno 28] No space left" in told["_finish"]
        assert "rank 0: OSError: [Errno 28] No space left" in told["begin"]
        assert told["left"] == "config.json generation_config.json model.safetensors"


# --- conversions ---

OPS: list[Callable[[Any, Any], Any]] = [
    lambda x, r: torch.stack([x, x], dim=r.randrange(-1, x.ndim + 1)),
    lambda x, r: torch.cat([x, x], dim=r.randrange(-1, x.ndim)),
    lambda x, r: r.choice(torch.chunk(x, r.randrange(1, 4), dim=r.randrange(-1, x.ndim))),
    lambda x, r: r.choice(torch.split(x, r.randrange(1, 4), dim=r.randrange(-1, x.ndim))),
    lambda x, r: torch.transpose(x, r.randrange(x.ndim), -1),
    lambda x, r: x.transpose(0, r.randrange(x.ndim)).contiguous(),
    lambda x, r: x.squeeze(r.randrange(x.ndim)) if x.ndim > 1 else x,
    lambda x, r: torch.narrow(x, 0, r.randrange(x.shape[0]), 1),
    lambda x, r: torch.flip(x, dims=[r.randrange(x.ndim)]),  # which has to be computed
]


@pytest.mark.parametrize("seed", range(100))
def test_what_is_moved_without_being_joined_is_where_torch_puts_it(seed: int) -> None:
    r, x = random.Random(seed), torch.arange(24).view(2, 3, 4)
    ours: Any = lazy(x, "x")
    for _ in range(r.randrange(1, 6)):
        op, same_draws = r.choice(OPS), r.getstate()
        ours = op(ours, r)
        r.setstate(same_draws)
        x = op(x, r)
    assert tuple(ours.shape) == tuple(x.shape)
    if isinstance(ours, Tensor):
        assert torch.equal(ours, x)
        return
    assert torch.equal(ours.joined(), x)
    assert flaw(ours.shape, [part.box for part in ours.parts]) == ""
    low = [r.randrange(n) for n in x.shape]
    box = Box(tuple(low), tuple(r.randrange(1, n - a + 1) for a, n in zip(low, x.shape, strict=True)))
    found = torch.zeros(box.sizes, dtype=torch.float64)
    ours.fill(box, found)
    assert torch.equal(found, x[box.within(whole(x.shape))].double())


@contextlib.contextmanager
def rules(*conversions: Any) -> Iterator[None]:
    """Llamas have other files while the block runs."""
    from transformers import conversion_mapping

    mapping: Any = conversion_mapping
    mapping.register_checkpoint_conversion_mapping("LlamaForCausalLM", list(conversions), overwrite=True)
    try:
        yield
    finally:
        mapping._checkpoint_conversion_mapping_cache.pop("LlamaForCausalLM")


def converted(root: Path) -> dict[str, Any]:
    from transformers.core_model_loading import Interleave, Split, Transpose, WeightConverter, WeightRenaming

    mesh, plan = data_mesh(dist.get_world_size()), STRATEGIES["full_shard"]
    found: dict[str, Any] = {}
    three = [f"self_attn.{x}_proj.weight" for x in "qkv"]
    made: dict[str, list[Any]] = {
        "split": [
            WeightRenaming("blocks", "layers"),
            WeightConverter("self_attn.qkv.weight", three, [Split(dim=0)]),
            WeightConverter("mlp.wide.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Split(dim=0)]),
            WeightConverter("mlp.turned.weight", "mlp.down_proj.weight", [Transpose(0, 1)]),
        ],
        "computed": [WeightConverter("mlp.mixed.weight", "mlp.up_proj.weight", [Interleave(dim=0)])],
        "same name": [WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [Interleave(dim=0)])],
    }
    for name, conversions in made.items():
        with rules(*conversions):
            module, folder = zoo.build("llama"), root / name
            on_first(lambda module=module, folder=folder: written(module, folder))  # type: ignore[misc]
            model = model_of(shell("llama"))
            params = interop.load(folder, model, mesh, plan)
            whole, values = dict(module.named_parameters()), model.state_dict(params)
            assert same(values, {k: whole[k] for k in values}), name
            again = root / f"{name}-back"
            if name == "same name":
                found[name] = refused(functools.partial(interop.save_pretrained, again, model, params))
                continue
            interop.save_pretrained(again, model, params)
            found[name] = tensors_in(again).keys() == tensors_in(folder).keys()
            assert found[name] == same(tensors_in(again), tensors_in(folder))
            if dist.get_rank() == 0:
                assert same(outputs(read_back("llama", again), "llama"), outputs(module.eval(), "llama"))
            dist.barrier()
    return found


@pytest.mark.world(2, "processes")
def test_conversions_of_every_kind(world: World, tmp_path: Path) -> None:
    for found in world.run(converted, tmp_path):
        assert found["split"]
        assert not found["computed"]  # the module's own names, which its library reads, too
        assert "is computed of parameters" in found["same name"]


def pickled(root: Path) -> list[bool | str]:
    mesh, found = data_mesh(dist.get_world_size()), list[bool | str]()
    module = zoo.build("llama_tied")
    state = module.state_dict()
    half = len(state) // 2

    def write() -> None:
        for name in ("whole", "parts"):
            (root / name).mkdir()
        torch.save(state, root / "whole" / "pytorch_model.bin")
        torch.save({"state_dict": state, "epoch": 3}, root / "run.ckpt")
        where: dict[str, str] = {}
        for file, some in (("a.bin", [*state][:half]), ("b.bin", [*state][half:])):
            torch.save({name: state[name] for name in some}, root / "parts" / file)
            where |= dict.fromkeys(some, file)
        (root / "parts" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))

    on_first(write)
    for path in ("whole", "parts", "run.ckpt", "whole/pytorch_model.bin"):
        model = model_of(shell("llama_tied"))
        values = model.state_dict(interop.load(root / path, model, mesh, STRATEGIES["full_shard"]))
        found.append(same(values, {name: state[name] for name in values}))
    on_first(lambda: torch.save({"model": state, "epoch": 3}, root / "parts.ckpt"))
    on_first(lambda: torch.save(nn.Linear(2, 2), root / "module.pt"))
    on_first(lambda: (root / "run.ckpt").write_bytes(b"PK and not much more"))
    model = model_of(shell("llama_tied"))
    for file, words in (
        ("parts.ckpt", "holds model, epoch: pass the part that is the state dict"),
        ("module.pt", "it holds a torch.nn.modules.linear.Linear, and only tensors"),
        ("run.ckpt", "run.ckpt cannot be read"),
    ):
        told = refused(lambda file=file: interop.load(root / file, model, mesh, STRATEGIES["full_shard"]))  # type: ignore[misc]
        found.append(words in told or told)
    return found


@pytest.mark.world(2, "processes")
def test_files_of_torch_save(world: World, tmp_path: Path) -> None:
    for found in world.run(pickled, tmp_path):
        assert found == [True] * 7


class Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "words").mkdir()
        (Path(folder) / "words" / "list.txt").write_text("a b")


@pytest.mark.world(2, "processes")
def test_a_tokenizer_and_trained_buffers_are_saved(world: World, tmp_path: Path) -> None:
    def save() -> bool:
        mesh, module = data_mesh(dist.get_world_size()), normed().train()
        model = model_of(module)
        params = sf.shard(model.tree, mesh, STRATEGIES["full_shard"])
        _, buffers = model(params, torch.ones(4, 3, 6, 6, dtype=torch.float64), buffers=model.buffers)
        interop.save_pretrained(tmp_path, model, params, buffers=buffers, tokenizer=Tokenizer())
        again = normed()
        again.load_state_dict(tensors_in(tmp_path))
        found = dict(again.named_buffers(remove_duplicate=False))
        return same(found, {name: buffers[name] for name in found}) and not same(found, model.buffers)

    assert all(world.run(save))
    assert (tmp_path / "words" / "list.txt").read_text() == "a b"


# --- memory ---

WIDE = 1536


def experts(n: int = WIDE) -> Any:
    """Whose stages are mostly experts, which are many tensors in files."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=8, hidden_size=n // 4, intermediate_size=n, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def peaks(root: Path) -> dict[str, float]:
    """Memory above the shards, of loading and saving, in the largest stage."""
    mesh, first, found = data_mesh(dist.get_world_size()), dist.get_rank() == 0, {}
    for module in (huggingface, saving, loading):
        module.STEP = 2**20  # type: ignore[attr-defined]
    for n in (64, WIDE):  # the first makes what is made once
        folder, plan = root / str(n), STRATEGIES["full_shard"]
        on_first(lambda folder=folder, n=n: written(experts(n), folder))  # type: ignore[misc]
        for kind in ("folder", "folder of one", "module of one"):
            source = folder if kind != "module of one" else experts(n) if first else None
            of = None if kind == "folder" else 0
            with interop.meta():
                model = model_of(experts(n))
            kept: list[Any] = []
            over = peak(lambda: kept.append(interop.load(source, model, mesh, plan, source=of)))  # noqa: B023
            flats = optree.tree_leaves(kept[0], is_leaf=is_flat)
            stage = 2 * max(flat.values.nbytes for flat in flats)
            found[kind] = (over - sum(flat.values.nbytes for flat in flats)) / stage
        found["saved"] = peak(functools.partial(interop.save_pretrained, root / "out", model, kept[0])) / stage
    return found


def test_no_rank_needs_more_than_a_stage_above_its_shards(tmp_path: Path) -> None:
    with World(2) as world:  # whose processes keep their malloc for themselves
        for found in world.run(peaks, tmp_path):
            assert found["folder"] < 0.1
            assert found["folder of one"] < 0.2
            assert found["module of one"] < 0.2
            assert 0.25 < found["saved"] < 1.2
