"""Training state comes back as it was, on any mesh; what cannot be trusted is an error on every rank."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import pickle
import random
import resource
import shutil
import struct
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import optree
import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import P, checkpoint
from shardfn.checkpoint import folders, manifest, tensor_bytes, writing
from shardfn.checkpoint.folders import source_of
from shardfn.checkpoint.team import team_of
from shardfn.checkpoint.verifying import verify
from shardfn.shards import boxes
from shardfn.shards.boxes import Box
from shardfn.testing import World, WorldError, world
from shardfn.testing.strategies import mesh_sizes, pytrees, shapes, tensor_of
from tests import crash
from tests.models import drawn, mesh_of, same, zeros
from tests.optimizers import optimizers_named
from tests.refusals import refused
from tests.resident import Largest

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
PLACEMENTS: dict[str, Any] = {
    "full_shard": lambda shard, rest: sf.hybrid_shard(shard=shard, replica=rest),
    "ddp": lambda shard, rest: sf.ddp((*shard, *rest)),
    "zero1": lambda shard, rest: sf.strategies.zero1((*shard, *rest)),
    "kept, beside copies": lambda shard, rest: (
        sf.strategies.hybrid_shard_zero2(shard=shard, replica=rest) if rest else sf.strategies.shard_grad_op(shard)
    ),
}


WHOLE = P()


def placed(tree: Any, sizes: dict[str, int], kind: str, specs: Any = WHOLE) -> Any:
    mesh = mesh_of(**sizes)
    rest = tuple(name for name in sizes if name == "replica")
    return sf.shard(tree, mesh, PLACEMENTS[kind](("shard",), rest), specs=specs)


# --- boxes ---


@given(shape=shapes(max_ndim=4, max_size=4), data=st.data())
def test_a_stretch_is_boxes_in_order_that_touch_nothing_else(shape: tuple[int, ...], data: Any) -> None:
    n = math.prod(shape)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))
    numbers = torch.arange(n).view(shape)
    found = list(boxes.boxes(shape, start, stop))
    read = [numbers[box.slices_in(boxes.full_box(shape))].reshape(-1) for box in found]
    assert torch.cat([torch.empty(0, dtype=torch.long), *read]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(a=shapes(3, 3, 1), b=shapes(3, 3, 1), offsets=st.tuples(*[st.integers(0, 4)] * 3))
def test_what_two_boxes_have_in_common_is_what_both_have(
    a: tuple[int, ...], b: tuple[int, ...], offsets: tuple[int, ...]
) -> None:
    marks = torch.zeros(10, 10, 10)
    first, second = Box((0, 0, 0), a), Box(offsets, b)
    for box in (first, second):
        marks[box.slices_in(boxes.full_box(marks.shape))] += 1
    both = first.common(second)
    assert int((marks == 2).sum()) == (both.numel if both else 0)
    if both:
        assert bool((marks[both.slices_in(boxes.full_box(marks.shape))] == 2).all())


# --- there and back ---


@dataclass(frozen=True)
class Leaf:
    """A tensor to be; some dtypes cannot be sent to ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int


def made(tree: Any) -> Any:
    return optree.tree_map(lambda x: tensor_of(x.shape, x.dtype, x.seed) if isinstance(x, Leaf) else x, tree)


def written(path: str, tree: Any, sizes: dict[str, int], kind: str, extra: Any) -> None:
    tree, extra = made(tree), made(extra)
    checkpoint.save(path, {"model": placed(tree, sizes, kind), **extra})


def read(path: str, tree: Any, sizes: dict[str, int], kind: str, extra: Any) -> Any:
    tree, extra = made(tree), made(extra)
    like = {"model": placed(zeros(tree), sizes, kind), **zeros(extra)}
    found = checkpoint.load(path, like)
    whole = sf.unshard(found.pop("model"))
    return same(whole, tree) and same(found, extra)


LEAVES = st.builds(Leaf, shapes(max_ndim=3, max_size=6), st.sampled_from(DTYPES), st.integers(0, 2**16))


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    tree=pytrees(LEAVES, 6),
    first=mesh_sizes(),
    second=mesh_sizes(),
    kinds=st.tuples(*[st.sampled_from(sorted(PLACEMENTS))] * 2),
    numbers=st.dictionaries(
        st.sampled_from("abc"), st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    ),
    plain=LEAVES,
)
def test_any_tree_comes_back_on_any_mesh(
    tree: Any, first: Any, second: Any, kinds: tuple[str, str], numbers: Any, plain: Leaf, tmp_path_factory: Any
) -> None:
    path = str(tmp_path_factory.mktemp("checkpoint") / "one")
    tree = {"tree": tree}
    extra = {"numbers": numbers, "plain": plain}
    world(math.prod(first.values())).run(written, path, tree, first, kinds[0], extra)
    assert folders.intact(Path(path)) is not None
    assert all(world(math.prod(second.values())).run(read, path, tree, second, kinds[1], extra))


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: so.adamw(so.warmup_cosine(1e-2, warmup=2, steps=10), weight_decay=0.1),
    "chain": lambda: so.chain(so.clip_by_global_norm(0.5), so.sgd(0.1, momentum=0.9)),
    **optimizers_named("adafactor, lamb, muon, shampoo, kl_shampoo, sophia, soap"),
    "average": lambda: so.ema(so.lion(1e-3), 0.9),
    "scaled": lambda: so.dynamic_loss_scale(so.adamw(1e-2)),
}


