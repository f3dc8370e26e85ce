"""Modules that are built without memory, loaded from files of their own libraries, and saved for them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfn as sf
from shardfn import P, checkpoint, interop
from shardfn.checkpoint import huggingface
from shardfn.interop import loading, saving
from shardfn.interop.lazy_tensors import lazy
from shardfn.shards.boxes import Box, flaw, full_box
from shardfn.shards.layout import is_flat
from shardfn.testing import World
from tests.interop import zoo
from tests.interop.modules import data_mesh, on_first
from tests.models import STRATEGIES
from tests.refusals import refused
from tests.resident import grown

safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

THEIRS = ["llama", "llama_tied", "gpt2", "bert", "bert_mlm", "albert", "t5", "vit", "mixtral", "clip"]
NAMES = list(zoo.ZOO)


def shell(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> nn.Module:
    with interop.meta():
        return zoo.build(name, **more).to(dtype)


def model_of(module: nn.Module, name: str = "") -> interop.Functional:
    return interop.functional(module, **{"min_stage_params": 512, **(zoo.ZOO[name].options if name else {})})


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
    assert grown(build)[0] < 4
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
            params = interop.load(source, model, mesh, STRATEGIES[strategy], src_rank=of, specs=specs)
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


class SharesBuffer(nn.Module):
    """One buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        shared = torch.arange(4.0)
        self.register_buffer("a", shared)
        self.register_buffer("b", shared)


def refusals(root: Path, source: int | None) -> dict[str, str]:
    mesh, first, good = data_mesh(dist.get_world_size()), dist.get_rank() == 0, root / "good"
    module = zoo.build("mixtral")
    on_first(lambda: written(module, good, "20KB"))
    on_first(lambda: written(module, root / "one"))
    model, plan = model_of(shell("mixtral")), STRATEGIES["full_shard"]
    mine = source is None or first

    def load(folder: Any, model: Any = model, **more: Any) -> Any:
        return interop.load(folder if mine else "/nowhere", model, mesh, plan, src_rank=source, **more)

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
    told["on the Hub"] = refused(lambda: interop.load("meta-llama/Llama-3-8B", model, mesh, plan, src_rank=source))
    for name in ("another", "saved"):
        on_first((root / name).mkdir)
    on_first(lambda: (root / "another" / "weights.gguf").touch())
    told["another"] = refused(lambda: load(root / "another"))
    checkpoint.save(root / "saved" / "step", {"model": torch.ones(2)})
    told["a checkpoint"] = refused(lambda: load(root / "saved" / "step"))
    told["no shell"] = refused(lambda: load(good, zoo.build("llama")), TypeError)
    told["in another's place"] = refused(lambda: interop.load(good, model, plan, mesh), TypeError)  # type: ignore[arg-type]
    told["sources"] = refused(
        lambda: interop.load(root / "one", model, mesh, plan, src_rank=dist.get_rank()), ValueError
    )
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
    told["source"] = refused(lambda: interop.load(good, model, mesh, plan, src_rank=99), ValueError)
    told["sources"] = refused(
        lambda: interop.load(good, model, mesh, plan, src_rank=[None, 0][dist.get_rank()]), ValueError
    )
    told["a module"] = refused(lambda: load(good, zoo.build("llama")), TypeError)
    named = {f"model.{name}": x for name, x in zoo.build("joint").state_dict().items()}
    told["prefix"] = refused(lambda: load(named, model_of(shell("joint"), "joint")))
    twice: Any = model_of(SharesBuffer())
    values = {name: x.clone() for name, x in SharesBuffer().state_dict().items()}
    del values["b"]
    load(values, twice)
    told["buffers"] = refused(lambda: load({**values, "b": values["a"] + 1}, twice))
    if source is None:
        joint, values = model_of(shell("joint"), "joint"), zoo.build("joint").state_dict()
        values["head.weight"] = values["head.weight"].clone()
        values["head.weight"][7, 7] += dist.get_rank()
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
        assert "values for the buffers model.rotary_emb.inv_freq" in told["bare"]
        assert "build the module under interop.meta()" in told["bare"]
        assert "does not exist here" in told["nowhere"]
        assert "model.embed_tokens.weight and lm_head.weight are one parameter of the module" in told["tied"]
        assert "the module has no values for model.norm.weight either" in told["missing"]
        assert "src_rank=99 is not a rank of the mesh" in told["source"]
        assert "the sources differ between ranks: rank 0 has src_rank=" in told["sources"]
        assert "src_rank= is the one rank that has the files" in told["sources"]
        assert "model is of type LlamaForCausalLM, not what interop.functional returns" in told["a module"]
        assert "All begin with 'model.' there: load a mapping of names without it" in told["prefix"]
        assert "a and b are one buffer of the module, but have different values" in told["buffers"]
        for name in ("modules differ", "files differ") if source is None else ():
            assert "the files differ between ranks" in told[name]


