"""Tensors, ops and modes of every kind go through a checked call as they would, and have the type that they should."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils.flop_counter import FlopCounterMode

import shardfn as sf
from shardfn import P, callers
from shardfn.check import callsites, findings
from shardfn.shards.pieces import units
from shardfn.testing import World, WorldError, world


def test_the_files_by_which_callers_are_known_are_there() -> None:
    package = Path(sf.__file__).parent
    for place in (*callsites._BACKWARD, *callsites._OPS, *callsites._ENGINE):
        assert (package / place).is_file(), place
    for place in (
        *callsites._MODES,
        *callsites._STAND_INS,
        *callsites._MODELS,
        *callers._CALLING,
        callsites._FUNCTIONAL,
    ):
        assert Path(place).exists(), place


def test_another_thread_reads_a_line_while_this_one_is_read(tmp_path: Path) -> None:
    """A collection in the middle lets it run."""
    file = tmp_path / "line.py"
    file.write_text("y = f(g(a + b, [c for d in e if (c, d)], {1: h(i)}))\n")
    site = callsites.Site(str(file), 1, "f", 0, (1, 1, 4, 52))
    here, others = threading.get_ident(), ThreadPoolExecutor(1)

    def collected(phase: str, _: object) -> None:
        if threading.get_ident() == here and phase == "start":
            others.submit(lambda: site.target).result(60)

    before = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(5)
    try:
        read = {(site.first_argument, site.target) for _ in range(5)}
    finally:
        gc.callbacks.remove(collected)
        gc.set_threshold(*before)
        others.shutdown()
    assert read == {("g(a + b, [c for d in e if (c, d)], {1: h(i)})", "y")}


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with world(2, "threads") as made:
        yield made


def once(f: Callable[..., Any], **more: Any) -> Any:
    """The first call of a function of what is the same on both ranks, and of what is each rank's own."""
    mesh = sf.make_mesh(a=2, device="cpu")
    own = torch.arange(5.0) + dist.get_rank()
    return sf.shard_map(f, mesh=mesh, in_specs=(P(), P("a")), out_specs=P(), **more)(torch.ones(5), own)


SUMS: dict[str, Callable[[], tuple[Any, Callable[[Any], Tensor]]]] = {
    "sparse": lambda: (torch.eye(5).to_sparse(), lambda s: torch.sparse.mm(s, torch.ones(5, 1)).sum()),
    "compressed": lambda: (torch.eye(5).to_sparse_csr(), lambda s: (s @ torch.ones(5, 1)).sum()),
    "opaque": lambda: (torch.ones(5).to_mkldnn(), lambda s: s.to_dense().sum()),
    "nested": lambda: (
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda s: torch.nested.to_padded_tensor(s, 0.0).sum(),
    ),
    "jagged": lambda: (
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda s: s.values().sum(),
    ),
    "quantized": lambda: (
        torch.quantize_per_tensor(torch.ones(5), 0.5, 0, torch.qint8),
        lambda s: s.dequantize().sum(),
    ),
}


def strange(kind: str) -> None:
    made, total = SUMS[kind]()
    assert once(lambda w, x: w * total(made)).tolist() == [5.0] * 5  # closed over
    if kind == "nested":
        return  # has no shape, by which a call is known
    mesh = sf.make_mesh(a=2, device="cpu")
    passed = sf.shard_map(lambda s: total(s), mesh=mesh, in_specs=..., out_specs=P())
    assert float(passed(made)) == 5.0


@pytest.mark.parametrize("kind", SUMS)
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_every_layout(ranks: World, kind: str) -> None:
    ranks.run(strange, kind)


def into(w: Tensor, x: Tensor) -> Tensor:
    buffer = x * 1
    return torch.mul(w, 2, out=buffer)


def unscaled(w: Tensor, x: Tensor) -> Tensor:
    gradients = [w * 2, x * 1]
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros(1), torch.ones(1))
    return gradients[0]


def distributed(w: Tensor, x: Tensor) -> Tensor:
    whole: Any = DTensor.from_local(x, sf.make_mesh(a=2, device="cpu"), [Shard(0)], run_check=False)
    found: Tensor = w * (whole * 2).sum().full_tensor()
    return found