def model() -> Any:
    normal = drawn(0)
    return {
        "first": {"w": normal(4, 8), "b": normal(8)},
        "blocks": [{"w": normal(8, 8), "b": normal(8)} for _ in range(2)],
    }


SPECS = sf.by_path([(r".*\.w", P(None, "tensor")), (r".*\.b", P("tensor"))])


def begun(optimizer: Any, sizes: dict[str, int], kind: str) -> dict[str, Any]:
    params = placed(model(), sizes, kind, SPECS if "tensor" in sizes else P())
    return {"model": params, "optimizer": optimizer.init(params), "step": 0, "noise": torch.Generator().manual_seed(3)}


def steps(state: Any, optimizer: Any, count: int) -> Any:
    for _ in range(count):
        noise = torch.rand((), generator=state["noise"], dtype=torch.float64)
        grads = optree.tree_map(lambda x, noise=noise: torch.tanh(x) + noise * x, state["model"])
        layouts = optree.tree_leaves(state["model"], is_leaf=lambda x: isinstance(x, sf.shards.FlatShard))
        if any(flat.layout.state_layout is not flat.layout for flat in layouts):
            grads = divided(grads)
        params, moments = optimizer.step(state["model"], grads, state["optimizer"])
        state = {**state, "model": params, "optimizer": moments, "step": state["step"] + 1}
    return state


def divided(grads: Any) -> Any:
    """As a stage leaves them: cut as the optimizer's state is."""

    def own(flat: Any) -> Any:
        layout, small = flat.layout, flat.layout.state_layout
        rank = torch.distributed.get_rank()
        begin = layout.grid.index(rank, small.placement.axes) * small.piece
        begin -= layout.grid.index(rank, layout.placement.axes) * layout.piece
        return sf.shards.FlatShard(flat.values[begin : begin + small.piece].clone(), small)

    return optree.tree_map(own, grads, is_leaf=lambda x: isinstance(x, sf.shards.FlatShard))


def moved(name: str, first: Any, second: Any, path: str, phase: str) -> Any:
    optimizer = OPTIMIZERS[name]()
    mesh = mesh_of(**(first if phase == "save" else second)[0])

    def run(state: Any, count: int) -> Any:
        return sf.shard_map(lambda s: steps(s, optimizer, count), mesh=mesh, in_specs=..., out_specs=...)(state)

    if phase == "save":
        state = run(begun(optimizer, *first), 3)
        checkpoint.save(path, state)
        return sf.unshard(run(state, 3)["model"])
    state = checkpoint.load(path, begun(optimizer, *second))
    assert state["step"] == 3
    return sf.unshard(run(state, 3)["model"])


MOVES = [
    (({"shard": 4}, "full_shard"), ({"shard": 1}, "full_shard")),
    (({"shard": 1}, "ddp"), ({"shard": 3}, "zero1")),
    (({"shard": 3}, "zero1"), ({"shard": 2}, "kept, beside copies")),
    (({"replica": 2, "shard": 2}, "full_shard"), ({"shard": 2, "tensor": 2}, "zero1")),
    (({"shard": 2, "tensor": 2}, "full_shard"), ({"replica": 2, "shard": 2}, "kept, beside copies")),
    (({"shard": 2}, "full_shard"), ({"shard": 2}, "full_shard")),
]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("first", "second"), MOVES, ids=lambda move: f"{move[1]}-{'x'.join(map(str, move[0].values()))}"
)
def test_training_goes_on_as_if_never_interrupted(name: str, first: Any, second: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "step-3")
    wanted = world(math.prod(first[0].values())).run(moved, name, first, second, path, "save")[0]
    for found in world(math.prod(second[0].values())).run(moved, name, first, second, path, "load"):
        if first == second:
            assert same(found, wanted)
        for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# --- what each rank has its own of ---


