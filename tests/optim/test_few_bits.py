"""Optimizer state in few bits: what is rounded, how, and that nothing else is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import P, checkpoint, quant
from shardfn.optim import rounding, state_dtype
from shardfn.quant import codes
from shardfn.shards.blocks import CHUNK, Blocks
from shardfn.shards.pieces import units
from shardfn.testing import World
from tests.models import DATA, data_mesh, distance, plainly, scaled, scaled_loss, token_rows
from tests.reference import worst


def model(dtype: torch.dtype = torch.float32) -> Any:
    """Parameters of blocks that are full, one behind the other or not, not full, and less than one."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (40, 33), "square": (32, 32), "b": (70,), "little": (3,), "one": (), "none": (0, 4)}
    shapes |= {"odd": (1025, 7)}
    return {
        "first": {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()},
        "layers": [{"w": torch.randn(24, 24, generator=generator).to(dtype)} for _ in range(2)],
    }


def slopes(tree: Any, number: int = 0) -> Any:
    """Gradients, an element's from its number alone; of very different sizes."""
    return optree.tree_map(lambda x: torch.sin((number + 1.5) * x) * (4 * torch.cos(9 * x) - 4).exp(), tree)


def stepped(optimizer: so.Optimizer, ps: Any, state: Any, steps: range) -> Any:
    for number in steps:
        ps, state = optimizer.step(ps, slopes(ps, number), state)
    return ps, state


def decay(path: str, shape: tuple[int, ...]) -> float:
    """Another one for `square`, behind which `w` begins."""
    return 0.1 * (len(shape) > 1) + 0.3 * path.endswith("square")


OPTIMIZERS: dict[str, Callable[[], so.Optimizer]] = {
    "adamw8bit": lambda: so.adamw8bit(0.02, weight_decay=decay),
    "lion8bit": lambda: so.lion8bit(0.01, weight_decay=0.1),
    "in part": lambda: so.masked(so.adamw8bit(0.02), lambda path, shape: len(shape) == 1 or "layers.1" in path),
    "adamw in bfloat16": lambda: so.adamw(0.02, state_dtype=torch.bfloat16, seed=5),
    "master": lambda: so.fp32_master_weights(so.adamw8bit(0.02)),
    "rounded": lambda: so.stochastic_rounding(so.adamw(0.02, state_dtype=torch.bfloat16, seed=1), seed=2),
    "wrapped": lambda: so.multi_steps(so.ema(so.skip_nonfinite(so.adamw8bit(0.02)), 0.9), 2),
}


# --- on any number of ranks ---


def equal(a: Any, b: Any) -> bool:
    pairs = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


CUTS = {
    "full_shard": sf.full_shard(DATA),
    "hybrid_shard": sf.hybrid_shard(shard="shard", replica="replica"),
    "zero1": sf.strategies.zero1(DATA),
    "hfsdp": sf.strategies.hfsdp(shard="shard", replica="replica"),
    "ddp": sf.ddp(DATA),
}


def partly(dtype: torch.dtype) -> Any:
    """The model, and what is not trained: in a stage that has other parameters, and in one that has none."""
    tree, still = model(dtype), quant.quantize({"w": torch.ones(300)}, quant.int8(64), "w")
    tree["first"]["still"] = torch.arange(600)
    return tree | {"still": still}


def moved(folder: str) -> list[Any]:
    """What differs, of the parameters after six steps: on another cut from the start, or from a checkpoint on."""
    mesh = data_mesh(4)
    wrong: list[Any] = []
    for name, make in OPTIMIZERS.items():
        dtype = torch.bfloat16 if name in ("master", "rounded") else torch.float32
        whole, at_once = partly(dtype), make()
        want, _ = stepped(at_once, whole, at_once.init(whole), range(6))
        for cut, strategy in CUTS.items():
            optimizer, flat = make(), sf.shard(partly(dtype), mesh, strategy)
            ps, state = stepped(optimizer, flat, optimizer.init(flat), range(3))
            checkpoint.save(f"{folder}/{name}-{cut}", {"params": ps, "state": state})
            ps, state = stepped(optimizer, ps, state, range(3, 6))
            if not equal(sf.unshard(ps), want):
                wrong.append((name, cut))
        for first, second in itertools.pairwise([*CUTS, "full_shard"]):
            optimizer, flat = make(), sf.shard(partly(dtype), mesh, CUTS[second])
            like = {"params": flat, "state": optimizer.init(flat)}
            found = checkpoint.load(f"{folder}/{name}-{first}", like)
            ps, _ = stepped(optimizer, found["params"], found["state"], range(3, 6))
            if not equal(sf.unshard(ps), want):
                wrong.append((name, first, second))
    return wrong