class Keeps(nn.Module):
    """With a state that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(3, 3)

    def get_extra_state(self) -> Tensor:
        return torch.ones(2)

    def set_extra_state(self, state: Any) -> None:
        pass


def wrong_saves(folder: Path) -> dict[str, str]:
    mesh, plan = data_mesh(dist.get_world_size()), STRATEGIES["full_shard"]
    model = model_of(zoo.build("llama"))
    params = sf.shard(model.tree, mesh, plan)
    net = model_of(normed())
    statistics = sf.shard(net.tree, mesh, plan)
    interop.save_pretrained(folder, model, params)
    before, config = tensors_in(folder), (folder / "config.json").read_text()
    module: Any = model.module
    module.config.rms_norm_eps = 0.5  # the configuration is another, and away for a moment
    some, keeps = dict(list(net.buffers.items())[:1]), model_of(Keeps())
    save = functools.partial(interop.save_pretrained, folder, model, params)
    told = {
        "buffers": refused(lambda: interop.save_pretrained(folder, net, statistics), ValueError),
        "some buffers": refused(lambda: interop.save_pretrained(folder, net, statistics, buffers=some), ValueError),
        "no buffer": refused(lambda: save(buffers={"odd": torch.ones(2)}), ValueError),
        "wide buffer": refused(
            lambda: interop.save_pretrained(folder, net, statistics, buffers={**net.buffers, **wider(some)}), ValueError
        ),
        "module": refused(lambda: interop.save_pretrained(folder, net.module, statistics), TypeError),  # type: ignore[arg-type]
        "more": refused(lambda: interop.save_pretrained(folder, keeps, sf.shard(keeps.tree, mesh, plan))),
        "bytes": refused(lambda: save(max_shard_bytes="5GB"), TypeError),  # type: ignore[arg-type]
        "no bytes": refused(lambda: save(max_shard_bytes=0), ValueError),
        "tokenizer": refused(lambda: save(tokenizer="gpt2"), TypeError),
        "tokenizer's tensors": refused(lambda: save(tokenizer=zoo.build("bert"))),
        "one rank's": refused(lambda: save(max_shard_bytes=dist.get_rank()), Exception),
        "others": refused(lambda: interop.save_pretrained(folder, model, statistics), ValueError),
        "paths": refused(lambda: interop.save_pretrained(folder / str(dist.get_rank()), model, params)),
        "dtype": refused(lambda: interop.save_pretrained(folder, model, params, dtype=torch.int8), TypeError),
        "swapped": refused(lambda: interop.save_pretrained(folder, params, model), TypeError),
    }
    for where, name in ((1, "_file_portions"), (0, "_finish"), (0, "begin"), (0, "publish")):
        kept = getattr(saving, name)
        if dist.get_rank() == where:
            setattr(saving, name, full)
        try:
            told[name] = refused(lambda: interop.save_pretrained(folder, model, params))
        finally:
            setattr(saving, name, kept)
        assert same(tensors_in(folder), before)
        assert (folder / "config.json").read_text() == config
    dist.barrier()  # the first rank tidies up after the others have learned of it
    told["left"] = " ".join(sorted(os.listdir(folder)))
    return told


def wider(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.cat([b.view(-1), b.view(-1)]) for name, b in buffers.items()}


def full(*args: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.world(2, "processes")
def test_what_cannot_be_saved_is_an_error_on_every_rank(world: World, tmp_path: Path) -> None:
    for told in world.run(wrong_saves, tmp_path / "a"):
        assert "pass buffers=" in told["buffers"]
        assert "pass buffers=" in told["some buffers"]
        assert "the buffer odd, passed with shape [2], is not one of this model" in told["no buffer"]
        assert "passed with shape [16], is of shape [8]" in told["wide buffer"]
        assert "model is of type Normed, not what interop.functional returns" in told["module"]
        assert "Keeps keeps more than parameters and buffers in its state_dict, _extra_state" in told["more"]
        assert "max_shard_bytes='5GB'; pass a whole number of bytes" in told["bytes"]
        assert "max_shard_bytes=0; pass at least 1 byte" in told["no bytes"]
        assert "tokenizer='gpt2' has no save_pretrained(folder)" in told["tokenizer"]
        assert "wrote model.safetensors, which is a file of the model's tensors" in told["tokenizer's tensors"]
        assert "max_shard_bytes=0; pass at least 1 byte" in told["one rank's"]
        assert "have the structure of `tree`" in told["others"]
        assert "ranks were given different paths" in told["paths"]
        assert "pass a floating-point dtype" in told["dtype"]
        assert "model is of type dict, not what interop.functional returns" in told["swapped"]
        assert "rank 1: OSError: [Errno 28] No space left" in told["_file_portions"]
        assert "rank 0: OSError: [Errno 28] No space left" in told["_finish"]
        assert "rank 0: OSError: [Errno 28] No space left" in told["begin"]
        assert told["left"] == "config.json generation_config.json model.safetensors"


# --- one model in place of another ---


class Watched:
    """What is in a folder before each change of a name in it, and after the last."""

    def __init__(self, see: Callable[[], Any]) -> None:
        self.seen, self._see, self._patches = list[Any](), see, contextlib.ExitStack()

    def __enter__(self) -> list[Any]:
        for name in ("rename", "replace", "unlink"):
            self._patches.enter_context(mock.patch.object(os, name, self._before(getattr(os, name))))
        return self.seen

    def __exit__(self, *_: Any) -> None:
        self._patches.close()
        self.seen.append(self._see())

    def _before(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def seen_and_run(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(self._see())
            return run(*args, **kwargs)

        return seen_and_run


def readable(folder: Path) -> tuple[float, ...] | None:
    """The numbers of the model that `from_pretrained` finds: one of its configuration, and its tensors'."""
    if not (folder / "config.json").exists():
        return None
    files = {"model.safetensors"}
    if not (folder / "model.safetensors").exists():
        if not (folder / "model.safetensors.index.json").exists():
            return None
        files = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
    if not all((folder / file).exists() for file in files):
        return None
    eps = json.loads((folder / "config.json").read_text())["rms_norm_eps"]
    numbers = torch.cat([x.view(-1) for file in files for x in safetensors.load_file(folder / file).values()])
    return (eps, *sorted({numbers.min().item(), numbers.max().item()}))