def by_rank(path: str, phase: str, equal: bool) -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    rank = 0 if equal else mesh.get_rank()
    own = torch.Generator().manual_seed(rank)
    state: dict[str, Any] = {
        "noise": own,
        "mine": checkpoint.ByRank({"x": torch.full((rank + 1,), rank), "name": f"rank {rank}"}),
    }
    if phase == "save":
        checkpoint.save(path, state)
        return None
    like = {"noise": torch.Generator(), "mine": checkpoint.ByRank({"x": torch.zeros(rank + 1).long(), "name": ""})}
    found = checkpoint.load(path, like)
    return torch.equal(found["noise"].get_state(), own.get_state()) and same(found["mine"].value, state["mine"].value)


def test_what_each_rank_has_its_own_of_comes_back_to_it(tmp_path: Path) -> None:
    world(2).run(by_rank, str(tmp_path / "own"), "save", False)
    assert world(2).run(by_rank, str(tmp_path / "own"), "load", False) == [True] * 2
    for error in world(3).errors(by_rank, str(tmp_path / "own"), "load", False):
        assert isinstance(error, checkpoint.CheckpointError)
        assert all(word in str(error) for word in ("noise", "mine.x", "mine.name", "2 ranks", "3 ranks"))
    world(2).run(by_rank, str(tmp_path / "equal"), "save", True)
    assert world(3).run(by_rank, str(tmp_path / "equal"), "load", True) == [True] * 3


# --- what is not the same on both sides ---


def simple(size: int, **more: Any) -> Any:
    mesh = mesh_of(shard=size)
    tree = {"w": torch.arange(240.0).view(40, 6), "b": torch.ones(3, dtype=torch.bfloat16)}
    return {"model": sf.shard(tree, mesh, sf.full_shard("shard")), "step": 3, **more}


def mismatched(path: str) -> Any:
    mesh = mesh_of(shard=2)
    checkpoint.save(path, simple(2, gone=torch.ones(2), kind=1, other=2.0))
    tree = {"w": torch.zeros(6, 40), "b": torch.zeros(3), "new": torch.zeros(2)}
    like = {"model": sf.shard(tree, mesh, sf.full_shard("shard")), "step": 0, "kind": "", "other": torch.ones(2)}
    errors = []
    for strict in (True, False):
        with pytest.raises(checkpoint.CheckpointError) as caught:
            checkpoint.load(path, like, strict=strict)
        errors.append(str(caught.value))
    tree = {"w": torch.zeros(40, 6), "b": torch.zeros(3), "new": torch.full((2,), 5.0)}
    like = {"model": sf.shard(tree, mesh, sf.full_shard("shard")), "step": 0}
    loose = checkpoint.load(path, like, strict=False)
    like = simple(2)
    before = optree.tree_map(lambda x: x, like)
    like["model"] = optree.tree_map(torch.zeros_like, like["model"])
    kept = checkpoint.load(path, like, ignore=["gone", "kind|other"], donate=False)
    untouched = all(not x.any() for x in optree.tree_leaves(like["model"]))
    return errors, sf.unshard(loose["model"]), untouched and same(sf.unshard(kept), sf.unshard(before))


@pytest.mark.world(2)
def test_all_that_differs_is_told_at_once_on_every_rank(world: World, tmp_path: Path) -> None:
    for errors, loose, kept in world.run(mismatched, str(tmp_path / "one")):
        for word in (
            "missing in the checkpoint: model.new", "in the checkpoint, but not in the tree: gone",
            "model.w is float32 [40, 6] there, float32 [6, 40] in the tree",
            "model.b is bfloat16 [3] there, float32 [3] in the tree", "kind is int there, str in the tree",
            "other is float there, float32 [2] in the tree",
        ):  # fmt: skip
            assert word in errors[0], (word, errors[0])
        assert "model.w" in errors[1]  # a shape is an error all the same
        assert loose["w"].tolist() == torch.arange(240.0).view(40, 6).tolist()
        assert (loose["b"].tolist(), loose["new"].tolist()) == ([1.0] * 3, [5.0] * 2)
        assert kept


