"""Files of others are read as checkpoints are: by names and parts, each rank what it keeps, or an error on all."""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver

import shardfn as sf
import shardfn.optim as so
from shardfn import P, checkpoint
from shardfn.checkpoint import safetensors
from shardfn.checkpoint.contents import contents
from shardfn.checkpoint.files import FileReader
from shardfn.checkpoint.team import CheckpointError
from shardfn.testing import World
from shardfn.testing.strategies import dtypes, shapes, tensor_of
from tests.models import mesh_of, same, zeros
from tests.refusals import refused, told
from tests.resident import grown

library = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

RULES: list[Any] = [
    (r"layers\.(\d+)\.w", r"model.h.\1.proj.weight", "T"),
    (r"layers\.(\d+)\.b", r"model.h.\1.proj.bias"),
]
MESHES: list[tuple[dict[str, int], Any]] = [
    ({"shard": 4}, lambda: sf.full_shard("shard")),
    ({"replica": 2, "shard": 2}, lambda: sf.hybrid_shard(shard="shard", replica="replica")),
    ({"shard": 2, "tensor": 2}, lambda: sf.full_shard("shard")),
]


def ours(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)

    def layer() -> dict[str, Tensor]:
        return {"w": torch.randn(6, 8, generator=g), "b": torch.randn(8, generator=g).bfloat16()}

    return {
        "": {"norm": torch.randn(5, generator=g), "scale": torch.randn((), generator=g), "none": torch.empty(0, 3)},
        "layers": [layer() for _ in range(3)],
        "ids": torch.randint(9, (7,), generator=g),
    }


def theirs(tree: Any) -> dict[str, Tensor]:
    """The same under others' names, some of it as views into storages of more."""
    named = {
        "norm": torch.cat([torch.zeros(3), tree[""]["norm"], torch.zeros(3)])[3:8],
        "scale": tree[""]["scale"],
        "none": tree[""]["none"],
        "ids": torch.stack([tree["ids"], tree["ids"]], 1)[:, 1],
    }
    for i, layer in enumerate(tree["layers"]):
        named[f"model.h.{i}.proj.weight"] = layer["w"].mT if i else layer["w"].mT.contiguous()
        named[f"model.h.{i}.proj.bias"] = layer["b"]
    return named


def placed(kind: int, tree: Any) -> Any:
    sizes, strategy = MESHES[kind]
    specs = sf.by_path([(r"layers\..*\.w", P(None, "tensor"))], strict=False) if "tensor" in sizes else P()
    return sf.shard(tree, mesh_of(**sizes), strategy(), specs=specs)