def in_place_of_another(root: Path) -> dict[str, list[tuple[float, ...] | None]]:
    mesh, found = data_mesh(1), {}
    models: Any = [model_of(zoo.build("llama")) for _ in range(2)]
    trees = [{key: {n: torch.full_like(x, i) for n, x in own.items()} for key, own in models[i].tree.items()}
             for i in range(2)]  # fmt: skip
    params = [sf.shard(tree, mesh, STRATEGIES["full_shard"]) for tree in trees]
    for old, new, eps in itertools.product((2**30, 15_000), (2**30, 15_000), (0.25, 0.5)):
        folder = root / f"{old} {new} {eps}"
        for i, (most, number) in enumerate([(old, 0.25), (new, eps)]):
            models[i].module.config.rms_norm_eps = number
            with Watched(functools.partial(readable, folder)) as seen:
                interop.save_pretrained(folder, models[i], params[i], max_shard_bytes=most, tokenizer=Tokenizer())
        found[folder.name] = seen
        shutil.rmtree(folder / "words")
        assert set(os.listdir(folder)) == {
            "config.json", "generation_config.json", *(name for name in os.listdir(folder) if name.startswith("model")),
        }  # fmt: skip
    return found


@pytest.mark.world(1, "processes")
def test_whenever_a_process_dies_there_is_one_model_or_none(world: World, tmp_path: Path) -> None:
    for name, seen in world.run(in_place_of_another, tmp_path)[0].items():
        old, new, eps = map(float, name.split())
        assert seen[0] == (0.25, 0.0)
        assert seen[-1] == (eps, 1.0)
        assert set(seen) <= {(0.25, 0.0), (eps, 1.0), None}, name
        if old == new == 2**30 and eps == 0.25:
            assert None not in seen


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
    assert torch.equal(found, x[box.slices_in(full_box(x.shape))].double())


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
    content = (root / "run.ckpt").read_bytes()
    dist.barrier()  # all have read it before the first writes
    at = content.index(state["lm_head.weight"].numpy().tobytes())
    flipped = content[: at + 3] + bytes([content[at + 3] ^ 4]) + content[at + 4 :]
    for damaged, why in ((b"PK and not much more", "is not a torch.save file"), (flipped, "is damaged")):
        on_first(functools.partial((root / "run.ckpt").write_bytes, damaged))
        model = model_of(shell("llama_tied"))
        told = refused(functools.partial(interop.load, root / "run.ckpt", model, mesh, STRATEGIES["full_shard"]))
        found.append(f"run.ckpt {why}" in told or told)
    on_first(lambda: torch.save({"model": state, "epoch": 3}, root / "parts.ckpt"))
    on_first(lambda: torch.save(nn.Linear(2, 2), root / "module.pt"))
    for file, words in (
        ("parts.ckpt", "not in the tree: epoch; ignore= names, by patterns, what is there and is not wanted"),
        ("module.pt", "Save a module's state_dict() instead of the module"),
    ):
        model = model_of(shell("llama_tied"))
        told = refused(functools.partial(interop.load, root / file, model, mesh, STRATEGIES["full_shard"]))
        found.append(words in told or told)
    return found