def wrong(folder: str) -> dict[str, Any]:
    """What is refused, by name: the errors."""
    rank = torch.distributed.get_rank()
    root, state = Path(folder), simple(2)
    if rank == 0:
        (root / "file").write_text("")
        (root / "folder").mkdir()
        (root / "folder" / "mine").write_text("")
    torch.distributed.barrier()
    checkpoint.save(root / "there", state)
    calls: dict[str, Any] = {
        "exists": lambda: checkpoint.save(root / "there", state),
        "no checkpoint": lambda: checkpoint.save(root / "folder", state, overwrite=True),
        "keep": lambda: checkpoint.save(root / "x", state, keep=0),
        "leaf": lambda: checkpoint.save(root / "x", {**state, "f": print, "d": torch.float32}),
        "twice": lambda: checkpoint.save(root / "x", {**state, "a.b": 1, "a": {"b": 2}}),
        "number": lambda: checkpoint.save(root / "x", {**state, "loss": float(rank)}),
        "tensor": lambda: checkpoint.save(root / "x", {**state, "loss": torch.tensor(rank)}),
        "names": lambda: checkpoint.save(root / "x", {**state, f"x{rank}": 1}),
        "paths": lambda: checkpoint.save(root / f"x{rank}", state),
        "parent": lambda: checkpoint.save(root / "file" / "x", state),
        "nothing": lambda: checkpoint.load(root / "nothing", state),
        "other folder": lambda: checkpoint.load(root / "folder", state),
        "root": lambda: checkpoint.load(root, state),
        "no latest": lambda: checkpoint.load(checkpoint.latest(root / "empty"), state),  # type: ignore[arg-type]
        "one leaf": lambda: checkpoint.save(root / "x", {**state, **({"f": print} if rank else {})}),
        "one like": lambda: checkpoint.load(root / "there", {**state, **({"f": print} if rank else {})}),
        "busy": lambda: checkpoint.save_async(root / "x", state, busy="perhaps"),  # type: ignore[arg-type]
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    return {**found, "left": sorted(path.name for path in root.iterdir())}


WRONG: dict[str, tuple[str | tuple[str, str], list[str]]] = {
    "exists": ("FileExistsError", ["there exists", "overwrite=True"]),
    "no checkpoint": ("FileExistsError", ["folder exists", "not a checkpoint"]),
    "keep": ("ValueError", ["keep must be the number"]),
    "leaf": ("TypeError", ["f is builtins.builtin_function_or_method", "d is torch.dtype"]),
    "twice": ("ValueError", ["'a.b'"]),
    "number": ("ValueError", ["loss", "float 0.0", "float 1.0", "ByRank"]),
    "tensor": ("ValueError", ["loss", "ByRank"]),
    "names": ("ValueError", ["x0", "x1", "nothing of this name"]),
    "paths": ("ValueError", ["the path", "x0", "x1"]),
    "parent": ("CheckpointError", ["file", "rank 0: FileExistsError"]),
    "nothing": ("CheckpointError", ["there is no folder"]),
    "other folder": ("CheckpointError", ["not a checkpoint", "manifest.json"]),
    "root": ("CheckpointError", ["latest()", "there"]),
    "no latest": ("TypeError", ["path must be a checkpoint, got None", "no checkpoint is complete"]),
    "one leaf": (("CheckpointError", "TypeError"), ["f is builtins.builtin_function_or_method"]),
    "one like": (("CheckpointError", "TypeError"), ["f is builtins.builtin_function_or_method"]),
    "busy": ("ValueError", ["perhaps"]),
}


@pytest.mark.world(2)
def test_what_cannot_be_saved_or_loaded_is_told_on_every_rank(world: World, tmp_path: Path) -> None:
    for rank, found in enumerate(world.run(wrong, str(tmp_path))):
        for name, (kinds, words) in WRONG.items():
            kind = kinds if isinstance(kinds, str) else kinds[rank]
            assert found[name][0] == kind, (name, found[name])
            assert all(word in found[name][1] for word in words), (name, found[name])
        assert found["left"] == ["file", "folder", "there"]


def fails_as_another_ends() -> None:
    ours = team_of(())
    if ours.rank == 1:
        os._exit(0)

    def run() -> None:
        raise OSError(errno.ENOSPC, "no room")

    ours.run_on_each("writing", run)


def test_an_own_error_is_not_lost_where_another_rank_has_ended() -> None:
    with World(2, deadline=40) as own, pytest.raises(WorldError) as caught:
        own.run(fails_as_another_ends)
    assert "CheckpointError: writing: OSError: [Errno 28] no room. Then a rank has ended" in str(caught.value)


# --- whole or absent ---


@contextlib.contextmanager
def little_disk(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def disk_full(folder: str, overwrite: bool) -> Any:
    root, state, rank = Path(folder), simple(2), torch.distributed.get_rank()
    checkpoint.save(root / "one", state)
    with little_disk(100) if rank == 1 else contextlib.nullcontext():
        try:
            checkpoint.save(root / ("one" if overwrite else "two"), {**state, "step": 4}, overwrite=overwrite)
            error = ""
        except checkpoint.CheckpointError as caught:
            error = str(caught)
    torch.distributed.barrier()
    newest = checkpoint.latest(root)
    assert newest is not None
    return error, newest.name, checkpoint.load(newest, simple(2))["step"], len(list(root.iterdir()))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.world(2)
def test_a_full_disk_on_one_rank_leaves_the_checkpoint_before(world: World, overwrite: bool, tmp_path: Path) -> None:
    for error, *rest in world.run(disk_full, str(tmp_path), overwrite):
        assert "rank 1" in error
        assert "File too large" in error
        assert rest == ["one", 3, 1]


def rotated(folder: str) -> Any:
    root, seen = Path(folder), []
    for step in range(5):
        checkpoint.save(root / f"step-{step}", simple(2, at=step), keep=2)
        newest = checkpoint.latest(root)
        assert newest is not None
        seen.append((newest.name, len(folders.checkpoints(root))))
    checkpoint.save(root / "step-1", simple(2, at=7), keep=2)
    if torch.distributed.get_rank() == 0:
        (root / "step-1" / manifest.MANIFEST).unlink()  # the newest is torn
    torch.distributed.barrier()
    newest = checkpoint.latest(root)
    assert newest is not None
    seen.append((newest.name, len(folders.checkpoints(root))))
    checkpoint.save(root / "step-5", simple(2, at=5), keep=1)
    return seen, sorted(path.name for path in root.iterdir())


@pytest.mark.world(2)
def test_rotation_keeps_the_newest_whole_ones(world: World, tmp_path: Path) -> None:
    for seen, left in world.run(rotated, str(tmp_path)):
        assert seen == [("step-0", 1), ("step-1", 2), ("step-2", 2), ("step-3", 2), ("step-4", 2), ("step-4", 1)]
        assert left == ["step-1", "step-5"]  # the torn one is nobody's to delete


def test_a_process_that_dies_while_it_replaces_a_checkpoint_leaves_one(tmp_path: Path) -> None:
    def run() -> Any:
        path = tmp_path / "best"
        for at in range(2):
            checkpoint.save(path, simple(1, at=at), overwrite=True)
        path.rename(folders.staging_path(path, "replaced"))  # as between the two names that are changed
        assert checkpoint.latest(tmp_path) == path
        found = checkpoint.load(path, simple(1, at=0))["at"]
        checkpoint.save(path, simple(1, at=2), overwrite=True)
        return found, checkpoint.load(path, simple(1, at=0))["at"], [one.name for one in tmp_path.iterdir()]

    assert world(1).run(run) == [(1, 2, ["best"])]


# --- in the background ---


def in_background(folder: str) -> Any:
    root, rank = Path(folder), torch.distributed.get_rank()
    state = simple(2, note=torch.zeros(3))
    with late() as may_begin:
        pending = checkpoint.save_async(root / "one", state)
        for x in optree.tree_leaves(state):
            if isinstance(x, Tensor):
                x.fill_(-1)
        may_begin.set()
        pending.wait()
    assert pending.done()
    first = sf.unshard(checkpoint.load(root / "one", state)["model"])["w"]
    told = []
    with little_disk(100) if rank == 0 else contextlib.nullcontext():
        checkpoint.save_async(root / "two", state)
        for call in (checkpoint.wait_for_saves, checkpoint.wait_for_saves):
            try:
                call()
                told.append("")
            except checkpoint.CheckpointError as error:
                told.append(str(error))
    with held():
        checkpoint.save_async(root / "three", state)
        try:
            checkpoint.save_async(root / "four", state, busy="refuse")
        except checkpoint.CheckpointError as error:
            told.append(str(error))
    checkpoint.save_async(root / "five", state)
    checkpoint.save(root / "six", state)
    return first, told, [path.name for path in folders.checkpoints(root)]


@contextlib.contextmanager
def late() -> Iterator[threading.Event]:
    """What is written in the background begins when it may."""
    may_begin, write = threading.Event(), writing.Save.write

    def later(self: Any) -> None:
        may_begin.wait()
        write(self)

    with mock.patch.object(writing.Save, "write", later):
        yield may_begin


@contextlib.contextmanager
def held() -> Iterator[None]:
    """The disk is slow."""
    quick = folders.publish

    def slow(*args: Any) -> None:
        time.sleep(0.5)
        quick(*args)

    with mock.patch.object(folders, "publish", slow):
        yield


@pytest.mark.world(2)
def test_training_goes_on_while_a_checkpoint_is_written(world: World, tmp_path: Path) -> None:
    for first, told, names in world.run(in_background, str(tmp_path)):
        assert first.tolist() == torch.arange(240.0).view(40, 6).tolist()
        assert "File too large" in told[0]
        assert told[1] == ""  # it is told once
        assert "three is still being written" in told[2]
        assert names == ["one", "three", "five", "six"]


# --- damage ---


def damaged(path: str, seed: int, count: int) -> list[str]:
    """Flips and cuts at random places of a checkpoint that nobody finds."""
    draw, folder, missed = random.Random(seed), Path(path), []
    names = sorted(one.name for one in folder.iterdir())
    assert not verify(folder).damage
    for _ in range(count):
        file = folder / draw.choice(names)
        content = file.read_bytes()
        at = draw.randrange(len(content))
        bit = 1 << draw.randrange(8)
        cut = draw.random() < 0.3
        file.write_bytes(content[:at] if cut else content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
        try:
            found = bool(verify(folder).damage)
        except checkpoint.CheckpointError:
            found = True
        if not found:
            missed.append(f"{file.name}: {'cut' if cut else 'flipped'} at {at}")
        file.write_bytes(content)
    return missed


def test_every_flipped_bit_and_every_truncation_is_found(tmp_path: Path) -> None:
    path = tmp_path / "one"
    world(2).run(lambda: checkpoint.save(path, simple(2, noise=torch.Generator())))
    assert damaged(str(path), 0, 1000) == []


def load_damaged(path: str) -> list[str]:
    errors = []
    file = Path(path) / "__1_0.distcp"
    content = file.read_bytes()
    torch.distributed.barrier()
    for at in range(64, len(content), 97):
        if torch.distributed.get_rank() == 0:
            file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        torch.distributed.barrier()
        try:
            checkpoint.load(path, simple(2))
            errors.append("")
        except checkpoint.CheckpointError as error:
            errors.append(str(error))
        torch.distributed.barrier()
    return errors


@pytest.mark.world(2)
def test_damage_that_one_rank_meets_is_told_on_every_rank(world: World, tmp_path: Path) -> None:
    world.run(lambda: checkpoint.save(tmp_path / "one", simple(2)))
    for errors in world.run(load_damaged, str(tmp_path / "one")):
        assert len(errors) > 10
        told = [error.split(". It was found on the way")[0] for error in errors]
        assert all("damaged" in error and "model." in error for error in told)


def load_cut_off(path: str, harm: Callable[[Path], None]) -> tuple[str, bool]:
    """What is said, and whether what would have been overwritten is as it was."""
    like = simple(2)
    before = optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, like)
    if torch.distributed.get_rank() == 0:
        harm(Path(path) / "__1_0.distcp")
    torch.distributed.barrier()
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.load(path, like)
    both = zip(optree.tree_leaves(like), optree.tree_leaves(before), strict=True)
    return str(caught.value), all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in both)


@pytest.mark.world(2)
def test_a_file_that_is_gone_or_cut_off_leaves_everything_as_it_was(world: World, tmp_path: Path) -> None:
    world.run(lambda: checkpoint.save(tmp_path / "one", optree.tree_map(lambda x: x + 1, simple(2))))
    for harm in (lambda file: os.truncate(file, file.stat().st_size - 80), lambda file: file.unlink()):
        for told, unchanged in world.run(load_cut_off, str(tmp_path / "one"), harm):
            assert "__1_0.distcp" in told
            assert "found on the way" not in told
            assert unchanged


NONSENSE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "offset": lambda body: body["tensors"]["x"]["chunks"][0].__setitem__(3, -64),
    "length": lambda body: body["tensors"]["x"]["chunks"][0].__setitem__(4, "900"),
    "where elements begin": lambda body: body["tensors"]["x"]["chunks"][0].__setitem__(5, 10**9),
    "checksum": lambda body: body["tensors"]["x"]["chunks"][0].__setitem__(7, None),
    "sizes": lambda body: body["tensors"]["x"]["chunks"][0].__setitem__(1, [3.0]),
    "shape": lambda body: body["tensors"]["x"].__setitem__("shape", ["3"]),
    "dtype": lambda body: body["tensors"]["x"].__setitem__("dtype", "nn"),
    "ranks": lambda body: body["by_rank"].__setitem__("n", "x"),
    "length of a file": lambda body: body["files"].__setitem__("__0_0.distcp", ["5", 5]),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_a_manifest_that_says_nonsense_is_damaged_whoever_made_its_checksum(what: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "one", {"x": torch.ones(3), "n": 1})
    file = tmp_path / "one" / manifest.MANIFEST
    body = json.loads(file.read_bytes())
    body.pop("crc32")
    NONSENSE[what](body)
    text = json.dumps(body, indent=0, separators=(",", ":"))[:-2].encode() + b',\n"crc32":'
    file.write_bytes(text + b"%d}\n" % zlib.crc32(text))
    like: dict[str, Any] = {"x": torch.zeros(3), "n": 0}
    assert str(file) in refused(lambda: checkpoint.load(tmp_path / "one", like))
    assert [one.file for one in verify(tmp_path / "one").damage] == [manifest.MANIFEST]
    assert like["x"].tolist() == [0.0] * 3


def test_bytes_that_the_disk_does_not_give_are_damage_of_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path / "one", {"x": torch.ones(3)})
    real = os.preadv

    def failing(descriptor: int, targets: Any, offset: int) -> int:
        if offset < 500:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, targets, offset)

    monkeypatch.setattr(os, "preadv", failing)
    said = refused(lambda: checkpoint.load(tmp_path / "one", {"x": torch.zeros(3)}))
    assert f"{tmp_path / 'one' / '__0_0.distcp'} is damaged between bytes 0 and " in said
    assert "in x: byte 0 cannot be read: Input/output error" in said
    damage = {one.file: one.what for one in verify(tmp_path / "one").damage}
    assert damage == dict.fromkeys([".metadata", "__0_0.distcp"], "byte 0 cannot be read: Input/output error")


