"""Norms, clipping and loss scaling: each element counts once, and all ranks decide alike."""

from __future__ import annotations

import math
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import P, quant
from shardfn.shards.layout import is_flat
from shardfn.testing import World, world
from tests.reference import worst

SHAPES = {"w": (8, 6), "v": (6, 4), "b": (4,), "s": ()}


def tree(seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    g = torch.Generator().manual_seed(seed)
    layers: list[dict[str, Tensor]] = [
        {name: torch.randn(shape, generator=g, dtype=dtype) for name, shape in SHAPES.items()} for _ in range(2)
    ]
    layers[1]["v as well"] = layers[1]["v"]
    return {"layers": layers, "head": torch.randn(5, generator=g, dtype=dtype)}


DTYPES = [torch.float64, torch.complex128]


def with_bad_padding(flat: Any, value: float = torch.nan) -> None:
    """Overwrites whatever this rank holds that belongs to no parameter."""
    layout = flat.layout
    for start, length in layout.holes[layout.index(dist.get_rank())]:
        flat.values[start : start + length] = value


SPECS = sf.by_path([(r".*\.w", P(None, "tensor")), (r".*\.v.*", P("tensor")), (".*", P())])

CASES: dict[str, tuple[dict[str, int], sf.Strategy, Any]] = {
    "full_shard": ({"shard": 4}, sf.full_shard("shard"), P()),
    "ddp": ({"data": 4}, sf.ddp("data"), P()),
    "zero1": ({"data": 4}, sf.strategies.zero1("data"), P()),
    "hybrid_shard": ({"replica": 2, "shard": 2}, sf.hybrid_shard(shard="shard", replica="replica"), P()),
    "hfsdp": ({"replica": 2, "shard": 2}, sf.strategies.hfsdp(shard="shard", replica="replica"), P()),
    "uncut": ({"shard": 4}, sf.strategies.replicate_small(sf.full_shard("shard"), below=20), P()),
    "full_shard x tensor": ({"shard": 2, "tensor": 2}, sf.full_shard("shard"), SPECS),
    "ddp x tensor": ({"data": 2, "tensor": 2}, sf.ddp("data"), SPECS),
    "tensor": ({"data": 1, "tensor": 4}, sf.full_shard("data"), sf.by_path([(r".*\.w", P("tensor"))], strict=False)),
}


def alone(params: Any) -> so.Norms:
    """By torch, of whole parameters; what is tied counts once."""
    each: dict[str, float] = {}
    for i, layer in enumerate(params["layers"]):
        each |= {f"layers.{i}.{name}": x.norm().item() for name, x in layer.items() if name in SHAPES}
    each["head"] = params["head"].norm().item()
    stages = {stage: sum(v**2 for k, v in each.items() if k.startswith(stage)) ** 0.5 for stage in
              ("layers.0", "layers.1", "head")}  # fmt: skip
    return so.Norms(sum(v**2 for v in each.values()) ** 0.5, stages, each)


def compared(case: str, dtype: torch.dtype) -> float:
    sizes, strategy, specs = CASES[case]
    mesh = sf.make_mesh(device="cpu", **sizes)
    flat = sf.shard(tree(dtype=dtype), mesh, strategy, specs=specs)
    got, want = so.norms(flat), alone(tree(dtype=dtype))
    assert type(got.total) is float
    assert all(type(x) is float for x in (*got.stages.values(), *got.parameters.values()))
    assert got.stages.keys() == want.stages.keys()
    assert got.parameters.keys() == want.parameters.keys()
    pairs = [(got.total, want.total), *((got.stages[k], v) for k, v in want.stages.items())]
    pairs += [(got.parameters[k], v) for k, v in want.parameters.items()]
    pairs.append((so.global_norm(flat).item(), want.total))
    return worst(abs(a - b) / b for a, b in pairs)


@pytest.mark.world(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", list(CASES))
def test_every_element_counts_once(world: World, case: str, dtype: torch.dtype) -> None:
    assert worst(world.run(compared, case, dtype)) < 1e-12


@pytest.mark.world(4)
def test_a_replicated_tensor_beside_shards_counts_once(world: World) -> None:
    def body() -> float:
        mesh = sf.make_mesh(shard=4, device="cpu")
        flat = sf.shard({"w": torch.ones(16)}, mesh, sf.full_shard("shard"))
        return so.norms(flat | {"scale": torch.full((4,), 2.0)}).total

    assert world.run(body) == [32**0.5] * 4


def clipped(case: str, dtype: torch.dtype, donate: bool) -> tuple[float, float, float]:
    sizes, strategy, specs = CASES[case]
    mesh = sf.make_mesh(device="cpu", **sizes)
    whole = tree(dtype=dtype)
    scale = 0.7 / alone(whole).total
    flat = sf.shard(whole, mesh, strategy, specs=specs)
    before = optree.tree_map(torch.clone, flat)
    clip = so.clip_by_global_norm(0.7, donate=donate)
    grads, state = clip.update(flat, flat, clip.init(flat))
    got = sf.unshard(grads)
    d = worst(
        (a - b * scale).abs().max().item()
        for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(whole), strict=True)
    )
    unchanged = worst(
        (a - b).abs().max().item() for a, b in zip(optree.tree_leaves(flat), optree.tree_leaves(before), strict=True)
    )
    again, _ = so.clip_by_global_norm(1e3).update(flat, grads, state)
    assert abs(so.global_norm(again).item() - 0.7) < 1e-12
    return d, unchanged, abs(state["norm"].item() - alone(whole).total)


@pytest.mark.world(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["hybrid_shard", "full_shard x tensor", "zero1"])
def test_clipping_scales_by_the_norm_of_the_whole(world: World, case: str, dtype: torch.dtype) -> None:
    for d, _, norm in world.run(clipped, case, dtype, True):
        assert worst([d, norm]) < 1e-12
    for d, unchanged, norm in world.run(clipped, case, dtype, False):
        assert worst([d, norm]) < 1e-12
        assert unchanged == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.world(2)
def test_norms_have_gradients(world: World, dtype: torch.dtype) -> None:
    def body() -> float:
        mesh = sf.make_mesh(shard=2, device="cpu")
        whole = {"w": tree(dtype=dtype)["head"]}
        flat = sf.shard(whole, mesh, sf.full_shard("shard"))
        norm = sf.shard_map(sf.grad(lambda p: so.global_norm(p) ** 3), mesh=mesh, in_specs=..., out_specs=...)
        got = sf.unshard(norm(flat))
        want = torch.func.grad(lambda p: p["w"].norm() ** 3)(whole)
        return (got["w"] - want["w"]).abs().max().item()

    assert worst(world.run(body)) < 1e-12


PURE = so.chain(so.clip_by_global_norm(0.5, donate=False), so.lamb(0.1, donate=False))
OF_GRADIENTS = {
    "vdot": lambda p, g: so.vdot(g, g),
    "norm": lambda p, g: so.global_norm(g) ** 3,
    "step": lambda p, g: so.vdot(PURE.step(p, g, PURE.init(p))[0], g),
}


def third_derivative(kind: str) -> list[Tensor]:
    """The derivative of a number made of a second derivative, of stages of which some ranks hold padding alone."""
    mesh, g = sf.make_mesh(shard=-1, device="cpu"), torch.Generator().manual_seed(0)
    shapes, made = {"a": (3, 8), "c": (8, 1)}, OF_GRADIENTS[kind]
    whole = {name: {"w": torch.randn(shape, generator=g, dtype=torch.float64)} for name, shape in shapes.items()}
    params, x = sf.shard(whole, mesh, sf.full_shard("shard")), torch.randn(4, 3, generator=g, dtype=torch.float64)
    layer = sf.stage(lambda p, x: torch.tanh(x @ p["w"]))

    def loss(p: Any) -> Tensor:
        return sf.pmean(layer(p["c"], layer(p["a"], x)).square().sum(), "shard")

    def first(p: Any) -> Tensor:
        return made(p, sf.grad(loss)(p))

    def second(p: Any) -> Tensor:
        return made(p, sf.grad(first)(p))

    found = sf.shard_map(sf.grad(second), mesh=mesh, in_specs=..., out_specs=...)(params)
    return optree.tree_leaves(sf.unshard(found))


@pytest.mark.parametrize("kind", OF_GRADIENTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_derivatives_of_any_order_where_a_rank_holds_padding_alone(kind: str, ranks: int) -> None:
    (want,) = world(1).run(third_derivative, kind)
    for got in world(ranks).run(third_derivative, kind):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.world(4)
def test_a_gradient_that_is_not_finite_gives_a_norm_that_is_not(world: World) -> None:
    def body() -> tuple[float, bool]:
        mesh = sf.make_mesh(shard=4, device="cpu")
        flat = sf.shard({"w": torch.ones(64)}, mesh, sf.full_shard("shard"))
        if mesh.get_rank() == 1:
            flat["w"].values[0] = torch.inf
        clip = so.clip_by_global_norm(1.0)
        grads, state = clip.update(flat, flat, clip.init(flat))
        return state["norm"].item(), bool(grads["w"].values.isfinite().any())

    for norm, any_finite in world.run(body):
        assert norm == torch.inf
        assert not any_finite


# --- loss scaling ---


def scaled_run(strategy: sf.Placement) -> Any:
    """Six steps, in the third of which one rank's data overflow."""
    mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    whole = {"w": tree()["head"]}
    opt, plain = so.dynamic_loss_scale(so.adamw(0.1), scale=8.0, growth_interval=2), so.adamw(0.1)
    params, single = sf.shard(whole, mesh, strategy), optree.tree_map(torch.clone, whole)
    state, single_state = opt.init(params), plain.init(single)
    scales = [state["scale"]]
    f = sf.stage(lambda w, x: (w * x).sum())
    for number in range(6):
        x = single["w"] / 2  # four ranks: the gradient is twice the parameter
        if number == 2:
            x = x * torch.inf if mesh.get_rank() == 1 else x
        else:
            single, single_state = plain.step(single, {"w": 2 * single["w"]}, single_state)
        grads = sf.grad(lambda p, x=x, state=state: f(p["w"], x) * state["scale"])(params)
        params, state = opt.step(params, grads, state)
        scales.append(state["scale"])
    return scales, state["skipped"], (sf.unshard(params)["w"] - single["w"]).abs().max().item()


@pytest.mark.world(4)
@pytest.mark.parametrize(
    "strategy",
    [
        sf.hybrid_shard(shard="shard", replica="replica"),
        sf.ddp(("replica", "shard")),
        sf.strategies.zero1(("replica", "shard")),
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_is_skipped_by_all(world: World, strategy: sf.Placement) -> None:
    for scales, skipped, d in world.run(scaled_run, strategy):
        assert scales == [8, 8, 16, 8, 8, 16, 16]
        assert skipped == 1
        assert d < 1e-12


def vanishing(scale: float) -> float:
    """How far a step moves, whose gradient is smaller than float16 can say."""
    mesh = sf.make_mesh(shard=2, device="cpu")
    params = sf.shard({"w": torch.ones(32)}, mesh, sf.full_shard("shard"))
    f = sf.stage(lambda w, x: (w * x).sum(), gather_dtype=torch.float16, reduce_dtype=torch.float16)
    opt = so.dynamic_loss_scale(so.sgd(1e6), scale=scale)
    state = opt.init(params)
    x = torch.full((32,), 1e-4, dtype=torch.float16)
    grads = sf.grad(lambda p: f(p["w"], x) * (state["scale"] * 1e-4))(params)
    params, state = opt.step(params, grads, state)
    return (sf.unshard(params)["w"] - 1).mean().item()


@pytest.mark.world(2)
def test_a_scale_saves_gradients_that_float16_would_lose(world: World) -> None:
    assert world.run(vanishing, 1.0) == [0.0] * 2
    for moved in world.run(vanishing, 2.0**14):
        assert abs(moved + 0.02) < 1e-4


@pytest.mark.world(2)
def test_finite_is_agreed_by_all_ranks(world: World) -> None:
    def body() -> tuple[bool, bool]:
        mesh = sf.make_mesh(shard=2, device="cpu")
        flat = sf.shard({"w": torch.ones(64), "n": torch.arange(3)}, mesh, sf.full_shard("shard"))
        before = so.all_finite(flat)
        if mesh.get_rank() == 0:
            flat["w"].values[3] = torch.nan
        return before, so.all_finite(flat)

    assert world.run(body) == [(True, False)] * 2


def dot(case: str) -> tuple[float, float]:
    """The product of two trees, and its gradient, against those of whole ones."""
    sizes, strategy, specs = CASES[case]
    mesh = sf.make_mesh(device="cpu", **sizes)
    flats = [sf.shard(tree(seed), mesh, strategy, specs=specs) for seed in (0, 1)]
    a, b = (optree.tree_leaves({**tree(seed), "layers": [
        {name: layer[name] for name in SHAPES} for layer in tree(seed)["layers"]
    ]}) for seed in (0, 1))  # fmt: skip
    want = sum((x * y).sum().item() for x, y in zip(a, b, strict=True))
    got = sf.shard_map(so.vdot, mesh=mesh, in_specs=..., out_specs=...)(*flats)
    slope = sf.shard_map(sf.grad(lambda p: so.vdot(p, flats[1])), mesh=mesh, in_specs=..., out_specs=...)(flats[0])
    wrong = [(x - y).abs().max().item() for x, y in zip(optree.tree_leaves(sf.unshard(slope)), optree.tree_leaves(
        sf.unshard(flats[1])), strict=True)]  # fmt: skip
    return abs(got.item() - want), worst(wrong)


@pytest.mark.world(4)
@pytest.mark.parametrize("case", CASES)
def test_a_product_of_trees_counts_every_element_once(world: World, case: str) -> None:
    for off, slope in world.run(dot, case):
        assert off < 1e-12
        assert slope < 1e-12


@pytest.mark.world(2)
def test_products_of_trees_that_differ_are_refused(world: World) -> None:
    def body() -> tuple[str, float]:
        mesh = sf.make_mesh(shard=2, device="cpu")
        flat = sf.shard(tree(), mesh, sf.full_shard("shard"))
        with pytest.raises(ValueError, match="vdot: the trees differ: head") as caught:
            so.vdot(flat, {**flat, "head": sf.shard({"head": torch.ones(6)}, mesh, sf.full_shard("shard"))["head"]})
        with pytest.raises(ValueError, match="their structures are"):
            so.vdot(flat, flat["layers"])
        z = torch.tensor([1 + 2j, 3j])
        return str(caught.value), abs(so.vdot({"z": z}, {"z": z * 1j}).item() - torch.vdot(z, z * 1j).item())

    for _, off in world.run(body):
        assert off < 1e-6


@pytest.mark.world(2, "threads")
def test_norms_on_ranks_that_share_a_process(world: World) -> None:
    """What is remembered of a layout is remembered for each rank."""

    def body() -> float:
        mesh = sf.make_mesh(shard=2, device="cpu")
        whole = {"w": torch.arange(5.0, dtype=torch.float64), "b": torch.ones(3, dtype=torch.float64)}
        flat = sf.shard(whole, mesh, sf.full_shard("shard"), stages=["w", "b"])
        return abs(so.global_norm(flat).item() - 33**0.5)

    assert worst(world.run(body)) < 1e-12


def without(kind: str) -> tuple[float, float, float, float]:
    """Norms of gradients some of which there are not, by three functions, and the norm of those that there are."""
    mesh, draw = sf.make_mesh(shard=2, device="cpu"), torch.Generator().manual_seed(1)
    whole = {name: {"w": torch.randn(8, 8, generator=draw).double(), "b": torch.ones(3).double()} for name in "abc"}
    whole = quant.quantize(whole, quant.nf4(8), names=r"b\.w") if kind == "few bits" else whole
    params = sf.shard(whole, mesh, sf.full_shard("shard"), frozen=[r"a\.b", r"b\..*"] if kind == "frozen" else ())
    squares = sf.stage(lambda p: p["w"].square().sum() + p["b"].sum())

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def gradient(params: Any) -> Any:
        head, rest = sf.shards.partition(params, lambda path, shape: kind != "part" or path.startswith("a"))

        def loss(head: Any) -> Tensor:
            return sf.pmean(sum(map(squares, sf.shards.combine(head, rest).values())), "shard")

        return sf.grad(loss)(head)

    grads = gradient(params)
    want = sum(x.square().sum().item() for x in optree.tree_leaves(sf.unshard(grads)) if x.is_floating_point()) ** 0.5
    clipped = so.masked(so.chain(so.clip_by_global_norm(1e9), so.sgd(0.1)), r".*\.(w|b)")  # of pieces
    _, state = clipped.step(params, grads, clipped.init(params))
    some = so.norms(grads).parameters.items()
    masked = sum(norm**2 for name, norm in some if name.endswith((".w", ".b"))) ** 0.5
    return (
        abs(so.global_norm(grads).item() - want),
        abs(so.vdot(grads, grads).item() ** 0.5 - want),
        abs(so.norms(grads).total - want),
        abs(state["chosen"][0]["norm"].item() - masked),
    )


@pytest.mark.world(2)
@pytest.mark.parametrize("kind", ["frozen", "few bits", "part"])
def test_what_has_no_gradient_is_left_out(world: World, kind: str) -> None:
    for differences in world.run(without, kind):
        assert worst(differences) < 1e-11


def test_numbers_in_a_state_count_as_tensors_do() -> None:
    optimizer, found = so.dynamic_loss_scale(so.sgd(0.25), scale=3.0, growth_interval=1), []
    for old in (False, True):
        p = {"w": torch.ones(3, dtype=torch.float64)}
        state = optimizer.init(p)
        if old:
            state |= {"scale": 3, "good": 0, "skipped": 0}
        for g in (1.0, torch.inf, 1.0):
            gradient = torch.full((3,), g, dtype=torch.float64) * state["scale"]
            p, state = optimizer.step(p, {"w": gradient}, state)
        found.append([p["w"][0].item(), *(float(state[key]) for key in ("scale", "good", "skipped"))])
    assert found[0] == found[1] == [0.5, 6.0, 0.0, 1.0]


def test_a_loss_scale_stays_where_float32_holds_its_inverse() -> None:
    for kind, scale in ((torch.nan, 2.0**-126), (0.0, 2.0**126)):
        optimizer, p = (
            so.dynamic_loss_scale(so.sgd(0.1), growth_factor=2.0**9, backoff_factor=2.0**-9, growth_interval=1),
            {"w": torch.ones(3)},
        )
        state = optimizer.init(p)
        for _ in range(50):
            p, state = optimizer.step(p, {"w": torch.full((3,), kind)}, state)
        assert state["scale"] == scale
        p, state = optimizer.step(p, {"w": torch.zeros(3)}, state)
        assert p["w"].eq(1).all()


def only_parameters(dtype: torch.dtype) -> list[Any]:
    """Whether steps are made, and trees finite, where all that is not finite is padding."""
    mesh = sf.make_mesh(shard=-1, device="cpu")

    def made(x: float) -> Any:
        whole = {"a": {"w": torch.full((5, 3), x, dtype=dtype), "v": torch.full((2,), x, dtype=dtype)}}
        return sf.shard(whole, mesh, sf.full_shard("shard"))

    results: list[Any] = []
    for optimizer in (so.skip_nonfinite(so.sgd(0.25)), so.dynamic_loss_scale(so.sgd(0.25), scale=1.0)):
        params, grads = made(2.0), made(1.0)
        with_bad_padding(grads["a"])
        params, state = optimizer.step(params, grads, optimizer.init(params))
        results += [state["skipped"], so.all_finite(params), sf.unshard(params)["a"]["w"][4, 2].item()]
    return results


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_ignores_padding(ranks: int, dtype: torch.dtype) -> None:
    assert world(ranks).run(only_parameters, dtype) == [[0, True, 1.75] * 2] * ranks


def gathered_in_eight_bits(how: str) -> Any:
    """A stage's gradients where padding is not finite, and where padding is zero."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    stage = sf.stage(lambda p, x: (x @ p["w"]).square().sum() + p["b"].sum(), gather_format=quant.int8(64))

    def loss(p: Any, x: Tensor) -> Tensor:
        return sf.psum(stage(p["a"], x), "shard")

    found = []
    for padding in (torch.nan, 0.0):
        whole = {"a": {"w": torch.arange(15.0).view(5, 3), "b": torch.ones(3)}}
        params = sf.shard(whole, mesh, sf.full_shard("shard"))
        with_bad_padding(params["a"], padding)
        kinds = {
            "engine": sf.value_and_grad(loss),
            "forward": lambda p, x: (loss(p, x), p),
            "functorch": lambda p, x: torch.func.grad_and_value(loss)(p, x)[::-1],
        }
        step = sf.shard_map(kinds[how], mesh=mesh, in_specs=(..., P("shard")), out_specs=(P(), ...), check=False)
        value, grads = step(params, torch.ones(2, 5))
        found.append([value.item(), *(x.sum().item() for x in sf.unshard(grads)["a"].values())])
    return found


@pytest.mark.parametrize("how", ["engine", "forward", "functorch"])
def test_padding_is_in_no_scale_of_a_quantized_gather(world: World, how: str) -> None:
    for dirty, clean in world.run(gathered_in_eight_bits, how):
        assert dirty == clean


def of_order(case: str, order: float, dtype: torch.dtype) -> float:
    sizes, strategy, specs = CASES[case]
    mesh = sf.make_mesh(device="cpu", **sizes)
    whole = tree(dtype=dtype)
    leaves = optree.tree_leaves({**whole, "layers": [{n: x[n] for n in SHAPES} for x in whole["layers"]]})
    want = torch.linalg.vector_norm(torch.cat([x.reshape(-1) for x in leaves]), order)
    flat = sf.shard(whole, mesh, strategy, specs=specs)
    for node in optree.tree_leaves(flat, is_leaf=is_flat):
        with_bad_padding(node)
    clip = so.clip_by_global_norm(want.item() / 4, order=order)
    norm = so.global_norm(flat, order=order)
    grads, state = clip.update(flat, flat, clip.init(flat))
    after = so.global_norm(grads, order=order)
    return worst([abs(norm - want).item(), abs(state["norm"] - want).item(), abs(after - want / 4).item()])


@pytest.mark.world(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", [1, 2, math.inf])
@pytest.mark.parametrize("case", CASES)
def test_norms_of_other_orders(world: World, case: str, order: float, dtype: torch.dtype) -> None:
    for found in world.run(of_order, case, order, dtype):
        assert found < 1e-12


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("order", [1, math.inf])
def test_norms_of_other_orders_are_not_finite_if_a_number_is_not(world: World, order: float, bad: float) -> None:
    def body() -> tuple[bool, bool]:
        mesh = sf.make_mesh(shard=2, device="cpu")
        grads = sf.shard({"w": torch.ones(64)}, mesh, sf.full_shard("shard"))
        if mesh.get_rank() == 1:
            grads["w"].values[3] = bad
        clip = so.clip_by_global_norm(1.0, order=order)
        grads, state = clip.update(grads, grads, clip.init(grads))
        return bool(state["norm"].isfinite()), bool(grads["w"].values.isfinite().any())

    assert world.run(body) == [(False, False)] * 2


@pytest.mark.parametrize("order", [0, 3, -math.inf, math.nan, True, "inf"])
def test_other_orders_are_refused(order: Any) -> None:
    with pytest.raises(ValueError, match="clip_by_global_norm: order must be 1, 2 or"):
        so.clip_by_global_norm(1.0, order=order)
    with pytest.raises(ValueError, match="global_norm: order must be 1, 2 or"):
        so.global_norm({"w": torch.ones(3)}, order=order)