def silent(f: Callable[..., Any], expected: float) -> None:
    assert once(f).tolist() == [expected] * 5


@pytest.mark.parametrize(("f", "expected"), [(into, 2.0), (unscaled, 2.0), (distributed, 50.0)])
def test_what_only_passes_by_something_that_varies_is_the_same(
    ranks: World, f: Callable[..., Any], expected: float
) -> None:
    ranks.run(silent, f, expected)


def set_to(w: Tensor, x: Tensor) -> Tensor:
    other = torch.empty(0)
    other.set_(x.untyped_storage(), 0, (5,), (1,))
    return other * 2


def normed(w: Tensor, x: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten._fused_rms_norm(x, [5], w, 1e-5)[0]
    return found


def dropped(w: Tensor, x: Tensor) -> Tensor:
    return torch.native_dropout(x, 0.0, True)[0]


def varies(f: Callable[..., Any]) -> str:
    with pytest.raises(sf.check.VaryingError) as caught:
        once(f)
    (found,) = caught.value.findings
    assert found.kind == "output"
    return str(found)


@pytest.mark.parametrize("f", [set_to, normed, dropped])
def test_what_is_made_of_a_cut_argument_is_said_to_vary_by_it(ranks: World, f: Callable[..., Any]) -> None:
    for said in ranks.run(varies, f):
        assert "(by x)" in said


def counted() -> None:
    counts = FlopCounterMode(display=False) if dist.get_rank() == 0 else contextlib.nullcontext()
    with counts:
        assert once(lambda w, x: sf.psum(x, "a")).tolist() == [1.0, 3.0, 5.0, 7.0, 9.0]
        with pytest.raises(sf.check.VaryingError):
            once(lambda w, x: x)


def test_a_mode_that_counts_may_run_on_one_rank_alone(ranks: World) -> None:
    ranks.run(counted)


def told_apart() -> None:
    once(lambda w, x: sf.psum(x, "a"), check=dist.get_rank() == 0)


def test_all_ranks_check_or_none(ranks: World) -> None:
    with pytest.raises(WorldError, match=re.escape("rank 0 has the check 'first'; rank 1 has the check 'off'")):
        ranks.run(told_apart)


DRAWS = "def draw(w, x):\n    _ = {rank}\n    return w * torch.rand(5, generator=generator)\n"


def elsewhere() -> None:
    rank = dist.get_rank()
    names: dict[str, Any] = {"torch": torch, "generator": torch.Generator().manual_seed(1)}
    exec(compile(DRAWS.format(rank=rank), f"/node{rank}/train.py", "exec"), names)
    once(names["draw"])


def test_the_same_file_may_lie_in_another_folder_on_each_rank(ranks: World) -> None:
    ranks.run(elsewhere)


def summed_by_leaf() -> str:
    """A psum of what is in flat shards, which does not know that it is given pieces, before an optimizer's step."""
    mesh, optimizer = sf.make_mesh(a=2, device="cpu"), sf.optim.sgd(0.1)
    flat = sf.shard({"w": torch.ones(3, 2)}, mesh, sf.full_shard("a"))
    layer = sf.stage(lambda p, x: x @ p["w"])

    def step(params: Any, state: Any, x: Tensor) -> Any:
        grads = sf.grad(lambda p: sf.pmean(layer(p, x).mean(), "a"))(params)
        return optimizer.step(params, optree.tree_map(lambda g: sf.psum(g, "a"), grads), state)

    with pytest.raises(sf.check.VaryingError) as caught:
        sf.shard_map(step, mesh=mesh, in_specs=(..., ..., P("a")), out_specs=...)(
            flat, optimizer.init(flat), torch.ones(2, 3) + dist.get_rank()
        )
    return f"{caught.value.findings[0].kind}: {caught.value}"


def test_a_sum_of_what_is_in_flat_shards_is_told_where_an_optimizer_gets_it(ranks: World) -> None:
    for said in ranks.run(summed_by_leaf):
        assert said.startswith("sum: ")
        assert re.search(r"psum at \S*test_kinds.py:\d+ has put pieces of different parameters together", said)


def whole_rows(own: bool) -> list[str]:
    """A sum over four rows divided by their number, where each rank has all of them or its own."""
    mesh, w = sf.make_mesh(a=2, device="cpu"), torch.ones(3, dtype=torch.float64)
    x = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return sf.psum((x @ sf.pvary(w, "a")).square().sum(), "a") / 4

    f = sf.shard_map(sf.value_and_grad(loss), mesh=mesh, in_specs=(P(), P("a")), out_specs=P())
    try:
        f(w, x.chunk(2)[dist.get_rank()] if own else x)
    except sf.check.VaryingWarning as warning:  # an error in these tests
        return [finding.kind for finding in warning.findings]
    return []


def test_rows_that_all_ranks_have_whole_are_the_one_finding_although_their_number_is_that_of_all(ranks: World) -> None:
    assert ranks.run(whole_rows, False) == [["same"]] * 2
    assert ranks.run(whole_rows, True) == [[]] * 2


@pytest.mark.parametrize("many", [1, 2, 5000])
@pytest.mark.parametrize("probably", [True, False])
def test_a_message_is_short_whatever_the_tree(many: int, probably: bool) -> None:
    path = "params" + "['a_block_with_a_long_name']" * 100
    found = [findings.Finding("gradient", ("data",), path, "", "", f"{path} varies: fix {i}") for i in range(many)]
    message = findings.findings_message("a" * 5000, tuple(found), probably)
    assert len(message) <= 2000
    assert "fix 0" in message
    assert many == 1 or f"{many} findings" in message
    assert many < 5000 or re.search(r"and \d+ more, in the error's findings$", message)


def told_of_replicas(drifted: bool, way: str) -> str:
    """What is said of a weight under `...` that ranks update, or that goes through `pvary` inside of the loss."""
    mesh = sf.make_mesh(a=2, device="cpu")
    w = torch.arange(1.0, 4.0) * (1 + drifted * dist.get_rank())

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x @ (w if way == "step" else sf.pvary(w, "a"))).square().sum()

    def step(w: Tensor, x: Tensor) -> Tensor:
        if way == "autograd":
            w = w.detach().requires_grad_()
            return w - torch.autograd.grad(loss(w, x), w)[0]
        return w - (sf.grad if way in ("grad", "step") else torch.func.grad)(loss)(w, x)

    x = torch.arange(6.0).view(2, 3) + dist.get_rank()
    with pytest.raises(sf.check.VaryingError) as caught:
        sf.shard_map(step, mesh=mesh, in_specs=(..., P("a")), out_specs=...)(w, x)
    return f"{caught.value.findings[0].kind}: {caught.value}"


@pytest.mark.parametrize("way", ["grad", "autograd", "func"])
def test_gradients_of_replicas_that_differ_are_not_added_up_in_silence(ranks: World, way: str) -> None:
    for said in ranks.run(told_of_replicas, True, way):
        assert said.startswith("vary: ")


def test_who_takes_steps_of_each_rank_under_no_spec_is_told_where_pvary_stands(ranks: World) -> None:
    for said in ranks.run(told_of_replicas, False, "step"):
        assert re.search(
            "gradient: .*each rank takes steps of its own, write it outside of what is differentiated", said
        )


def piece_that_varies(varies: bool) -> Any:
    mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    flat = sf.shard({"w": torch.ones(4, 4)}, mesh, sf.hybrid_shard(shard="shard", replica="replica"))

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def part(flat: Any) -> Any:
        (unit,) = units(flat).each
        return unit.part(unit.entries, 0, 4, (unit.values + varies * sf.axis_index("replica"))[:4])

    return part(flat).values.sum()


@pytest.mark.world(4)
def test_a_piece_of_a_shard_is_the_same_on_all_replicas(world: World) -> None:
    world.run(piece_that_varies, False)
    with pytest.raises(WorldError, match="replica"):
        world.run(piece_that_varies, True)