@pytest.mark.world(4)
def test_few_bits_are_the_same_on_any_cut_and_move_to_any_other(world: World, tmp_path: Path) -> None:
    """Bit for bit: as many ranks as there are, a block has one scale."""
    assert world.with_deadline(240).run(moved, str(tmp_path)) == [[]] * 4


@pytest.mark.parametrize("make", [so.sgd, so.adam, so.adamw, so.lion])
def test_an_element_moves_by_the_same_bits_wherever_a_vector_ends(make: Any) -> None:
    """Kernels go through whole vectors of the processor by other instructions than through what remains behind them."""
    optimizer = make(0.02, **({"momentum": 0.9} if make is so.sgd else {}), state_dtype=torch.float32)
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    found = []
    for length in (5000, 61):
        ps = dict(enumerate(x.clone().split(length)))
        ps, _ = stepped(optimizer, ps, optimizer.init(ps), range(3))
        found.append(torch.cat(list(ps.values())))
    assert equal(*found)


def other_tensor_parallel_parts(folder: str) -> list[str]:
    optimizer, said = so.adamw8bit(0.02), []
    tree = {"w": torch.randn(64, 32, generator=torch.Generator().manual_seed(1))}
    apart, whole = sf.make_mesh(device="cpu", shard=2, tensor=2), sf.make_mesh(device="cpu", shard=2, replica=2)
    cut = {
        "rows": sf.shard(tree, apart, sf.full_shard("shard"), specs=P("tensor")),
        "columns": sf.shard(tree, apart, sf.full_shard("shard"), specs=P(None, "tensor")),
        "whole": sf.shard(tree, whole, sf.full_shard("shard")),
    }
    for name, flat in cut.items():
        _, state = stepped(optimizer, flat, optimizer.init(flat), range(2))
        checkpoint.save(f"{folder}/{name}", state)
        again = checkpoint.load(f"{folder}/{name}", optimizer.init(flat))
        assert equal(again, state)
    for first, second in itertools.permutations(cut, 2):
        try:
            checkpoint.load(f"{folder}/{first}", optimizer.init(cut[second]))
            said.append(f"{first} to {second} passed")
        except checkpoint.CheckpointError as error:
            if "scales.mean.w is float32" not in str(error):
                said.append(str(error))
    return said


@pytest.mark.world(4)
def test_blocks_of_other_tensor_parallel_parts_are_refused(world: World, tmp_path: Path) -> None:
    assert world.run(other_tensor_parallel_parts, str(tmp_path)) == [[]] * 4


def through_shard_map() -> bool:
    mesh, optimizer = data_mesh(2), so.adamw8bit(0.02)
    flat = sf.shard(model(), mesh, sf.full_shard("shard"))
    want, _ = stepped(optimizer, optree.tree_map(torch.clone, flat), optimizer.init(flat), range(2))
    run = sf.shard_map(
        lambda p, s: stepped(optimizer, p, s, range(2)), mesh=mesh, in_specs=(..., ...), out_specs=(..., ...)
    )
    again = optree.tree_map(torch.clone, flat)
    got, state = run(flat, optimizer.init(flat))
    assert type(state["scales"]["mean"]["layers"][0]) is Blocks
    torch.set_default_dtype(torch.float64 if mesh.get_rank() else torch.bfloat16)  # which is nobody's business
    more, _ = run(again, optimizer.init(again))
    torch.set_default_dtype(torch.float32)
    return equal(got, want) and equal(more, want)


@pytest.mark.world(2)
def test_a_state_of_codes_passes_through_shard_map(world: World) -> None:
    assert world.run(through_shard_map) == [True, True]