def write_all(folder: Path) -> dict[str, dict[str, Any]]:
    """The same parameters in files of all kinds: path -> what else `load` is told."""
    flat = theirs(ours())
    dense = {name: x.clone(memory_format=torch.contiguous_format) for name, x in flat.items()}
    half = len(flat) // 2
    first, second = dict(list(dense.items())[:half]), dict(list(dense.items())[half:])

    def index(name: str, files: list[str]) -> None:
        where = dict.fromkeys(first, files[0]) | dict.fromkeys(second, files[1])
        (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": where}))

    torch.save(flat, folder / "plain.pt")
    torch.save(OrderedDict(state_dict=OrderedDict(flat), epoch=3, optimizer={"lr": [1e-3]}), folder / "last.ckpt")
    torch.save(
        {
            "trainer": {
                "model": {f"module.{k}": nn.Parameter(x) if x.is_floating_point() else x for k, x in flat.items()}
            },
            "betas": (0.9, 0.99),
        },
        folder / "deep.bin",
    )
    library.save_file(dense, folder / "one.safetensors")
    for name in ("hf", "sharded", "bin", "bins"):
        (folder / name).mkdir()
    library.save_file(dense, folder / "hf/model.safetensors")
    torch.save(dense, folder / "bin/pytorch_model.bin")
    library.save_file(first, folder / "sharded/model-00001-of-00002.safetensors")
    library.save_file(second, folder / "sharded/model-00002-of-00002.safetensors")
    index(
        "sharded/model.safetensors.index.json", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    )
    torch.save(first, folder / "bins/pytorch_model-00001-of-00002.bin")
    torch.save(second, folder / "bins/pytorch_model-00002-of-00002.bin")
    index("bins/pytorch_model.bin.index.json", ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"])
    state_dict_saver.save({"app": {"model": dense}, "step": 4}, checkpoint_id=folder / "torchs", no_dist=True)
    checkpoint.save(folder / "own", {"app": dense, "step": 4})
    return {
        "plain.pt": {}, "last.ckpt": {"part": "state_dict"}, "deep.bin": {"part": "trainer.model.module"},
        "one.safetensors": {}, "hf": {}, "bin": {}, "sharded": {}, "bins": {},
        "bins/pytorch_model.bin.index.json": {}, "torchs": {"part": "app.model"}, "own": {"part": "app"},
    }  # fmt: skip


def read_all(folder: Path, calls: dict[str, dict[str, Any]]) -> list[str]:
    wrong, want = [], ours()
    for path, more in calls.items():
        for kind in range(len(MESHES)):
            like = placed(kind, zeros(want))
            found = checkpoint.load(folder / path, like, names=RULES, **more)
            if found is not like and not optree.tree_all(optree.tree_map(lambda a, b: a is b, found, like)):
                wrong.append(f"{path}: other tensors")
            if not same(sf.unshard(found), want):
                wrong.append(f"{path} on {MESHES[kind][0]}")
        if not same(checkpoint.load(folder / path, zeros(want), names=RULES, **more), want):
            wrong.append(f"{path}: whole tensors")
        kept = placed(0, zeros(want))
        checkpoint.load(folder / path, kept, names=RULES, donate=False, **more)
        if not same(sf.unshard(kept), zeros(want)):
            wrong.append(f"{path}: donate=False")
        if not more and not same(
            sf.unshard(checkpoint.import_hf(folder / path, placed(1, zeros(want)), names=RULES)), want
        ):
            wrong.append(f"{path}: import_")
    state = {"state_dict": placed(0, zeros(want)), "epoch": 0}
    rules = [(r"state_dict\." + rule[0], r"state_dict." + rule[1], *rule[2:]) for rule in RULES]
    found = checkpoint.load(folder / "last.ckpt", state, names=rules, ignore=r"optimizer\..*")
    wrong += [] if found["epoch"] == 3 and same(sf.unshard(found["state_dict"]), want) else ["numbers"]
    one = checkpoint.load(folder / "plain.pt", torch.zeros(5), part="norm")
    return wrong if one.equal(want[""]["norm"]) else [*wrong, "one tensor"]


@pytest.mark.world(4)
def test_files_of_all_kinds_are_read_to_any_placement(world: World, tmp_path: Path) -> None:
    calls = write_all(tmp_path)
    assert world.run(read_all, tmp_path, calls) == [[]] * 4


KEYS = st.sampled_from(["", "a", "b.c", "norm.weight", "0"])
LEAVES = st.builds(tensor_of, shapes(max_ndim=3, max_size=4), dtypes(), st.integers(0, 99))
TREES = st.recursive(
    LEAVES | st.integers(-3, 3) | st.text("xy", max_size=2),
    lambda inner: st.dictionaries(KEYS, inner, max_size=3) | st.lists(inner, max_size=2) | st.tuples(inner),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(tree=TREES)
def test_what_torch_saves_has_the_names_of_the_tree(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    """And comes back as it was; a tree in which two things have one name is refused on both ways."""
    path = tmp_path_factory.mktemp("file") / "one.pt"
    torch.save(tree, path)
    try:
        held = contents(tree, shared=False)
    except ValueError:
        with pytest.raises(CheckpointError, match="two things in it have the name"):
            FileReader(path)
        return
    source = FileReader(path).source
    assert source.tensors == held.tensors
    assert source.numbers == held.numbers
    like = optree.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else type(x)(), tree)
    found = checkpoint.load(path, like)
    flat, spec = optree.tree_flatten(found)
    wanted, other = optree.tree_flatten(tree)
    assert spec == other
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(flat, wanted, strict=True))


# --- what is refused ---


class Own:
    """Something that a pickle of tensors has no business with."""


def write_wrong(folder: Path) -> None:
    flat = theirs(ours())
    torch.save({**flat, "model": Own()}, folder / "own.pt")
    torch.save(nn.Linear(2, 2), folder / "module.pt")
    torch.save(flat, folder / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(flat, folder / "cut.pt")
    content = (folder / "cut.pt").read_bytes()
    (folder / "cut.pt").write_bytes(content[: len(content) // 2])
    at = content.index(ours()["layers"][2]["b"].view(torch.int16).numpy().tobytes())
    (folder / "bit.pt").write_bytes(content[: at + 3] + bytes([content[at + 3] ^ 4]) + content[at + 4 :])
    (folder / "text.pt").write_text("nothing")
    (folder / "empty").mkdir()
    (folder / "lost").mkdir()
    torch.save({"a": torch.ones(2)}, folder / "lost/x.bin")
    (folder / "lost/pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "x.bin", "b": "x.bin"}}')
    torch.save({**flat, "norm": torch.ones(5).to_sparse()}, folder / "sparse.pt")
    torch.save({"state_dict": {"model": flat}, "epoch": 3}, folder / "parts.pt")
    torch.save({**flat, "more": torch.ones(1), "n": 1}, folder / "more.pt")
    torch.save({name: x for name, x in flat.items() if name != "norm"}, folder / "less.pt")
    torch.save({**flat, "norm": torch.ones(5).double()}, folder / "double.pt")
    torch.save({**flat, "norm": torch.ones(6)}, folder / "long.pt")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "own.pt": ({}, "own.pt holds more than tensors, numbers, strings and containers of these (Unsupported global: "
               "GLOBAL tests.checkpoint.test_files.Own"),
    "module.pt": ({}, "Save a module's state_dict() instead of the module"),
    "old.pt": ({}, "old.pt is not a torch.save file, or is truncated. Convert a file of torch before 1.6"),
    "cut.pt": ({}, "cut.pt is not a torch.save file, or is truncated"),
    "bit.pt": ({}, "bit.pt is damaged: its own checksum does not fit, in "),
    "text.pt": ({}, "text.pt is not a torch.save file"),
    "gone.pt": ({}, "gone.pt cannot be read: there is no such file"),
    "empty": ({}, "empty is not a checkpoint: it has neither manifest.json nor .metadata nor model.safetensors nor"),
    "lost": ({}, "x.bin has no b, though pytorch_model.bin.index.json says so"),
    "sparse.pt": ({}, "norm is a tensor that is not dense"),
    "parts.pt": ({}, "They are all in its part 'state_dict.model': pass part='state_dict.model'"),
    "more.pt": ({}, "in the checkpoint, but not in the tree: more, n"),
    "less.pt": ({}, "missing in the checkpoint: norm"),
    "double.pt": ({}, "of another kind: norm is float64 [5] there, float32 [5] in the tree"),
    "long.pt": ({"strict": False}, "of another shape: norm is float32 [6] there, float32 [5] in the tree"),
}  # fmt: skip
PARTS: dict[str, tuple[str, Any, str]] = {
    "no part": ("parts.pt", {"part": "model"}, "There is no part 'model': the first keys are state_dict, epoch"),
    "no rule": ("more.pt", {"names": [("x", "y")]}, "no parameter matches 'x'"),
    "twice": ("more.pt", {"names": [("norm|scale", "norm")]}, "are both 'norm' there"),
    "turned": ("more.pt", {"names": [("norm", "norm", "T")]}, "of float32 [5] there are no two dimensions to swap"),
    "wide": ("more.pt", {"names": [(r"layers\.(\d)\.w", r"model.h.\1.proj.weight")]},
             "model.h.0.proj.weight (here layers.0.w) is float32 [8, 6] there, float32 [6, 8] in the tree"),
}  # fmt: skip


def refusals(folder: Path) -> dict[str, str]:
    like = placed(0, zeros(ours()))
    said = {
        path: refused(functools.partial(checkpoint.load, folder / path, like, names=RULES, **more))
        for path, (more, _) in REFUSED.items()
    }
    said |= {
        name: refused(functools.partial(checkpoint.load, folder / path, like, **more))
        for name, (path, more, _) in PARTS.items()
    }
    assert same(sf.unshard(like), zeros(ours())), "nothing was overwritten"
    checkpoint.load(folder / "double.pt", like, names=RULES, strict=False)
    assert sf.unshard(like)[""]["norm"].eq(1).all()
    return said


@pytest.mark.world(4)
def test_what_cannot_be_read_is_an_error_on_every_rank(world: World, tmp_path: Path) -> None:
    write_wrong(tmp_path)
    for said in world.run(refusals, tmp_path):
        for name, (_, text) in REFUSED.items():
            assert text in said[name], (name, said[name])
        for name, (_, _, text) in PARTS.items():
            assert text in said[name], (name, said[name])


# --- memory ---

WIDE = 2**11  # 16 MB a parameter


def mapped() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[2]) * os.sysconf("SC_PAGE_SIZE")


def watched(fill: Any, most: list[int]) -> Any:
    """The same, noting by how many bytes of files the process grew."""

    def filled(self: Any, wanted: Any) -> None:
        before = mapped()
        fill(self, wanted)
        most.append(mapped() - before)

    return filled


def peaks(folder: Path) -> dict[str, tuple[float, int]]:
    """Bytes of its own, and of files, that each rank had more than before while it loaded."""
    found = {}
    for path in ("big.pt", "big.safetensors"):
        like = sf.shard({"a": torch.zeros(WIDE, WIDE), "b": torch.zeros(WIDE, WIDE)}, mesh_of(shard=4),
                        sf.full_shard("shard"))  # fmt: skip
        checkpoint.load(folder / "small.pt", {"a": torch.zeros(2)})  # what is made once
        most: list[int] = []
        with mock.patch.object(FileReader, "fill", watched(FileReader.fill, most)):
            own = 2**20 * grown(functools.partial(checkpoint.load, folder / path, like))[0]
        assert sf.unshard(like)["b"][-1, -1] == 7
        found[path] = own, most[-1]
    return found


def test_a_rank_reads_what_it_keeps(tmp_path: Path) -> None:
    tree = {"a": torch.full((WIDE, WIDE), 5.0), "b": torch.full((WIDE, WIDE), 7.0)}
    torch.save(tree, tmp_path / "big.pt")
    library.save_file(tree, tmp_path / "big.safetensors")
    torch.save({"a": torch.ones(2)}, tmp_path / "small.pt")
    total = 2 * 4 * WIDE**2
    with World(4) as ranks:
        for found in ranks.run(peaks, tmp_path):
            for path, (own, read) in found.items():
                assert own < total / 4, (path, own)
                # What a rank took of files of safetensors is given back as it goes.
                assert read < (0.4 if path.endswith(".pt") else 0.05) * total, (path, read)


Read = tuple[str, str, dict[str, Any], dict[str, Any]]


def two_of_each(folder: Path) -> dict[str, Read]:
    """Files that differ in one element far behind, or as a whole: what rank 0 reads, and rank 1; and what they ask."""
    rank = torch.distributed.get_rank()
    for i in range(2):
        tree: dict[str, Any] = {"a": torch.zeros(40, 40), "step": 0}
        tree["a"][33, 7] = i
        checkpoint.save(folder / f"own{i}", tree)
        state_dict_saver.save({"a": tree["a"]}, checkpoint_id=folder / f"torch{i}")
        if rank == 0:
            torch.save({"a": tree["a"]}, folder / f"{i}.pt")
            library.save_file({"a": tree["a"]}, folder / f"{i}.safetensors")
    if rank == 0:
        torch.save({"x": {"a": torch.zeros(40, 40)}, "y": {"a": torch.ones(40, 40)}}, folder / "parts.pt")
        torch.save({"x": torch.zeros(40, 40), "y": torch.ones(40, 40)}, folder / "names.pt")
    torch.distributed.barrier()
    kinds = ("own{}", "torch{}", "{}.pt", "{}.safetensors")
    files: dict[str, Read] = {name: (name.format(0), name.format(1), {}, {}) for name in kinds}
    return files | {
        "part=": ("parts.pt", "parts.pt", {"part": "x", "ignore": ".*"}, {"part": "y", "ignore": ".*"}),
        "names=": ("names.pt", "names.pt", {"names": [("a", "x")], "ignore": "y"},
                   {"names": [("a", "y")], "ignore": "x"}),
    }  # fmt: skip


def different(folder: Path) -> dict[str, list[str]]:
    rank, found = torch.distributed.get_rank(), {}
    for name, (first, second, asked, other) in two_of_each(folder).items():
        params = sf.shard({"a": torch.full((40, 40), 5.0)}, mesh_of(shard=2), sf.full_shard("shard"))
        like: dict[str, Any] = {**params, "step": 0} if name == "own{}" else params
        mine, how = (folder / second, other) if rank else (folder / first, asked)
        found[name] = [refused(functools.partial(checkpoint.load, mine, like, **how))]
        found[name] += [str(sf.unshard(params["a"]).eq(5).all().item())]
        assert checkpoint.load(folder / first, like, **asked) is not None
    return found


@pytest.mark.world(2)
def test_ranks_do_not_read_parts_of_different_files(world: World, tmp_path: Path) -> None:
    for found in world.run(different, tmp_path):
        for name, (said, untouched) in found.items():
            assert f"of other {name if '=' in name else 'files'}: rank 0 from {tmp_path}" in said, (name, said)
            assert untouched == "True"


def wrong_on_one(folder: Path) -> dict[str, str]:
    rank = torch.distributed.get_rank()
    params = sf.shard({"a": torch.zeros(40, 40)}, mesh_of(shard=2), sf.full_shard("shard"))
    state = so.adamw(0.1).init(params)
    checkpoint.export_hf(folder, params)
    path: Any = None if rank else folder
    load, moments = checkpoint.load, checkpoint.load_torch_optimizer
    calls: dict[str, Callable[[], Any]] = {
        "load's path": lambda: load(path, params),
        "load's rules": lambda: load(folder, params, names=[3] if rank else []),  # type: ignore[list-item]
        "import_'s path": lambda: checkpoint.import_hf(path, params),
        "export's path": lambda: checkpoint.export_hf(path, params),
        "export's files": lambda: checkpoint.export_hf(folder, params, largest=1 - rank),
        "a class": lambda: moments(folder, state, make=(torch.optim.AdamW, torch.optim.SGD)[rank]),  # type: ignore[arg-type]
        "a state": lambda: moments(folder, state["mean"] if rank else state),
        "moments' path": lambda: moments(path, state),
        "save's path": lambda: checkpoint.save(path, params),
        "how many are kept": lambda: checkpoint.save(folder / "s", params, keep=1 - rank),
    }
    return {name: told(call) for name, call in calls.items()}


@pytest.mark.world(2)
def test_what_is_wrong_on_one_rank_is_an_error_on_both(world: World, tmp_path: Path) -> None:
    first, second = world.with_deadline(30).run(wrong_on_one, tmp_path)
    for name in first:
        assert "Error: " in second[name], (name, second)
        assert first[name] != "it was done", (name, first)
        assert "waits in vain" not in first[name] + second[name], name


def opened(run: Callable[..., Any], number: int, then: Callable[[], Any]) -> Callable[..., Any]:
    """The function, which does something else as well when it is called for the time of this number."""
    calls = itertools.count()

    def called(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            then()
        return run(*args, **kwargs)

    return called


@pytest.mark.parametrize("kind", ["one", "two"])
def test_a_model_that_is_replaced_while_it_is_opened_is_not_read_in_part(tmp_path: Path, kind: str) -> None:
    largest, n = {"one": 2**30, "two": 4 * 2**6}[kind], 0

    def write(value: int) -> None:
        dtype = torch.int64 if value else torch.int32  # so that tensors are in other places of the file, too
        tree = {name: torch.full((8, 8), 10 * value + ord(name), dtype=dtype) for name in "abc"}
        checkpoint.export_hf(tmp_path, tree, largest=largest)

    for what, number in itertools.product(("index", "mapped_tensors"), range(4)):
        write(0)
        with mock.patch.object(safetensors, what, opened(getattr(safetensors, what), number, lambda: write(1))):
            try:
                reader = FileReader(tmp_path / (safetensors.MODEL if kind == "one" else safetensors.INDEX))
            except CheckpointError as error:
                n += "was replaced by another" in str(error) or "though" in str(error)
                continue
        values = {int(x[0, 0]) - ord(name) for name, x in reader.tensors.items()}
        assert values in ({0}, {10}), (what, number)
    assert n > 0