def test_damage_that_is_found_on_the_way_tells_what_is_unusable(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "one", {"x": torch.ones(3), "y": torch.ones(2)})
    file = tmp_path / "one" / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-100] + bytes([content[-100] ^ 4]) + content[-99:])
    like = {"x": torch.zeros(3), "y": torch.zeros(2)}
    with pytest.raises(checkpoint.CheckpointError, match=r"in part the checkpoint's, in part as they were: x, y\. "):
        checkpoint.load(tmp_path / "one", like)
    like = {"x": torch.zeros(3), "y": torch.zeros(2)}
    with pytest.raises(checkpoint.CheckpointError, match="`like` is as it was"):
        checkpoint.load(tmp_path / "one", like, donate=False)
    assert like["x"].tolist() + like["y"].tolist() == [0.0] * 5


class Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def test_nothing_that_a_file_says_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(checkpoint.CheckpointError, match=r"posix\.mkdir"):
        checkpoint.load(tmp_path / "evil", {"x": 1})
    checkpoint.save(tmp_path / "good", {"x": torch.ones(3)})
    for name in ("__0_0.distcp", ".metadata"):
        copy = tmp_path / f"copy{name}"
        shutil.copytree(tmp_path / "good", copy)
        (copy / name).write_bytes(pickle.dumps(Harm()))
        if name != ".metadata":  # this one is for others: our own is not read
            with pytest.raises(checkpoint.CheckpointError, match="damaged"):
                checkpoint.load(copy, {"x": torch.zeros(3)})
        (copy / manifest.MANIFEST).unlink()  # a checkpoint of torch's, then
        with pytest.raises(checkpoint.CheckpointError):
            checkpoint.load(copy, {"x": torch.zeros(3)})
    with monkeypatch.context() as patched:
        patched.setattr(pickle, "Unpickler", None)
        patched.setattr(torch, "load", None)
        assert checkpoint.load(tmp_path / "good", {"x": torch.zeros(3)})["x"].tolist() == [1.0] * 3
    assert not (tmp_path / "harm").exists()