def with_infinity(bad: float) -> list[Any]:
    """In a block that ranks cut, of which one has a number that is not finite."""
    mesh, optimizer = data_mesh(2), so.adamw8bit(0.02)
    flat = sf.shard({"w": torch.ones(1000)}, mesh, sf.full_shard("shard"))
    grads = sf.shard({"w": torch.ones(1000).index_fill(0, torch.tensor([513]), bad)}, mesh, sf.full_shard("shard"))
    _, state = optimizer.step(flat, grads, optimizer.init(flat))
    ps, _ = optimizer.step(flat, optree.tree_map(torch.ones_like, flat), state)
    finite = sf.unshard(ps)["w"].isfinite()
    return finite.nonzero()[:, 0].tolist() == [*range(512), *range(768, 1000)]


@pytest.mark.world(2)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_makes_its_block_such_on_every_rank(world: World, bad: float) -> None:
    assert world.run(with_infinity, bad) == [True, True]


# --- what is kept, and what a step needs beside it ---


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements of a tensor that is made inside, beside views."""

    most = 0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = f(*args, **kwargs or {})
        inputs = {x.untyped_storage().data_ptr() for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in optree.tree_leaves(made):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in inputs:
                self.most = max(self.most, x.numel())
        return made


def nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in optree.tree_leaves(tree) if isinstance(x, Tensor))


def of_a_million(name: str) -> tuple[float, int]:
    """Bytes of state a parameter that is here, and elements of the largest temporary tensor."""
    make = {
        "adamw8bit": so.adamw8bit(1e-3),
        "lion8bit": so.lion8bit(1e-3),
        "bfloat16": so.adamw(1e-3, state_dtype=torch.bfloat16),
        "float32": so.adamw(1e-3),
    }
    mesh = data_mesh(2)
    flat = sf.shard({"w": torch.ones(1024, 1024)}, mesh, sf.full_shard("shard"))
    state = make[name].init(flat)
    grads = optree.tree_map(torch.ones_like, flat)
    make[name].step(flat, grads, state)  # what is made once
    with Sizes() as sizes:
        _, after = make[name].step(flat, grads, state)
    assert nbytes(after) == nbytes(state)
    return nbytes(state) / flat["w"].values.numel(), sizes.most


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("name", "rate"), [("adamw8bit", 2 + 8 / 256), ("lion8bit", 1 + 4 / 256), ("bfloat16", 4.0), ("float32", 8.0)]
)
def test_state_takes_the_bytes_that_the_formula_says(world: World, name: str, rate: float) -> None:
    for found, most in world.run(of_a_million, name):
        assert abs(found - rate) < 1e-4
        assert most <= CHUNK


# --- rounding ---


def test_codes_stand_for_numbers_within_half_a_step() -> None:
    ps = model()
    optimizer = so.adamw8bit(0.0, b1=0.5, b2=0.5)
    _, state = optimizer.step(ps, slopes(ps), optimizer.init(ps))
    known = units(ps)
    for slot, code, power in (("mean", codes.dynamic, 1), ("square", codes.positive, 2)):
        table = code.decode(torch.arange(256, dtype=torch.uint8))
        stored = state_dtype.Coded().stored(known, state, slot)
        for unit, g, one in zip(known.each, optree.tree_leaves(slopes(ps)), stored, strict=True):
            assert one is not None
            want = (0.5 * g**power).reshape(-1)
            rows = torch.nn.functional.pad(want, (0, -len(want) % 256)).view(-1, 256)
            torch.testing.assert_close(one[1], rows.abs().amax(1), rtol=1e-6, atol=0)
            got = state_dtype.Coded().decode(slot, (one[0].reshape(-1), one[1]), state_dtype.Coded().all_elements(unit))
            scale = one[1].repeat_interleave(256)[: len(want)]
            nearest = (table[:, None] * scale - want).abs().amin(0)
            assert ((got - want).abs() <= nearest + 1e-6 * scale).all()


@pytest.mark.parametrize("small", [1e-1, 1e-2, 2e-3, 1e-3, 3e-4, 1e-4, 1e-5, 1e-6])
def test_an_element_that_had_a_small_gradient_once_takes_no_large_step(small: float) -> None:
    """As a rare token's row of an embedding: its mean has a code when its square, at that, is near 0."""
    optimizer, ps = so.adamw8bit(1e-3, weight_decay=0.0), {"w": torch.zeros(256)}
    state, draw = optimizer.init(ps), torch.Generator().manual_seed(0)
    for step in range(30):
        g = torch.randn(256, generator=draw)
        g[0] = small if step == 0 else 0.0
        before = ps["w"][0].item()
        ps, state = optimizer.step(ps, {"w": g}, state)
        assert abs(ps["w"][0].item() - before) < 2e-3


