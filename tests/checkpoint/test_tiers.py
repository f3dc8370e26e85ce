"""What is on disk is saved and loaded there, in memory that does not grow with it, bit for bit."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import checkpoint, interop, lora, quant
from shardfn.checkpoint import writing
from shardfn.checkpoint.writing import Writer
from shardfn.shards.layout import is_flat
from shardfn.testing import World, world
from shardfn.tiers import copying, tensors
from shardfn.tiers.tensors import on_disk
from tests.models import DATA, head, mesh_of, residual, zeros
from tests.models import same as same_trees
from tests.refusals import refused
from tests.resident import grown, pages_of


def same(a: Any, b: Any) -> bool:
    """Wherever the leaves are."""
    return same_trees(optree.tree_leaves(a), optree.tree_leaves(b))


def all_on_disk(tree: Any) -> bool:
    leaves = [x.values for x in optree.tree_leaves(tree, is_leaf=is_flat) if is_flat(x) and x.values is not None]
    return bool(leaves) and all(on_disk(x) or x.numel() == 0 for x in leaves)


# --- memory ---

ROWS, COLUMNS = 1024, 2048  # 4 MB a rank and stage, of 2
FEW, MANY = 2, 12


def stage(generator: torch.Generator) -> dict[str, Tensor]:
    return {"w": torch.randn(ROWS, COLUMNS, generator=generator)}


def torchs(path: Path, depth: int) -> None:
    """A file of torch's, with whole tensors."""
    if dist.get_rank() == 0:
        torch.save({"blocks": [{"w": torch.full((ROWS, COLUMNS), float(i))} for i in range(depth)]}, path)
    dist.barrier()