@pytest.mark.world(2, "processes")
def test_files_of_torch_save(world: World, tmp_path: Path) -> None:
    for found in world.run(pickled, tmp_path):
        assert found == [True] * 8


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


def of_diffusers(root: Path) -> list[bool]:
    """Folders with the file names of diffusers: one file, and several with an index."""
    mesh, found = data_mesh(dist.get_world_size()), []
    state = {name: x.clone() for name, x in normed().state_dict().items()}

    def write() -> None:
        for folder in ("one", "several"):
            (root / folder).mkdir()
        safetensors.save_file(state, root / "one" / "diffusion_pytorch_model.safetensors")
        index: dict[str, str] = {}
        for number, name in enumerate(state):
            file = f"diffusion_pytorch_model-{number + 1:05}-of-{len(state):05}.safetensors"
            safetensors.save_file({name: state[name]}, root / "several" / file)
            index[name] = file
        (root / "several" / "diffusion_pytorch_model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": index})
        )

    on_first(write)
    for folder in ("one", "several"):
        model = model_of(normed())
        loaded = model.state_dict(interop.load(root / folder, model, mesh, STRATEGIES["full_shard"]))
        found.append(all(x.equal(state[name]) for name, x in loaded.items()))
    return found


@pytest.mark.world(2, "processes")
def test_folders_of_diffusers_are_loaded(world: World, tmp_path: Path) -> None:
    assert world.run(of_diffusers, tmp_path) == [[True, True]] * 2


def larger_vocabulary(root: Path) -> dict[str, Any]:
    """Rows of a vocabulary that grew: those of the files, and those after them."""
    mesh, plan, rank = data_mesh(dist.get_world_size()), STRATEGIES["full_shard"], dist.get_rank()
    found: dict[str, Any] = {}
    module: Any = zoo.build("llama")
    names, rows = ("model.embed_tokens.weight", "lm_head.weight"), zoo.VOCABULARY
    on_first(lambda: zoo.build("llama").save_pretrained(root / "base"))  # type: ignore[operator]

    def grown(real: bool) -> Any:
        with contextlib.nullcontext() if real else interop.meta():
            larger: Any = zoo.build("llama")
            larger.resize_token_embeddings(rows + 3, mean_resizing=False)
        return larger

    for case, folder, source in (("all", root / "base", None), ("one", root / "base" if rank == 0 else None, 0)):
        for real in (False, True):
            torch.manual_seed(1)
            larger = grown(real)
            after = {name: larger.get_parameter(name).detach().clone()[rows:] for name in names} if real else {}
            model = model_of(larger)
            loaded = model.state_dict(interop.load(folder, model, mesh, plan, src_rank=source, strict=False))
            base = module.state_dict()
            first = all(loaded[name][:rows].equal(base[name]) for name in names)
            kept = all(loaded[name][rows:].equal(x) for name, x in after.items())
            found[f"{case}, {real}"] = first and kept and all(bool(loaded[name][rows:].any()) for name in names)
            others = [name for name in base if name not in names]
            found[f"{case}, {real}, others"] = all(loaded[name].equal(base[name]) for name in others)
    found["strict"] = refused(lambda: interop.load(root / "base", model_of(grown(False)), mesh, plan))
    with interop.meta():
        wide = zoo.made("Llama", "ForCausalLM", **{**zoo._TEXT, "intermediate_size": 80})
    found["wide"] = refused(lambda: interop.load(root / "base", model_of(wide), mesh, plan, strict=False))
    return found


