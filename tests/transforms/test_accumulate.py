"""Gradients of a batch, a micro-batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.func import grad

import shardfn as sf
from shardfn.testing import World
from tests.models import STRATEGIES, distance, normal, plainly, residual, squares
from tests.reference import worst

jvp: Any = torch.func.jvp  # whose types say that it always returns aux

D, DEPTH = 4, 3
DEFERS = ["nothing", "replicas", "all"]
UNEVEN = [1, 4, 2, 1]


def params() -> Any:
    return {"blocks": squares(DEPTH), "frozen": normal(D, seed=20), "unused": normal(3, seed=21)}


def net(stage: Any, ps: Any, x: Tensor) -> Tensor:
    f = stage(residual)
    for p in sf.layers(ps["blocks"]):
        x = f(p, x)
    return stage(torch.mul)(ps["frozen"], x)


def exact(sizes: dict[str, int], options: dict[str, Any]) -> Any:
    mesh = sf.make_mesh(device="cpu", **sizes)
    n, rank = mesh.size(), mesh.get_rank()
    plain, rows = params(), normal(n, sum(UNEVEN), D, seed=50)
    count = n * sum(UNEVEN)

    def joint(ps: Any) -> Tensor:
        return net(plainly, ps, rows.flatten(0, 1)).square().sum() / count

    want = torch.func.grad(joint)(plain)
    want["frozen"] = torch.zeros(D, dtype=torch.float64)
    found: dict[Any, float] = {}
    for name in ("hybrid_shard", "hybrid_shard_zero2", "full_shard", "ddp"):
        flat = sf.shard(plain, mesh, STRATEGIES[name], frozen=["frozen"])

        def loss(ps: Any, x: Tensor) -> Tensor:
            return net(lambda f: sf.stage(f, **options), ps, x).square().sum() / count

        def stream(pieces: Any) -> Iterator[Tensor]:
            yield from pieces

        one, _ = sf.value_and_grad(loss)(flat, rows[rank])
        for defer in DEFERS:
            for batches in (stream(rows[rank].split(UNEVEN)), [(rows[rank],)])[: 1 if options else 2]:
                value, gradient = sf.accumulate(loss, batches, defer=defer)(flat)  # type: ignore[arg-type]
                assert gradient["frozen"].values is None
                gradient["frozen"] = optree.tree_map(torch.zeros_like, flat["frozen"])
                assert not value.requires_grad
                key = (name, defer)
                off = worst([distance(sf.unshard(gradient), want), (value - one).abs().item()])
                found[key] = worst([off, found.get(key, 0.0)])
    return found


OPTIONS: list[dict[str, Any]] = [{}, {"remat": True}, {"reshard": False}, {"prefetch": 0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.world(4, "threads")
def test_uneven_micro_batches_give_the_gradient_of_the_whole_batch(world: World, options: Any) -> None:
    for sizes in ({"replica": 2, "shard": 2}, {"replica": 4, "shard": 1})[: 1 if options else 2]:
        for found in world.run(exact, sizes, options):
            assert worst(found.values()) < 1e-12, found


@pytest.mark.world(4)
def test_uneven_micro_batches_on_processes(world: World) -> None:
    for found in world.run(exact, {"replica": 2, "shard": 2}, {}):
        assert worst(found.values()) < 1e-12, found


def alone() -> Any:
    x = normal(8, D, seed=3)

    def loss(ps: Any, x: Tensor) -> Tensor:
        return net(plainly, ps, x).square().sum()

    want = sf.value_and_grad(loss)(params(), x)
    return [distance(sf.accumulate(loss, x.split([3, 5]), defer=defer)(params()), want) for defer in DEFERS]  # type: ignore[arg-type]


def pushed_forward(micro: Any) -> Any:
    """In a checked function, what a direction does to a gradient that is accumulated; and the same on one process."""
    mesh = sf.make_mesh(a=2, device="cpu")
    rows, whole = normal(2, 4, D, seed=60), {"w": normal(D, seed=61)}
    flat = sf.shard([whole], mesh, sf.full_shard("a"))
    stage = sf.stage(lambda p, x: (x * p["w"]).sin())

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def pushed(ps: Any, x: Tensor) -> Any:
        def gradient(ps: Any) -> Any:
            return sf.accumulate(lambda ps, x: sf.psum(stage(ps[0], x).sum(), "a"), x, micro=micro)(ps)[1]

        return jvp(gradient, (ps,), (ps,))[1]

    def joint(p: Any) -> Tensor:
        return (rows * p["w"]).sin().sum()

    return sf.unshard(pushed(flat, rows[mesh.get_rank()]))[0]["w"], jvp(grad(joint), (whole,), (whole,))[1]["w"]


@pytest.mark.parametrize("micro", [2, 3])
@pytest.mark.parametrize("world", [(2, "processes")], indirect=True, ids=["2-processes"])
def test_ranks_compare_batches_under_a_transform(world: World, micro: int) -> None:
    for found, want in world.run(pushed_forward, micro):
        torch.testing.assert_close(found, want)


MASK = [[True, True, True, False, False, True], [False, False, False, False, True, False]]


def averaged(sizes: dict[str, int]) -> Any:
    """Means over masked rows that differ between ranks and micro-batches, beside the mean over all at once."""
    mesh = sf.make_mesh(device="cpu", **sizes)
    rank, everybody = mesh.get_rank(), tuple(sizes)
    plain, rows, masks = params(), normal(2, 6, D, seed=50), torch.tensor(MASK)

    def joint(ps: Any) -> Tensor:
        return net(plainly, ps, rows[masks]).square().sum() / masks.sum()

    want, value = torch.func.grad_and_value(joint)(plain)
    found = {}
    for name in ("hybrid_shard", "full_shard", "ddp"):
        flat = sf.shard(plain, mesh, STRATEGIES[name])

        def loss(ps: Any, x: Tensor, mask: Tensor) -> Any:
            total = (net(sf.stage, ps, x).square() * mask[:, None]).sum()
            return sf.psum(total, everybody), sf.psum(mask.sum(), everybody)

        for defer in DEFERS:
            mean = sf.accumulate(loss, (rows[rank], masks[rank]), micro=3, defer=defer)  # type: ignore[arg-type]
            mapped = sf.shard_map(mean, mesh=mesh, in_specs=..., out_specs=(sf.P(), ...))
            got, gradient = mapped(flat)
            parts = [distance(sf.unshard(gradient), want), (got - value).abs().item()]
            found[name, defer] = worst(parts)
    return found


@pytest.mark.world(2, "threads")
def test_totals_are_divided_once_by_the_sum_of_counts(world: World) -> None:
    for found in world.run(averaged, {"replica": 1, "shard": 2}):
        assert worst(found.values()) < 1e-12, found


def test_a_pair_alone_with_numbers_tensors_aux_and_outer_gradients() -> None:
    x, w = normal(7, D, seed=3), normal(D, seed=4)

    def mean(w: Tensor) -> Tensor:
        return (x @ w).square().mean()

    def pair(w: Tensor, x: Tensor) -> Any:
        return (x @ w).square().sum(), len(x)

    want, value = torch.func.grad_and_value(mean)(w)
    as_tensor = lambda w, x: (pair(w, x)[0], torch.tensor(len(x)))  # noqa: E731
    with_aux = lambda w, x: (pair(w, x), len(x))  # noqa: E731
    for got in (sf.accumulate(pair, x.split([3, 4]))(w), sf.accumulate(as_tensor, x, micro=4)(w)):
        torch.testing.assert_close(got, (value, want), rtol=1e-12, atol=0)
    (loss, aux), gradient = sf.accumulate(with_aux, x.split([1, 6]), has_aux=True)(w)
    torch.testing.assert_close((loss, gradient, aux), (value, want, [1, 6]), rtol=1e-12, atol=0)
    through = sf.grad(lambda w: sf.accumulate(pair, x.split([2, 5]))(w)[1].square().sum())(w)
    wanted = sf.grad(lambda w: sf.grad(mean)(w).square().sum())(w)
    torch.testing.assert_close(through, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [257, 5001, 100_000])
def test_counts_that_16_bits_cannot_hold_divide_all_the_same(dtype: torch.dtype, count: int) -> None:
    w = torch.ones(4, dtype=dtype)
    pair = lambda w, x, n: ((w.float() * x).sum(), n)  # noqa: E731
    x = torch.full((2, 4), 12500.0)
    want = sf.accumulate(lambda w, x: pair(w, x, count), x, micro=1)(w)[1]
    got = sf.accumulate(lambda w, x: pair(w, x, torch.tensor(count)), x, micro=1)(w)[1]
    assert torch.equal(got, want), (got, want)
    assert (want.double() - 25000 / count).abs().max() < 0.008 * 25000 / count


@pytest.mark.parametrize("count", [torch.ones(2), torch.ones((), requires_grad=True), "3", True, None])
def test_a_count_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(TypeError, match="count"):
        sf.accumulate(lambda p, x: ((p * x).sum(), count), [torch.ones(2)])(torch.ones(2))


def test_counts_for_some_micro_batches_only_are_refused() -> None:
    loss = lambda p, x: ((p * x).sum(), 1) if len(x) > 1 else (p * x).sum()  # noqa: E731
    with pytest.raises(ValueError, match="every micro-batch"):
        sf.accumulate(loss, [torch.ones(2), torch.ones(1)])(torch.ones(2))


ROWS = [1.0] + 32 * [2.0**-8]  # in bfloat16 a sum of these stays 1


def sixteen() -> tuple[list[Any], list[float]]:
    """Micro-batches, and twice their sum over four columns, which bfloat16 can hold."""
    return [(torch.full((4,), x, dtype=torch.bfloat16),) for x in ROWS], [2 * sum(ROWS)] * 4


def sixteen_bits(folder: str) -> Any:
    """Gradients divided by a count of 1/2 in all, however shards and their gradients are kept."""
    mesh, (x, want) = sf.make_mesh(replica=1, shard=2, device="cpu", scratch=folder), sixteen()
    stage = sf.stage(lambda p, x: (p["w"] * x).sum())
    found: dict[Any, Any] = {}
    for tier, defer in [("device", defer) for defer in DEFERS] + [("host", "replicas"), ("disk", "replicas")]:
        strategy = sf.hybrid_shard(shard="shard", replica="replica").with_tiers(grads=tier)  # type: ignore[arg-type]
        flat = sf.shard({"a": {"w": torch.zeros(4, dtype=torch.bfloat16)}}, mesh, strategy)
        loss = lambda p, x: (stage(p["a"], x) / mesh.size(), 0.5 / len(ROWS))  # noqa: E731
        gradient = sf.accumulate(loss, x, defer=defer)(flat)[1]  # type: ignore[arg-type]
        found[tier, defer] = sf.unshard(gradient)["a"]["w"].tolist(), gradient["a"].values.dtype
    plain = sf.accumulate(lambda p, x: 2 * (p * x).sum(), x)(torch.zeros(4, dtype=torch.bfloat16))[1]
    return found | {"plain": (plain.tolist(), plain.dtype), "want": (want, torch.bfloat16)}


@pytest.mark.world(2)
def test_sixteen_bits_are_summed_in_float32(world: World, tmp_path: Any) -> None:
    for found in world.run(sixteen_bits, str(tmp_path)):
        assert all(values == found["want"] for values in found.values()), found


def test_the_dtype_of_sums_can_be_chosen() -> None:
    x, want = sixteen()
    run = sf.accumulate(lambda p, x: 2 * (p * x).sum(), x, accumulator_dtype=torch.bfloat16)
    assert run(torch.zeros(4, dtype=torch.bfloat16))[1].tolist() != want
    with pytest.raises(TypeError, match="accumulator_dtype"):
        sf.accumulate(lambda p, x: (p * x).sum(), x, accumulator_dtype=torch.int32)


def test_whole_parameters_need_no_process_group() -> None:
    assert worst(alone()) < 1e-12


def test_aux_of_each_micro_batch_comes_in_order() -> None:
    seen: list[Tensor] = []

    def loss(p: Tensor, x: Tensor, k: int) -> Any:
        y = (p * x).sum()
        seen.append(y)
        return y, {"k": k, "y": y, "words": ("a", None)}

    p, xs = torch.ones(2), [torch.ones(2), torch.full((2,), 3.0)]
    (total, auxes), gradient = sf.accumulate(loss, zip(xs, (7, 8), strict=True), has_aux=True)(p)
    assert total.item() == 8
    assert gradient.tolist() == [4, 4]
    assert [aux["k"] for aux in auxes] == [7, 8]
    assert [aux["y"].item() for aux in auxes] == [2, 6]
    assert all(not aux["y"].requires_grad for aux in auxes)
    assert auxes[0]["words"] == ("a", None)


def test_batches_of_other_kinds() -> None:
    p = {"w": torch.ones(2), "n": 3, "ids": torch.tensor([1, 0])}

    def loss(p: Any, batch: Any) -> Tensor:
        return (p["w"][p["ids"]] * batch["x"]).sum() * p["n"]

    value, gradient = sf.accumulate(loss, [{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([0.5, 0.0])}])(p)
    assert value.item() == 10.5
    assert gradient["w"].tolist() == [6.0, 4.5]
    assert gradient["n"] is None
    assert gradient["ids"] is None


@pytest.mark.parametrize("batches", [[], (), iter([])], ids=["list", "tuple", "iterator"])
def test_no_micro_batch_is_refused(batches: Any) -> None:
    with pytest.raises(ValueError, match="accumulate"):
        sf.accumulate(lambda p, x: (p * x).sum(), batches)(torch.ones(2))


def test_misuse_is_refused() -> None:
    x = [torch.ones(2)]
    with pytest.raises(ValueError, match="defer"):
        sf.accumulate(lambda p, x: (p * x).sum(), x, defer="everything")(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0-d"):
        sf.accumulate(lambda p, x: p * x, x)(torch.ones(2))
    with pytest.raises(TypeError, match="has_aux"):
        sf.accumulate(lambda p, x: ((p * x).sum(), {}), x)(torch.ones(2))
    with pytest.raises(TypeError, match="has_aux"):
        sf.accumulate(lambda p, x: (p * x).sum(), x, has_aux=True)(torch.ones(2))


class Interrupted(Exception):
    pass


def interrupted(defer: Any) -> Any:
    mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    plain = params()
    flat = sf.shard(plain, mesh, sf.hybrid_shard(shard="shard", replica="replica"))
    x = normal(4, D, seed=5)

    def loss(ps: Any, x: Tensor) -> Tensor:
        return net(sf.stage, ps, x).square().sum()

    def batches() -> Iterator[Tensor]:
        yield x[:2]
        raise Interrupted

    want = sf.unshard(sf.grad(loss)(flat, x))
    for _ in range(2):
        with pytest.raises(Interrupted):
            sf.accumulate(loss, batches(), defer=defer)(flat)
    return distance(sf.unshard(sf.accumulate(loss, x.split(2), defer=defer)(flat)[1]), want)


@pytest.mark.parametrize("defer", DEFERS)
@pytest.mark.world(4, "threads")
def test_after_an_exception_the_next_step_is_clean(world: World, defer: Any) -> None:
    assert worst(world.run(interrupted, defer)) < 1e-12


def counted(defer: Any, k: int) -> Any:
    mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    flat = sf.shard(params(), mesh, sf.hybrid_shard(shard="shard", replica="replica"))["blocks"]
    x = normal(2 * k, D, seed=5)

    def loss(ps: Any, x: Tensor) -> Tensor:
        for p in sf.layers(ps):
            x = sf.stage(residual)(p, x)
        return x.square().sum()

    step = sf.accumulate(loss, list(x.split(2)), defer=defer)
    step(flat)
    with sf.collectives.ledger() as log:
        step(flat)
    assert log.count(scheduled=False) == 0
    whole = sum(2 * p.values.numel() * 8 for p in flat)
    assert log.bytes(op="reduce_scatter") == log.count(op="reduce_scatter") // DEPTH * whole // 2
    assert log.bytes(op="all_reduce") == log.count(op="all_reduce") // DEPTH * whole // 2
    return log.count(op="reduce_scatter"), log.count(op="all_reduce"), log.count(op="all_gather", backward=False)


@pytest.mark.parametrize(("defer", "scatters", "sums"), [("nothing", 3, 3), ("replicas", 3, 1), ("all", 1, 1)])
@pytest.mark.parametrize("world", [(4, "processes"), (4, "threads")], indirect=True, ids=["4", "4-threads"])
def test_what_is_put_off_moves_once(world: World, defer: Any, scatters: int, sums: int) -> None:
    gathers = 3 * DEPTH - 2  # where the next forward begins with what backward ended with
    assert world.run(counted, defer, 3) == [(DEPTH * scatters, DEPTH * sums, gathers)] * 4


def twice_used(defer: Any) -> Any:
    """A shard used by a stage and outside of stages: both parts of its gradient count."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    plain = params()["blocks"]
    flat = sf.shard(plain, mesh, sf.full_shard("shard"))
    x = normal(mesh.size(), 4, D, seed=5)

    def decay(ps: Any) -> Tensor:
        return torch.stack([p.values.square().sum() for p in ps]).sum()

    def loss(ps: Any, x: Tensor) -> Tensor:
        for p in (*ps, ps[0]):
            x = sf.stage(residual)(p, x)
        return x.square().sum() + decay(ps)

    def joint(ps: Any) -> Tensor:
        y = x.flatten(0, 1)
        for p in (*ps, ps[0]):
            y = residual(p, y)
        return y.square().sum() + 2 * torch.stack([t.square().sum() for t in optree.tree_leaves(ps)]).sum()

    got = sf.accumulate(loss, x[mesh.get_rank()].split([1, 3]), defer=defer)(flat)[1]
    return distance(sf.unshard(got), torch.func.grad(joint)(plain))


@pytest.mark.parametrize("defer", DEFERS)
@pytest.mark.world(2, "threads")
def test_a_shard_used_in_stages_and_outside(world: World, defer: Any) -> None:
    assert worst(world.run(twice_used, defer)) < 1e-12


def releases(defer: Any) -> Any:
    """One micro-batch's graph is gone before the next begins."""
    import weakref

    mesh = sf.make_mesh(shard=-1, device="cpu")
    flat = sf.shard(params()["blocks"], mesh, sf.full_shard("shard"))
    alive: list[Any] = []
    most = 0

    def loss(ps: Any, x: Tensor) -> Tensor:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        for p in sf.layers(ps):
            x = sf.stage(residual)(p, x)
            alive.append(weakref.ref(x))
        return x.square().sum()

    sf.accumulate(loss, [normal(2, D, seed=k) for k in range(4)], defer=defer)(flat)
    return most, sum(ref() is not None for ref in alive)


@pytest.mark.parametrize("defer", DEFERS)
@pytest.mark.world(2)
def test_a_micro_batch_leaves_nothing_behind(world: World, defer: Any) -> None:
    assert world.run(releases, defer) == [(0, 0)] * 2