def test_rounding_at_random_is_right_in_the_mean_and_the_same_again() -> None:
    ps = {"w": torch.zeros(100_000)}
    (unit,) = units(ps).each
    x = torch.linspace(-3, 3, 100_000) * (1 + 2**-12)
    sums = torch.zeros(100_000, dtype=torch.float64)
    for step in range(64):
        bits, more = (list(rounding.random_bits(unit, 0, 100_000, 2, (7, step, "x"))) for _ in range(2))
        assert all(map(torch.equal, bits, more))
        assert not torch.equal(bits[0], bits[1])
        found = rounding.rounded(x, torch.bfloat16, bits[step % 2])
        gap = torch.exp2(torch.frexp(x).exponent - 8.0)  # between neighbors in bfloat16
        assert ((found.float() - x).abs() <= gap).all()
        sums += found.double()
        part = list(rounding.random_bits(unit, 1234, 5678, 2, (7, step, "x")))
        assert all(torch.equal(a[1234:5678], b) for a, b in zip(bits, part, strict=True))
    off = (sums / 64 - x.double()) / gap.double()
    assert off.abs().mean() < 0.06  # of 64 draws of a coin the mean is off by 0.05
    assert off.mean().abs() < 5e-4


def test_what_bfloat16_has_and_what_is_not_finite_stays_as_it_is() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    extra = torch.tensor([math.inf, -math.inf, math.nan])
    for bits in (0, 2**16 - 1):
        got = rounding.rounded(every.float(), torch.bfloat16, torch.full((2**16,), bits, dtype=torch.int32))
        assert got.nan_to_num(nan=7.0).equal(every.nan_to_num(nan=7.0))
        rounded = rounding.rounded(extra, torch.bfloat16, torch.full((3,), bits, dtype=torch.int32))
        assert rounded.float().equal(extra) or rounded[2].isnan()
    odd = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert rounding.rounded(odd, torch.bfloat16, torch.full((2,), 2**16 - 1, dtype=torch.int32)).isnan().all()


def test_small_changes_are_not_lost_where_parameters_are_rounded_at_random() -> None:
    plain, at_random = so.sgd(1.0), so.stochastic_rounding(so.sgd(1.0))
    found = []
    for optimizer in (plain, at_random):
        ps = {"w": torch.ones(4000, dtype=torch.bfloat16)}
        state = optimizer.init(ps)
        for _ in range(100):
            ps, state = optimizer.step(ps, {"w": torch.full((4000,), 1e-4, dtype=torch.bfloat16)}, state)
        found.append(ps["w"].float().mean().item())
    assert found[0] == 1.0
    assert abs(found[1] - 0.99) < 5e-4


@pytest.mark.parametrize("make", [so.fp32_master_weights, so.stochastic_rounding])
def test_parameters_in_bfloat16_may_lie_in_any_order_and_stay_as_they_are(make: Any) -> None:
    found = []
    for donate in (True, False):
        optimizer = make(so.sgd(0.1, donate=donate), donate=donate)
        by_columns = torch.randn(300, 400, generator=torch.Generator().manual_seed(0)).bfloat16().mT
        ps = {"w": by_columns, "gaps": torch.ones(6, 8, dtype=torch.bfloat16)[:, ::2], "wide": torch.ones(5)}
        state, before = optimizer.init(ps), optree.tree_map(torch.clone, ps)
        made, _ = optimizer.step(ps, optree.tree_map(lambda x: x.sin(), ps), state)
        assert equal(ps, made if donate else before)
        assert not equal(made, before)
        found.append(made)
    assert equal(*found)


def test_a_master_is_what_the_parameters_are_rounded_from() -> None:
    ps = optree.tree_map(lambda x: x.bfloat16(), model())
    ps["first"]["b"] = ps["first"]["b"].float()  # its own master
    mine, theirs = so.fp32_master_weights(so.adamw(0.02)), so.adamw(0.02)
    wide = optree.tree_map(torch.Tensor.float, ps)
    state, other = mine.init(ps), theirs.init(wide)
    for number in range(4):
        grads = slopes(ps, number)
        ps, state = mine.step(ps, grads, state)
        wide, other = theirs.step(wide, optree.tree_map(torch.Tensor.float, grads), other)
        assert equal(ps, optree.tree_map(lambda x, y: x.to(y.dtype), wide, ps))
    assert state["master"]["first"]["b"] is None