@pytest.mark.world(2, "processes")
def test_a_vocabulary_that_grew_keeps_the_rows_of_its_files(world: World, tmp_path: Path) -> None:
    for found in world.with_deadline(100).run(larger_vocabulary, tmp_path):
        assert "of another shape" in found.pop("strict")
        assert "of another shape" in found.pop("wide")
        assert [case for case, right in found.items() if not right] == []


def settings_for_text(root: Path) -> dict[str, Any]:
    """How models generate after `load`, and in the files that `save_pretrained` writes then."""
    import transformers

    mesh, plan, found, rank = data_mesh(dist.get_world_size()), STRATEGIES["full_shard"], {}, dist.get_rank()
    own = root / "base" if rank == 0 else None  # files that one rank has

    def base() -> None:
        model: Any = zoo.build("llama")
        model.generation_config = transformers.GenerationConfig(eos_token_id=[2, 5], do_sample=True, temperature=0.6)
        model.save_pretrained(root / "base")
        model.save_pretrained(root / "older")
        (root / "older" / "generation_config.json").unlink()
        config = json.loads((root / "older" / "config.json").read_text())
        (root / "older" / "config.json").write_text(json.dumps({**config, "num_beams": 4}))

    on_first(base)
    for name, folder, source, changed in (
        ("folder", root / "base", None, {}),
        ("file", root / "base" / "model.safetensors", None, {}),
        ("one rank", own, 0, {}),
        ("changed before", own, 0, {"pad_token_id": 3}),
        ("in the configuration", root / "older", None, {}),
    ):
        with interop.meta():
            module = zoo.build("llama")
        for key, value in changed.items():
            setattr(module.generation_config, key, value)
        model = model_of(module)
        params = interop.load(folder, model, mesh, plan, src_rank=source)
        interop.save_pretrained(root / "out", model, params)
        written = json.loads((root / "out" / "generation_config.json").read_text())
        settings = ("eos_token_id", "do_sample", "temperature", "pad_token_id", "num_beams")
        found[name] = tuple(written.get(key) for key in settings)
        here = tuple(getattr(module.generation_config, key) for key in settings)
        assert here == found[name], name
        dist.barrier()
    return found


@pytest.mark.world(2, "processes")
def test_settings_for_generating_text_go_from_files_to_files(world: World, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    given = ([2, 5], True, 0.6, None, None)
    for found in world.run(settings_for_text, tmp_path):
        assert found.pop("in the configuration")[-1] == 4
        assert found.pop("changed before") == (*given[:3], 3, None)
        assert all(value == given for value in found.values())


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
            over = 2**20 * grown(lambda: kept.append(interop.load(source, model, mesh, plan, src_rank=of)))[0]  # noqa: B023
            flats = optree.tree_leaves(kept[0], is_leaf=is_flat)
            stage = 2 * max(flat.values.nbytes for flat in flats)
            found[kind] = (over - sum(flat.values.nbytes for flat in flats)) / stage
        saved = grown(functools.partial(interop.save_pretrained, root / "out", model, kept[0]))[0]
        found["saved"] = 2**20 * saved / stage
    return found


def test_no_rank_needs_more_than_a_stage_above_its_shards(tmp_path: Path) -> None:
    with World(2) as world:  # whose processes keep their malloc for themselves
        for found in world.run(peaks, tmp_path):
            assert found["folder"] < 0.1
            assert found["folder of one"] < 0.2
            assert found["module of one"] < 0.2
            assert 0.25 < found["saved"] < 1.2