# --- memory ---


def bounded(path: str) -> Any:
    tensor_bytes.BUFFER = 2**18
    mesh = mesh_of(shard=2)
    make = sf.shard({"w": torch.arange(2.0**20).view(1024, 1024)}, mesh, sf.full_shard("shard"))
    with Largest() as seen:
        checkpoint.save(path, make)
        checkpoint.load(path, make)
    chunks = manifest.read_manifest(Path(path)).chunks["w"]
    return seen.bytes, max(chunk.length for chunk in chunks), sf.unshard(make)["w"].view(-1)[-1].item()


@pytest.mark.world(2)
def test_memory_is_bounded_by_the_buffer(world: World, tmp_path: Path) -> None:
    for most, length, last in world.run(bounded, str(tmp_path / "one")):
        assert most <= 2**18
        assert length <= 2**18 + 2048
        assert last == 2**20 - 1
    assert len(source_of(tmp_path / "one").chunks["w"]) >= 16


PROGRAM = """
import sys, time
import torch
import shardfn as sf
from shardfn import checkpoint
from shardfn.checkpoint import folders

quick = folders.publish
folders.publish = lambda *args: (time.sleep(1 + 9 * (sys.argv[2] == "fail")), quick(*args))
checkpoint.save_async(sys.argv[1], {str(i): torch.ones(3) for i in range(int(sys.argv[3]))})
if sys.argv[2] == "fail":
    raise RuntimeError("broken here")
"""


