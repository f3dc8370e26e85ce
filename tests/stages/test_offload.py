"""Activations that leave their device until backward: what leaves, that it comes back in time, and all that it was."""

from __future__ import annotations

import functools
import gc
import importlib
import tempfile
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardfn as sf
from shardfn import interop
from shardfn.compat import autograd
from shardfn.stages.schedule import schedule_of
from shardfn.testing import World, simulated
from shardfn.testing import world as shared_world
from shardfn.tiers import tensors
from shardfn.tiers.placing import file_of
from tests.heard import heard
from tests.models import distance, normal, squares, variables
from tests.reference import worst

on_threads = pytest.mark.world(2, "threads")
away: Any = importlib.import_module("shardfn.tiers.activations")
D = 4
EVERYTHING = sf.offload("disk", above=0)
INPUTS = sf.offload("disk", above=0, recompute=True)
Function = Callable[[Any, Tensor], Tensor]


# --- what autograd saves ---


def plain(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"] + p["b"])


def transposed(p: Any, x: Tensor) -> Tensor:
    y = (x @ p["w"]).t().sin()
    return (y.t() * x).exp() @ p["w"].t()


def chunks(p: Any, x: Tensor) -> Tensor:
    q, k, v = torch.cat([x @ p["w"], x * p["b"], x.sin()], dim=-1).chunk(3, dim=-1)
    return torch.softmax(q @ k.t(), -1) @ v + q[:, :1] * k[1:2] * v[-1]


def a_column(p: Any, x: Tensor) -> Tensor:
    wide = (x @ p["w"])[:, :, None].expand(-1, -1, 64).contiguous().cumsum(-1)
    return x * wide[:, :, 3].square()


def broadcast(p: Any, x: Tensor) -> Tensor:
    row = (x @ p["w"]).mean(0)
    return row.expand_as(x).sin() * row[None].expand_as(x) * x


def complex_numbers(p: Any, x: Tensor) -> Tensor:
    z = torch.fft.fft(torch.tanh(x @ p["w"]), norm="ortho")
    return torch.tanh((z.conj() * z * z.conj().imag).real) + torch.view_as_real(z * z.conj().sin()).sum(-1) / 8


def integers(p: Any, x: Tensor) -> Tensor:
    order = (x @ p["w"]).argsort(-1)
    return x.gather(-1, order) * p["b"][order] + torch.nn.functional.embedding(order, p["w"]).sum(-1)


def nothing(p: Any, x: Tensor) -> Tensor:
    return x * p["b"] + (x[:0].exp() @ p["w"]).sum()


def in_place(p: Any, x: Tensor) -> Tensor:
    y, z = (x @ p["w"]).tanh_(), x * p["b"]
    z[0] = z[0] * 2
    return (y * z).relu_()


def twice(p: Any, x: Tensor) -> Tensor:
    y = torch.sigmoid(x @ p["w"])
    return y * y + y.view(-1)[::2].repeat(2).view_as(y) * y


def dropped(p: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(plain(p, x), 0.5) * torch.nn.functional.layer_norm(x, (D,), p["b"])


def sparse(p: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm((x > 0).to(x.dtype).to_sparse(), p["w"]) * x


def in_single(p: Any, x: Tensor) -> Tensor:
    return (x.float() @ p["w"].float()).bfloat16().sin().to(x.dtype) * x


class Keeping(torch.autograd.Function):
    """Its gradient is what it has saved: memory that others may not get meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.exp())
        return x.sum(-1, keepdim=True).expand_as(x).clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        assert ctx.saved_tensors[0].equal(saved)
        return saved


def handed_on(p: Any, x: Tensor) -> Tensor:
    return Keeping.apply(x @ p["w"]) + x


FUNCTIONS: dict[str, Function] = {
    f.__name__: f
    for f in (
        plain, transposed, chunks, a_column, broadcast, complex_numbers, integers, nothing, in_place, twice, dropped,
        sparse, in_single, handed_on,
    )
}  # fmt: skip


# --- ways to a gradient ---


def model(stage: Any, ps: Any, x: Tensor) -> Tensor:
    for p in sf.layers(ps):
        x = stage(p, x)
    return x.square().sum()


def by_steps(stage: Any, ps: Any, x: Tensor) -> Any:
    return sf.value_and_grad(lambda ps, x: model(stage, ps, x), argnums=(0, 1))(ps, x)


def by_backward(stage: Any, ps: Any, x: Tensor) -> Any:
    leaves, x = variables(ps), x.clone().requires_grad_()
    loss = model(stage, leaves, x)
    loss.backward()
    return loss.detach(), (optree.tree_map(lambda p: p.grad, leaves), x.grad)


def by_two_backwards(stage: Any, ps: Any, x: Tensor) -> Any:
    leaves = variables(ps)
    loss = model(stage, leaves, x)
    loss.backward(retain_graph=True)
    first = optree.tree_map(lambda p: p.grad.clone(), leaves)
    loss.backward()
    return loss.detach(), (first, optree.tree_map(lambda p: p.grad, leaves))


def by_functorch(stage: Any, ps: Any, x: Tensor) -> Any:
    return torch.func.grad_and_value(lambda ps: model(stage, ps, x))(ps)


def by_two_derivatives(stage: Any, ps: Any, x: Tensor) -> Any:
    leaves = variables(ps)
    every = optree.tree_leaves(leaves)
    found = torch.autograd.grad(model(stage, leaves, x), every, create_graph=True)
    return torch.autograd.grad(torch.stack([g.square().sum() for g in found]).sum(), every)


def by_parts(stage: Any, ps: Any, x: Tensor) -> Any:
    return sf.accumulate(lambda ps, x: model(stage, ps, x), [(x,), (2 * x,), (3 * x,)])(ps)


def inside_another(stage: Any, ps: Any, x: Tensor) -> Any:
    def outer(ps: Any) -> Tensor:
        y = stage(ps[0], x)
        inner = sf.grad(lambda y: model(stage, ps[1:], y))(y.detach())
        return model(stage, ps, y * inner.detach())

    return sf.value_and_grad(outer)(ps)


WAYS = {
    f.__name__: f
    for f in (by_steps, by_backward, by_two_backwards, by_functorch, by_two_derivatives, by_parts, inside_another)
}


def rows(rank: int, n: int = D) -> Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) / 2


def setting(scratch: str, depth: int = 3, **options: Any) -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu", scratch=scratch)
    return mesh, sf.shard(squares(depth), mesh, sf.full_shard("shard")), rows(mesh.get_rank())


def same(way: str, function: str, scratch: str, **options: Any) -> tuple[bool, int]:
    """Whether all numbers are those of `remat=False`, and how many bytes of a file it took."""
    mesh, flat, x = setting(scratch)
    found = []
    for remat in (False, EVERYTHING, INPUTS):
        torch.manual_seed(0)
        stage = sf.stage(FUNCTIONS[function], remat=remat, **options)
        found.append(optree.tree_leaves(WAYS[way](stage, flat, x)))
    assert all(a.isfinite().all() for a in found[0])
    same = all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    return same, file_of(mesh, "activations").nbytes


@pytest.mark.parametrize("function", FUNCTIONS)
def test_numbers_are_those_of_what_stays(world: World, tmp_path: Any, function: str) -> None:
    for way in ("by_steps", "by_backward"):
        for equal, nbytes in world.run(same, way, function, str(tmp_path)):
            assert equal, way
            assert nbytes > 0, way


# --- when ---


def all_written(self: Any) -> None:
    """In the place of `Away._settle`, so that nothing depends on how fast the disk is."""
    while self._writing:
        self._end_write()


def order(scratch: str) -> list[str]:
    """In what order the file is read and calls compute their gradient."""
    _, flat, x = setting(scratch)
    found: list[str] = []
    kept, settle = away.reading, away.Away._poll_transfers

    def read(*args: Any, **options: Any) -> Any:
        found.append("read")
        return kept(*args, **options)

    def block(p: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x @ p["w"])
        y.register_hook(lambda g: found.append("backward"))
        return x + y

    stage = sf.stage(block, remat=EVERYTHING)
    away.reading, away.Away._poll_transfers = read, all_written
    try:
        sf.value_and_grad(lambda ps: model(stage, ps, x))(flat)
    finally:
        away.reading, away.Away._poll_transfers = kept, settle
    return found


def test_what_comes_next_is_read_while_a_stage_computes(world: World, tmp_path: Any) -> None:
    for found in world.run(order, str(tmp_path)):
        calls = " ".join(found).split("backward")
        assert calls[0].count("read") > calls[1].count("read") > 0, "two calls, then the one before"
        assert calls[-1].count("read") == 0, "nothing is left for the last"


# --- what stays in memory ---


class Alive(TorchDispatchMode):
    """Counts the storages of some size that are there, at the most."""

    def __init__(self, above: int) -> None:
        super().__init__()
        self.above, self.most = above, 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for y in optree.tree_leaves(found):
            large = isinstance(y, Tensor) and y.layout is torch.strided and y.untyped_storage().nbytes() >= self.above
            if large and tensors.place_of(torch.empty(0, dtype=y.dtype).set_(y.untyped_storage())) is None:
                self.known.setdefault(autograd.storage_of(y), autograd.weak_storage(y))
        self.known = {key: ref for key, ref in self.known.items() if not ref.expired()}
        self.most = max(self.most, len(self.known))
        return found


def most(remat: Any, depth: int, scratch: str) -> int:
    _, flat, _ = setting(scratch, depth)
    x = rows(0, 2**15)
    stage = sf.stage(plain, remat=remat)
    counted, before = Alive(x.nbytes), away.WRITING
    away.WRITING = 0  # one after another
    try:
        with counted:
            sf.value_and_grad(lambda ps: model(stage, ps, x))(flat)
    finally:
        away.WRITING = before
    return counted.most


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_does_not_grow_with_depth(world: World, tmp_path: Any, recompute: bool) -> None:
    remat = sf.offload("disk", recompute=recompute)
    shallow, deep, deeper = (max(world.run(most, remat, n, str(tmp_path))) for n in (4, 8, 16))
    assert max(deep, deeper) <= shallow + 1, "one is on its way, or not yet"
    assert world.run(most, False, 16, str(tmp_path))[0] > 3 * shallow


def sent(remat: Any, scratch: str) -> int:
    """The bytes that a step writes to the file."""
    mesh, flat, x = setting(scratch)
    stage = sf.stage(chunks, remat=remat)
    sf.value_and_grad(lambda ps: model(stage, ps, x))(flat)
    return file_of(mesh, "activations").nbytes


def test_with_recomputation_only_inputs_leave(world: World, tmp_path: Any) -> None:
    everything, inputs = (world.run(sent, remat, str(tmp_path / name))[0] for name, remat in
                          (("all", EVERYTHING), ("inputs", INPUTS)))  # fmt: skip
    assert 0 < inputs < everything / 2


def kept(above: int, scratch: str) -> list[int]:
    """Bytes of the file after each of some calls: with a backward, without, with an error in the middle, and so on."""
    mesh, flat, x = setting(scratch)

    def block(p: Any, x: Tensor, fails: bool = False) -> Tensor:
        y = plain(p, x)
        if fails:
            raise KeyError("in the middle")
        return plain(p, y)

    stage = sf.stage(block, remat=sf.offload("disk", above))
    leaves, found = variables(flat), []
    for _ in range(4):
        sf.value_and_grad(lambda ps: model(stage, ps, x))(flat)
        model(stage, leaves, x)
        with pytest.raises(KeyError, match="in the middle"):
            stage(leaves[2], stage(leaves[1], x), fails=True)
        model(stage, leaves, x).backward()
        y = model(stage, leaves, x)
        y.backward(retain_graph=True)
        del y
        gc.collect()
        schedule_of(mesh).end()
        file = file_of(mesh, "activations")
        tensors.collect()
        found.append(file.nbytes - sum(len(free) * nbytes for nbytes, free in file._free.items()))
    return [*found, file.nbytes]


def test_stretches_are_given_back_whether_or_not_a_backward_comes(world: World, tmp_path: Any) -> None:
    for *found, nbytes in world.run(kept, 0, str(tmp_path)):
        assert found == [0] * 4
        assert nbytes > 0
    for found in world.run(kept, 2**20, str(tmp_path)):
        assert found == [0] * 5, "what is small stays"


# --- what is refused, and what is told ---


def changed(scratch: str, remat: Any) -> None:
    _, flat, x = setting(scratch)

    def block(p: Any, x: Tensor) -> Tensor:
        y = torch.exp(x @ p["w"])
        z = y * 2
        y.add_(1)
        return z + y

    stage = sf.stage(block, remat=remat)
    sf.value_and_grad(lambda ps: model(stage, ps, x))(flat)


def changed_outside(scratch: str, remat: Any) -> None:
    _, flat, x = setting(scratch)
    leaves = variables(flat)
    stage = sf.stage(plain, remat=remat)
    loss = stage(leaves[0], x).sum()
    x.mul_(2)
    loss.backward()


@pytest.mark.parametrize("remat", [False, EVERYTHING], ids=["stays", "leaves"])
@pytest.mark.parametrize("run", [changed, changed_outside])
def test_what_was_saved_must_not_change(world: World, tmp_path: Any, run: Any, remat: Any) -> None:
    for error in world.errors(run, str(tmp_path), remat):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            raise error or AssertionError("nothing")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [(("cloud",), ValueError), (("disk", -1), ValueError), (("disk", 1.5), TypeError), (("disk", True), TypeError)],
)
def test_a_place_and_a_size_make_sense(arguments: Any, kind: Any) -> None:
    with pytest.raises(kind, match="offload: "):
        sf.offload(*arguments)


def failing(scratch: str, what: str) -> tuple[str, bool]:
    """What is said when the file fails, and whether all is well afterwards."""
    mesh, flat, x = setting(scratch)
    stage = sf.stage(plain, remat=EVERYTHING)
    file = file_of(mesh, "activations")
    want = sf.value_and_grad(lambda ps: model(stage, ps, x))(flat)
    known = getattr(file, what)

    def broken(*_: Any) -> None:
        raise OSError(5, "the disk is gone")

    settle = away.Away._poll_transfers
    try:
        setattr(file, what, broken)
        away.Away._poll_transfers = all_written
        sf.value_and_grad(lambda ps: model(stage, ps, x))(flat)
        message = "nothing"
    except RuntimeError as error:
        message = str(error)
    finally:
        setattr(file, what, known)
        away.Away._poll_transfers = settle
    got = sf.value_and_grad(lambda ps: model(stage, ps, x))(flat)
    pairs = zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True)
    return message, all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_file_that_fails_is_an_error_and_does_no_lasting_harm(world: World, tmp_path: Any, what: str) -> None:
    assert world.run(failing, str(tmp_path), what) == [("the disk is gone", True)] * 2


def on_the_host(scratch: str) -> tuple[list[str], bool]:
    _, flat, x = setting(scratch)

    def named_alone(p: Any, x: Tensor) -> Tensor:
        return plain(p, x)

    found = []
    with heard() as said:
        for remat in (False, "offload", sf.offload()):
            found.append(optree.tree_leaves(by_steps(sf.stage(named_alone, remat=remat), flat, x)))
    return said, all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_on_a_mesh_of_cpus_the_host_changes_nothing(world: World, tmp_path: Any) -> None:
    for said, equal in world.run(on_the_host, str(tmp_path)):
        assert equal
        (message,) = said
        assert "it changes nothing here" in message


# --- with others ---


def hooked(scratch: str) -> tuple[int, bool]:
    """How much hooks around a stage see of what does not leave, and whether they do no harm."""
    _, flat, x = setting(scratch)
    want = by_steps(sf.stage(plain), flat, x)
    seen: list[int] = []
    stage = sf.stage(plain, remat=sf.offload("disk", above=D * D * 8))

    def pack(x: Tensor) -> Tensor:
        seen.append(x.nbytes)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        got = by_steps(stage, flat, x)
    pairs = zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True)
    return len(seen), all(torch.equal(a, b) for a, b in pairs)


def test_hooks_around_a_stage_get_what_stays(world: World, tmp_path: Any) -> None:
    for seen, equal in world.run(hooked, str(tmp_path)):
        assert equal
        assert seen > 0


def checkpointed(scratch: str) -> bool:
    _, flat, x = setting(scratch)
    found = []
    for remat in (False, EVERYTHING):
        stage = sf.stage(plain, remat=remat)
        again = functools.partial(torch.utils.checkpoint.checkpoint, stage, use_reentrant=False)
        found.append(optree.tree_leaves(by_steps(again, flat, x)))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_torchs_checkpoint_may_be_around_it(world: World, tmp_path: Any) -> None:
    assert all(world.run(checkpointed, str(tmp_path)))


def a_module(scratch: str) -> tuple[bool, int]:
    mesh = sf.make_mesh(shard=-1, device="cpu", scratch=scratch)
    x, found = rows(mesh.get_rank()).float(), []
    for remat in (False, EVERYTHING):
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh()) for _ in range(3)]
        made = interop.functional(torch.nn.Sequential(*layers), remat=remat)
        flat = sf.shard(made.tree, mesh, sf.full_shard("shard"))
        found.append(optree.tree_leaves(sf.value_and_grad(lambda ps, made=made: made(ps, x).square().sum())(flat)))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True)), file_of(mesh, "activations").nbytes


def test_stages_of_modules_take_it_too(world: World, tmp_path: Any) -> None:
    for equal, nbytes in world.run(a_module, str(tmp_path)):
        assert equal
        assert nbytes > 0


@on_threads
def test_ranks_may_be_threads(world: World, tmp_path: Any) -> None:
    for equal, nbytes in world.run(same, "by_steps", "chunks", str(tmp_path)):
        assert equal
        assert nbytes > 0


def compiled(scratch: str) -> tuple[bool, int]:
    mesh, flat, x = setting(scratch)
    found = []
    for remat in (False, EVERYTHING):
        stage = sf.stage(torch.compile(plain, backend="aot_eager"), remat=remat)
        found.append(optree.tree_leaves(by_steps(stage, flat, x)))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True)), file_of(mesh, "activations").nbytes


def test_a_compiled_function_may_be_inside(world: World, tmp_path: Any) -> None:
    for equal, nbytes in world.run(compiled, str(tmp_path)):
        assert equal
        assert nbytes > 0


def pretended() -> tuple[int, int, list[Any]]:
    """How many stretches leave a device and come back, and what of the host's memory is read too early."""
    out, back = [], []
    copy, bring = away.Away._copy, away.Away.bring

    def copied(self: Any, one: Any, nbytes: int) -> None:
        out.append(one)
        copy(self, one, nbytes)

    def brought(self: Any, one: Any) -> Any:
        back.append(one.here is None)
        return bring(self, one)

    away.Away._copy, away.Away.bring = copied, brought
    with simulated(2) as device:
        mesh = sf.make_mesh(shard=2, device=device.name)
        whole = optree.tree_map(lambda x: x.to(device.name), squares(3))
        flat = sf.shard(whole, mesh, sf.full_shard("shard"))
        stage = sf.stage(plain, remat=sf.offload(above=0))
        x = torch.ones(D, D, dtype=torch.float64, device=device.name)
        device.reset_counts()
        sf.value_and_grad(lambda ps: model(stage, ps, x))(flat)
        return len(out), sum(back), device.races


def test_a_device_sends_them_to_the_host() -> None:
    out, back, races = shared_world(1, "alone").run(pretended)[0]
    assert out >= 4, "the argument of the first call, and what each call computes, which is the next one's argument"
    assert back > 0, "some had gone when backward needed them; others were still there"
    assert races == []


# --- what stays ---


def called_twice() -> float:
    """A stage that is called first on what needs no gradient, and so saves its weight in a later call alone."""
    mesh = sf.make_mesh(shard=-1, device="cpu", scratch=tempfile.gettempdir())
    params, found = sf.shard([{"w": normal(4, 4, seed=k)} for k in range(3)], mesh, sf.full_shard("shard")), []
    for options in ({}, {"remat": sf.offload("disk", above=0)}):
        f = sf.stage(lambda p, x: torch.tanh(x @ p["w"]), **options)  # type: ignore[call-overload]

        def loss(ps: Any, f: Any = f) -> torch.Tensor:
            x = normal(3, 4, seed=9)
            for i in (0, 0, 1, 2, 1):
                x = f(ps[i], x)
            return x.sum()

        found.append(sf.grad(loss)(params))
    return max(distance(a.values, b.values) for a, b in zip(*found, strict=True))


@pytest.mark.world(2)
def test_parameters_stay_also_where_backward_does_not_gather_them(world: World) -> None:
    assert worst(world.run(called_twice)) == 0