def operations(folder: Path, scratch: Path, depth: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All that makes, reads or writes values on disk, by names; each works on what the last one left."""
    mesh, plan = (
        sf.make_mesh(device="cpu", scratch=scratch, shard=2),
        sf.full_shard("shard").with_tiers(params="disk", state="disk"),
    )
    kept: dict[str, Any] = {}

    def keep(name: str, make: Callable[[], Any]) -> Callable[[], None]:
        return lambda: kept.__setitem__(name, make())

    named = ((f"blocks.{i}.w", torch.full((ROWS, COLUMNS), float(i))) for i in range(depth))
    like = {"blocks": [{"w": torch.empty(ROWS, COLUMNS, device="meta")} for _ in range(depth)]}
    yield "init_sharded", keep("params", lambda: sf.init_sharded({"blocks": [stage] * depth}, 0, mesh, plan))
    yield "save", lambda: checkpoint.save(folder / "a", kept["params"])
    yield "load", lambda: checkpoint.load(folder / "a", kept["params"])
    yield "load copies", keep("again", lambda: checkpoint.load(folder / "a", kept["params"], donate=False))
    yield "save_async", lambda: checkpoint.save_async(folder / "b", kept["params"]).wait()
    yield "assert_replicated", lambda: sf.shards.assert_replicated(kept["params"])
    yield "export", lambda: checkpoint.export_hf(folder / "c", kept["params"])
    yield "import_", lambda: checkpoint.import_hf(folder / "c", kept["again"])
    yield "init of adamw", keep("state", lambda: so.adamw(0.1).init(kept["params"]))
    yield "init of ema", keep("ema", lambda: so.ema(so.sgd(0.1), 0.9).init(kept["params"]))
    yield "unshard some", lambda: sf.unshard(kept["params"], ranks=[0], only=r"blocks\.[01]\..*")
    yield "shard_named", keep("params", lambda: sf.shards.shard_named(named, like, mesh, plan))
    torchs(folder / "whole.pt", depth)
    yield "load of torch's", lambda: checkpoint.load(folder / "whole.pt", kept["params"])


def peaks(folder: Path, scratch: Path) -> dict[str, tuple[float, float, float]]:
    """Of each: how many MB more of its own, of files, and of pages that stay, more stages need."""
    found: dict[str, dict[int, Any]] = {}
    # The first makes what is made once. A busy machine may hide the peak of one of the two after it.
    for turn, depth in enumerate((FEW, FEW, FEW, MANY)):
        own = folder / f"{turn}"
        if dist.get_rank() == 0:
            own.mkdir(exist_ok=True)
        dist.barrier()
        for name, run in operations(own, scratch, depth):
            now = (*grown(run), pages_of(scratch))
            one = found.setdefault(name, {})
            one[depth] = tuple(map(max, one[depth], now)) if turn == 2 else now
    return {
        name: tuple(b - a for a, b in zip(by_depth[FEW], by_depth[MANY], strict=True))
        for name, by_depth in found.items()
    }


def test_memory_does_not_grow_with_what_is_on_disk(tmp_path: Path) -> None:
    with World(2, deadline=120) as world:  # whose processes keep their malloc for themselves
        for found in world.run(peaks, tmp_path, tmp_path / "scratch"):
            for name, (own, of_files, stay) in found.items():
                assert own < 8, (name, found[name])
                assert of_files < 8, (name, found[name])
                assert stay < 1, (name, found[name])


# --- there and back ---


def tree(seed: int) -> Any:
    g = torch.Generator().manual_seed(seed)

    def block() -> dict[str, Tensor]:
        return {
            "w": torch.randn(300, 37, generator=g),
            "b": torch.randn(5, generator=g, dtype=torch.float64),
            "half": torch.randn(41, 3, generator=g).bfloat16(),
            "none": torch.empty(0, 4),
            "scale": torch.tensor(1.5),
        }

    return {"embed": {"e": torch.randn(999, 11, generator=g)}, "blocks": [block() for _ in range(3)]}


PLANS: dict[str, sf.Placement] = {
    "full_shard": sf.full_shard(DATA),
    "hybrid_shard": sf.hybrid_shard(shard="shard", replica="replica"),
    "zero1": sf.strategies.zero1(DATA),
    "hfsdp": sf.strategies.hfsdp(shard="shard", replica="replica"),
}
OPTIMIZERS: dict[str, Callable[[], so.Optimizer]] = {
    "adamw": lambda: so.adamw(0.1),
    "adamw8bit": lambda: so.adamw8bit(0.1),
    "ema": lambda: so.ema(so.sgd(0.1, momentum=0.9), 0.9),
    "master": lambda: so.fp32_master_weights(so.adamw(0.1)),
}

PAIRS = [*zip(PLANS, OPTIMIZERS, strict=True), ("hfsdp", "adamw"), ("zero1", "adamw8bit")]


def everything(seed: int, mesh: Any, plan: sf.Placement, optimizer: so.Optimizer) -> Any:
    params = sf.shard(tree(seed), mesh, plan, frozen=r".*\.scale")
    return {"params": params, "state": optimizer.init(params), "step": 0}


def squares(p: Any) -> Tensor:
    return torch.stack([x.double().square().sum() for x in optree.tree_leaves(p)]).sum()


def trained(kind: str, name: str) -> Any:
    """A step in memory."""
    optimizer = OPTIMIZERS[name]()
    found = everything(0, mesh_of(replica=1, shard=dist.get_world_size()), PLANS[kind], optimizer)
    f = sf.stage(squares)
    grads = sf.grad(lambda ps: f(ps["embed"]) + sum(f(p) for p in ps["blocks"]))(found["params"])
    params, state = optimizer.step(found["params"], grads, found["state"])
    return {"params": params, "state": state, "step": 1}


def saved_from_memory(folder: Path) -> None:
    for kind, name in PAIRS:
        checkpoint.save(folder / f"{kind} {name}", trained(kind, name))


def through_disk(folder: Path, scratch: Path) -> list[str]:
    """Loads everything onto disk, and saves it from there; what of it was not there."""
    mesh, wrong = sf.make_mesh(device="cpu", scratch=scratch, replica=2, shard=1), []
    for kind, name in PAIRS:
        like = everything(
            1, mesh, PLANS[kind].with_tiers(params="disk", grads="disk", state="disk"), OPTIMIZERS[name]()
        )
        for donate in (True, False):
            found = checkpoint.load(folder / f"{kind} {name}", like, donate=donate)
            wrong += [f"{kind}, {name}"] * (not all_on_disk(found))
        checkpoint.save(folder / f"{kind} {name} again", found)
    return [*wrong, *["pages"] * (pages_of(scratch) > 0.1)]


def back_in_memory(folder: Path) -> list[str]:
    """What did not come back as it was."""
    wrong = []
    for kind, name in PAIRS:
        first = trained(kind, name)
        found = [checkpoint.load(folder / f"{kind} {name}{more}", zeros(first)) for more in ("", " again")]
        wrong += [f"{kind}, {name}"] * (not same(*found) or same(found[0], zeros(first)))
    return wrong


def test_from_memory_to_disk_on_fewer_ranks_and_back_bit_for_bit(tmp_path: Path) -> None:
    world(4).run(saved_from_memory, tmp_path)
    assert world(2).run(through_disk, tmp_path, tmp_path / "scratch") == [[]] * 2
    assert world(4).run(back_in_memory, tmp_path) == [[]] * 4


STEPS = 3


def model(params: Any, x: Tensor) -> Tensor:
    f = sf.stage(residual, remat=True)
    for p in sf.layers(params["blocks"]):
        x = f(p, x)
    return sf.stage(head)(params["head"], x).square().sum()


def run(state: Any, optimizer: so.Optimizer, steps: int) -> Any:
    for _ in range(steps):
        g = torch.Generator().manual_seed(state["step"])
        x = torch.randn(dist.get_world_size(), 2, 48, generator=g)[dist.get_rank()]
        grads = sf.grad(model)(state["params"], x)
        params, inner = optimizer.step(state["params"], grads, state["state"])
        state = {"params": params, "state": inner, "step": state["step"] + 1}
    return state


def resumed(folder: Path, scratch: Path) -> list[bool]:
    """Whether a run on disk that was interrupted is that in memory that was not."""
    mesh, optimizer = sf.make_mesh(device="cpu", scratch=scratch, shard=2), so.adamw(0.1)

    def begun(seed: int, plan: sf.Placement) -> Any:
        g = torch.Generator().manual_seed(seed)
        whole: Any = {"blocks": [{"w": torch.randn(48, 48, generator=g), "b": torch.zeros(48)} for _ in range(4)]}
        params = sf.shard(whole | {"head": {"o": torch.randn(48, 3, generator=g)}}, mesh, plan)
        return {"params": params, "state": optimizer.init(params), "step": 0}

    away = sf.full_shard("shard").with_tiers(params="disk", grads="disk", state="disk")
    want = run(begun(0, sf.full_shard("shard")), optimizer, 2 * STEPS)
    on = run(begun(0, away), optimizer, STEPS)
    checkpoint.save(folder / "half", on)
    pending = checkpoint.save_async(folder / "half again", on)
    on = run(on, optimizer, STEPS)
    pending.wait()
    found = [same(on, want), all_on_disk(on)]
    for name in ("half", "half again"):
        again = run(checkpoint.load(folder / name, begun(1, away)), optimizer, STEPS)
        found += [same(again, want), all_on_disk(again)]
    return found


@pytest.mark.world(2)
def test_a_run_on_disk_resumes_bit_for_bit(world: World, tmp_path: Path) -> None:
    assert world.run(resumed, tmp_path, tmp_path / "scratch") == [[True] * 6] * 2


# --- snapshots ---


def overwritten(folder: Path, scratch: Path) -> list[bool]:
    """Values change after `save_async` has returned, and before the first of them is written."""
    mesh, go_on = sf.make_mesh(device="cpu", scratch=scratch, shard=2), threading.Event()
    params = sf.shard(tree(0), mesh, sf.full_shard("shard").with_tiers(params="disk"))
    want, tensor = sf.shards.to_tier(params, "device"), Writer.tensor

    def late(*args: Any) -> None:
        assert go_on.wait(30)
        tensor(*args)

    found = []
    for turn in range(2):  # the second finds the room of the first
        go_on.clear()
        with mock.patch.object(Writer, "tensor", late):
            pending = checkpoint.save_async(folder / str(turn), params)
            for i, x in enumerate(optree.tree_leaves(params)):
                if i % 2 and x.numel():
                    copying.copy_(x, torch.zeros(x.shape, dtype=x.dtype))  # as a step does
                else:
                    x.zero_()
            go_on.set()
            pending.wait()
        found.append(same(params, optree.tree_map(torch.zeros_like, want)))
        found.append(same(checkpoint.load(folder / str(turn), params), want))
    (room,) = {file.nbytes for file in writing._files.values() if file.folder == os.path.abspath(scratch)}
    held = sum(-(-x.nbytes // 4096) * 4096 for x in optree.tree_leaves(params))
    return [*found, room <= held]


@pytest.mark.world(2)
def test_what_is_saved_in_the_background_is_as_it_was_though_it_is_overwritten(world: World, tmp_path: Path) -> None:
    assert world.run(overwritten, tmp_path, tmp_path / "scratch") == [[True] * 5] * 2


def without_room(folder: Path, scratch: Path) -> Any:
    mesh = sf.make_mesh(device="cpu", scratch=scratch, shard=2)
    params = sf.shard(tree(0), mesh, sf.full_shard("shard").with_tiers(params="disk"))
    checkpoint.save(folder / "1", params)
    full = OSError(errno.ENOSPC, "No space left on device") if dist.get_rank() == 1 else None
    with mock.patch.object(os, "posix_fallocate", side_effect=full, wraps=os.posix_fallocate):
        pending = checkpoint.save_async(folder / "2", params)
        said = refused(pending.wait)
    checkpoint.save_async(folder / "3", params).wait()
    return said, [path.name for path in sorted(folder.iterdir())], checkpoint.latest(folder)


@pytest.mark.world(2)
def test_a_disk_without_room_for_a_snapshot_is_an_error_on_every_rank(world: World, tmp_path: Path) -> None:
    (said, names, newest), other = world.run(without_room, tmp_path / "run", tmp_path / "scratch")
    assert (said, names, newest) == other
    assert "rank 1" in said
    assert "of snapshot in" in said
    assert "MB are free there: make room, or name another folder" in said
    assert (names, newest) == (["1", "3"], tmp_path / "run" / "3")


def cut_short(folder: Path, scratch: Path) -> Any:
    """The file of one rank loses its end while nobody looks."""
    mesh = sf.make_mesh(device="cpu", scratch=scratch, shard=2)
    params = sf.shard(tree(0), mesh, sf.full_shard("shard").with_tiers(params="disk"))
    want = sf.shards.to_tier(params, "device")
    checkpoint.save(folder / "1", params)
    place = tensors.place_of(params["embed"].values)
    assert place is not None
    if dist.get_rank() == 1:
        os.ftruncate(place.stretch.file.plain, place.stretch.offset)
    said = [
        refused(lambda: checkpoint.save(folder / "2", params)),
        refused(checkpoint.save_async(folder / "3", params).wait),
    ]
    again = checkpoint.load(folder / "1", zeros(want))
    return said, [path.name for path in sorted(folder.iterdir())], same(again, want)


@pytest.mark.world(2)
def test_a_file_that_was_cut_off_is_an_error_on_every_rank_and_the_last_checkpoint_stays(
    world: World, tmp_path: Path
) -> None:
    (said, names, loaded), other = world.run(cut_short, tmp_path / "run", tmp_path / "scratch")
    assert (said, names, loaded) == other
    assert (names, loaded) == (["1"], True)
    for one in said:
        assert "rank 1" in one
        assert "something else has truncated it" in one


# --- from others ---


def of_torch(folder: Path, scratch: Path) -> list[bool]:
    """Torch's AdamW onto disk, and a turned file of safetensors, whose elements go to no place in order."""
    mesh = sf.make_mesh(device="cpu", scratch=scratch, shard=2)
    plan = sf.full_shard("shard").with_tiers(params="disk", state="disk")
    whole = {"a": {"w": torch.randn(70, 30, generator=torch.Generator().manual_seed(0))}}
    here, away = sf.shard(whole, mesh, sf.full_shard("shard")), sf.shard(whole, mesh, plan)
    optimizer = so.adamw(0.1)
    _, state = optimizer.step(here, here, optimizer.init(here))
    checkpoint.save(folder / "torch", {"optim": checkpoint.torch_optimizer(state)})
    empty = optimizer.init(away)
    got = checkpoint.load_torch_optimizer(folder / "torch", empty, part="optim")
    rules = [(r"(.*)\.w", r"\1.weight", "T")]
    checkpoint.export_hf(folder / "turned", away, names=rules, dtype=torch.float64)
    zeros = sf.shards.to_tier(optree.tree_map(torch.zeros_like, here), "disk")
    back = checkpoint.import_hf(folder / "turned", zeros, names=rules)
    stay = pages_of(scratch)
    return [
        same(got, state), all_on_disk(got["mean"]), same(back, away), all_on_disk(back),
        same(sf.unshard(away), whole), stay < 0.1,
    ]  # fmt: skip


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (torch.nn.Linear(96, 80), torch.nn.LayerNorm(80), torch.nn.Linear(80, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def of_modules(folder: Path, scratch: Path) -> list[bool]:
    """Files of a module onto disk, by all ranks and by one, in few bits too, and back; and adapters merged there."""
    mesh = sf.make_mesh(device="cpu", scratch=scratch, shard=2)
    here, away = sf.full_shard("shard"), sf.full_shard("shard").with_tiers(params="disk")
    found, stay = [], 0.0
    for name, few in (("plain", False), ("packed", True)):
        model = interop.functional(Net())
        if few:
            model.tree = quant.quantize(model.tree, quant.nf4(), r".*weight")
        want = sf.shard(model.tree, mesh, here)
        interop.save_pretrained(folder / name, model, want)
        for source in (None, 1):
            got = interop.load(folder / name, model, mesh, away, src_rank=source)
            interop.save_pretrained(folder / f"{name} again", model, got)
            stay = max(stay, pages_of(scratch))
            files = [(folder / one / "model.safetensors").read_bytes() for one in (name, f"{name} again")]
            found += [all_on_disk(got), same(got, want), files[0] == files[1]]
    model = interop.functional(Net())
    params, base = (sf.shard(model.tree, mesh, plan) for plan in (away, here))
    adapters = optree.tree_map(lambda x: x + 0.5, lora.init(model, ["first", "last"], rank=3, dora=True))
    merged, want = (lora.merge(one, adapters, model=model) for one in (params, base))
    stay = max(stay, pages_of(scratch))
    return [*found, all_on_disk(merged), same(merged, want), not same(params, merged), same(params, base), stay < 0.1]


@pytest.mark.world(2)
def test_modules_files_onto_disk_and_back(world: World, tmp_path: Path) -> None:
    assert world.run(of_modules, tmp_path, tmp_path / "scratch") == [[True] * 17] * 2


@pytest.mark.world(2)
def test_others_files_onto_disk(world: World, tmp_path: Path) -> None:
    assert world.run(of_torch, tmp_path, tmp_path / "scratch") == [[True] * 6] * 2