@pytest.mark.parametrize(("end", "code", "tensors"), [("well", 0, 1), ("fail", 1, 1), ("fail", 1, 3000)])
def test_a_program_waits_for_its_last_checkpoint_unless_it_fails(
    end: str, code: int, tensors: int, tmp_path: Path
) -> None:
    """With many tensors, it fails while the thread is inside torch."""
    begun = time.monotonic()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "one"), end, str(tensors)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, time.monotonic() - begun < 50) == (code, True), ran.stderr
    assert (checkpoint.latest(tmp_path) is not None) is (end == "well")


NO_VALUES: dict[str, Callable[[], Tensor]] = {
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch._make_per_tensor_quantized_tensor(torch.ones(3, dtype=torch.int8), 0.1, 0),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", NO_VALUES)
def test_tensors_that_are_more_or_less_than_their_elements_are_refused(kind: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "one", {"x": torch.ones(3)})
    for run in (
        lambda tree: checkpoint.save(tmp_path / "two", tree),
        lambda tree: checkpoint.load(tmp_path / "one", tree),
        lambda tree: checkpoint.export_hf(tmp_path / "three", tree),
    ):
        with pytest.raises(TypeError, match=r"x is a tensor (on the device meta|that is not dense)"):
            run({"x": NO_VALUES[kind]()})
    assert [one.name for one in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize("keep", ["3", 1.5, True, 0])
def test_how_many_stay_is_an_integer(keep: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be the number of checkpoints that stay"):
        checkpoint.save(tmp_path / "one", {"x": 1}, keep=keep)
    assert not list(tmp_path.iterdir())


def test_one_pattern_may_be_by_itself(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "one", {"x": torch.ones(3), "other": 1, "r": 2})
    like = {"x": torch.zeros(3), "r": 0}
    assert checkpoint.load(tmp_path / "one", like, ignore="oth.*")["x"].tolist() == [1.0] * 3
    with pytest.raises(checkpoint.CheckpointError, match="not in the tree: other"):
        checkpoint.load(tmp_path / "one", like, ignore="r")
    with pytest.raises(checkpoint.CheckpointError, match=r"ignore: '\(' is not a regular expression"):
        checkpoint.load(tmp_path / "one", like, ignore=["("])
    assert not checkpoint.verify(str(tmp_path / "one")).damage
    for dtype in (torch.int8, "bf16"):
        with pytest.raises(TypeError, match="pass a floating-point dtype"):
            checkpoint.export_hf(tmp_path / "hf", {"x": torch.ones(3)}, dtype=dtype)  # type: ignore[arg-type]


def test_archives_are_read_where_python_checks_that_their_end_is_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As later releases of Python 3.11 to 3.14 do."""
    find, seen = vars(zipfile)["_EndRecData64"], []

    def strict(file: Any, offset: int, record: Any) -> Any:
        length = file.seek(0, os.SEEK_END)
        file.seek(length + offset - 20)
        signature, _, at, _ = struct.unpack("<4sLQL", file.read(20))
        if signature == b"PK\x06\x07":
            seen.append(at)
            if at + 56 != length + offset - 20:
                raise zipfile.BadZipFile("Corrupt zip64 end of central directory locator")
        return find(file, offset, record)

    monkeypatch.setattr(zipfile, "_EndRecData64", strict)
    tree = {"a": torch.arange(5000.0), "b": {"c": torch.ones(3, dtype=torch.bfloat16)}}
    checkpoint.save(tmp_path / "saved", tree)
    loaded = checkpoint.load(tmp_path / "saved", optree.tree_map(torch.zeros_like, tree))
    assert all(map(torch.equal, optree.tree_leaves(loaded), optree.tree_leaves(tree)))
    assert len(seen) >= 2


def test_a_number_is_read_as_a_tensor_and_a_tensor_as_a_number(tmp_path: Path) -> None:
    """Compiled steps make 0-d tensors of an optimizer's counts."""
    count, rate = torch.tensor(3), torch.tensor(0.1, dtype=torch.float64)
    checkpoint.save(tmp_path / "tensors", {"step": count, "rate": rate})
    checkpoint.save(tmp_path / "numbers", {"step": 3, "rate": 0.1})
    for folder, donate in (("tensors", True), ("numbers", True), ("tensors", False), ("numbers", False)):
        numbers = checkpoint.load(tmp_path / folder, {"step": 0, "rate": 0.0}, donate=donate)
        assert numbers == {"step": 3, "rate": 0.1}
        assert [type(x) for x in numbers.values()] == [int, float]
        blank = {"step": torch.zeros_like(count), "rate": torch.zeros_like(rate)}
        tensors = checkpoint.load(tmp_path / folder, blank, donate=donate)
        assert torch.equal(tensors["step"], count)
        assert torch.equal(tensors["rate"], rate)
    for wrong in ({"step": 0.0, "rate": 0.0}, {"step": True, "rate": 0.0}, {"step": 0, "rate": torch.zeros(1)}):
        with pytest.raises(checkpoint.CheckpointError, match=r"of another (shape|kind)"):
            checkpoint.load(tmp_path / "tensors", wrong)


# --- kills at any moment; `python -m tests.crash` does more of them ---


@pytest.mark.parametrize("meshes", [crash.MESHES[:1], crash.MESHES], ids=["one mesh", "any mesh"])
def test_killed_runs_lose_nothing(meshes: list[dict[str, int]], tmp_path: Path) -> None:
    tally, worst = crash.crash(kills=4, steps=10, seed=0, meshes=meshes, folder=tmp_path)
    assert sum(tally.ends.values()) == 4
    assert tally.steps >= 10
    assert worst == 0 if len(meshes) == 1 else worst < 1e-12