# --- transforms ---


PURE: dict[str, Callable[..., so.Optimizer]] = {
    "adamw8bit": lambda lr: so.adamw8bit(lr, eps=1e-3, donate=False),
    "lion8bit": lambda lr: so.lion8bit(lr, donate=False),
    "bfloat16": lambda lr: so.adamw(lr, eps=1e-3, state_dtype=torch.bfloat16, donate=False),
    "rounded": lambda lr: so.stochastic_rounding(so.adamw8bit(lr, donate=False), donate=False),
}


@pytest.mark.parametrize("name", PURE)
def test_pure_steps_run_under_vmap(name: str) -> None:
    optimizer = PURE[name](0.02)
    dtype = torch.bfloat16 if name == "rounded" else torch.float32
    ps = {"w": torch.randn(3, 700, generator=torch.Generator().manual_seed(0)).to(dtype)}

    def two(w: Tensor) -> Tensor:
        ps, _ = stepped(optimizer, {"w": w}, optimizer.init({"w": w}), range(2))
        found: Tensor = ps["w"]
        return found

    want = torch.stack([two(w) for w in ps["w"]])
    torch.testing.assert_close(torch.vmap(two)(ps["w"]), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw8bit", "bfloat16"])
def test_a_derivative_goes_through_a_step_and_not_through_what_is_rounded(name: str) -> None:
    w = torch.randn(700, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def after(optimizer: so.Optimizer, steps: int) -> Callable[[Tensor], Tensor]:
        def f(w: Tensor) -> Tensor:
            ps, _ = stepped(optimizer, {"w": w}, optimizer.init({"w": w}), range(steps))
            total: Tensor = ps["w"].sin().sum()
            return total

        return f

    plain = so.adamw(0.02, eps=1e-3, donate=False)
    torch.testing.assert_close(torch.func.grad(after(PURE[name](0.02), 1))(w), torch.func.grad(after(plain, 1))(w))
    for differentiated in (
        lambda f: torch.func.grad(f)(w),
        lambda f: f(w.clone().requires_grad_()).backward(),
        lambda f: torch.func.jvp(f, (w,), (w,)),
        lambda f: torch.vmap(torch.func.grad(f))(w[None]),
    ):
        with pytest.raises(NotImplementedError, match="rounding has none"):
            differentiated(after(PURE[name](0.02), 2))


def through_a_step(name: str) -> list[float]:
    """How far derivatives of the loss after a step, by parameters and the rate, are from those of one process."""
    mesh, found = data_mesh(4), []
    rate = torch.tensor(0.05, dtype=torch.float64)
    rows = token_rows(12)
    mine = rows.tensor_split(4)[mesh.get_rank()]

    def after(ps: Any, rate: Tensor, stage: Any, x: Tensor, total: Any) -> Tensor:
        optimizer = PURE[name](rate)
        grads = sf.grad(lambda p: total(scaled_loss(stage, p, x)) / rows.numel())(ps)
        ps, _ = optimizer.step(ps, grads, optimizer.init(ps))
        return total(scaled_loss(stage, ps, x)) / rows.numel()

    want = sf.grad(lambda p, r: after(p, r, plainly, rows, plainly), (0, 1))(scaled(), rate)
    for strategy in CUTS.values():
        flat = sf.shard(scaled(), mesh, strategy)
        meta = sf.shard_map(
            sf.grad(lambda p, r: after(p, r, sf.stage, mine, lambda x: sf.psum(x, DATA)), (0, 1)),
            mesh=mesh, in_specs=(..., P()), out_specs=(..., P()),
        )  # fmt: skip
        by_params, by_rate = meta(flat, rate)
        found += [distance(sf.unshard(by_params), want[0]), (by_rate / want[1] - 1).abs().item()]
    return found


@pytest.mark.world(4)
@pytest.mark.parametrize("name", ["adamw8bit", "bfloat16"])
def test_a_derivative_goes_through_a_step_on_any_cut(world: World, name: str) -> None:
    assert worst(itertools.chain(*world.with_deadline(60).run(through_a_step, name))) < 1e-10


# --- what is refused ---


def loaded_with(state: Any, slot: str, change: Callable[[Any], Any]) -> Any:
    return state | {slot: optree.tree_map(change, state[slot])}


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "float16": (lambda: so.adamw(0.1, state_dtype=torch.float16), "adamw: state_dtype must be torch.bf"),
    "a name": (lambda: so.lion(0.1, state_dtype="int8"), "lion: state_dtype must be torch.bf"),  # type: ignore[arg-type]
    "a seed": (lambda: so.adam(0.1, state_dtype=torch.bfloat16, seed="x"), "a seed is an int"),  # type: ignore[arg-type]
    "few bits": (
        lambda: so.fp32_master_weights(so.adamw(0.1)).init(
            {"a": {"w": quant.quantize(torch.ones(3, 100), quant.nf4())}}
        ),
        "nothing to train: a.w is quantized",
    ),
    "complex": (lambda: so.adamw8bit(0.1).init({"w": torch.ones(2) * 1j}), "w is torch.complex64"),
    "complex, bfloat16": (
        lambda: so.sgd(0.1, momentum=0.9, state_dtype=torch.bfloat16).init({"w": torch.ones(2) * 1j}),
        "w is torch.complex64",
    ),
    "float16 at random": (
        lambda: so.stochastic_rounding(so.sgd(0.1)).init({"w": torch.ones(2, dtype=torch.float16)}),
        "w is torch.float16, and only bfloat16",
    ),
    "no optimizer": (lambda: so.fp32_master_weights(so.adamw), "the function adamw"),  # type: ignore[arg-type]
    "another dtype": (
        lambda: (lambda o, p: o.step(p, p, loaded_with(o.init(p), "codes", lambda x: x.float())))(
            so.adamw8bit(0.1), {"w": torch.ones(3)}
        ),
        "w: the state is kept as torch.uint8, torch.float32, but this one is torch.float32, torch.float32",
    ),
    "a state of adamw": (
        lambda: (lambda o, p: o.step(p, p, so.adamw(0.1).init(p)))(so.adamw8bit(0.1), {"w": torch.ones(3)}),
        "this state is of another optimizer",
    ),
    "an export to torch's AdamW": (
        lambda: checkpoint.torch_optimizer(so.adamw8bit(0.1).init({"w": torch.ones(3)})),
        "takes the state of shardfn.optim.adam or adamw, not a dict of step, numbers, missed, codes, scales",
    ),
    "a state in float32": (
        lambda: (lambda o, p: o.step(p, p, so.adamw(0.1).init(p)))(
            so.adamw(0.1, state_dtype=torch.bfloat16), {"w": torch.ones(3)}
        ),
        "",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_makes_no_sense_is_refused(case: str) -> None:
    act, says = WRONG[case]
    with pytest.raises((TypeError, ValueError)) as caught:
        act()
    assert says in str(caught.value)


@pytest.mark.parametrize("n", [0, 3])
def test_a_rank_without_elements_refuses_derivatives_like_the_others(n: int) -> None:
    optimizer = so.stochastic_rounding(so.sgd(0.1, donate=False), donate=False)
    ps = {"w": torch.ones(n, dtype=torch.bfloat16)}
    state, rate = optimizer.init(ps), torch.ones((), requires_grad=True)
    new, _ = optimizer.step(ps, {"w": rate.bfloat16() * torch.ones(n, dtype=torch.bfloat16)}, state)
    with pytest.raises(NotImplementedError, match="rounding has none"):
        new["w"].sum().backward()


def test_state_that_is_not_rounded_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a captured step, in which the step's number is a tensor, can have it."""
    monkeypatch.setattr(rounding, "random_bits", None)
    optimizer = so.adamw(0.1, state_dtype=torch.float32)
    ps = {"w": torch.ones(5, dtype=torch.bfloat16)}
    state = optimizer.init(ps)
    _, state = optimizer.step(ps, {"w": torch.ones(5, dtype=torch.bfloat16)}, state | {"step": torch.tensor(0)})
    assert state["mean"]["w"].dtype == torch.float32


def test_parameters_that_are_not_overwritten_keep_their_order_in_memory() -> None:
    optimizer = so.stochastic_rounding(so.sgd(0.1, donate=False), donate=False)
    ps = {"w": torch.randn(2, 3, 4, 4).bfloat16().to(memory_format=torch.channels_last)}
    new, _ = optimizer.step(ps, ps, optimizer.init(ps))
    assert new["w"].stride() == ps["w"].stride()
