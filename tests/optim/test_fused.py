"""Kernels of optimizers: AdamW on state in 8 bits, against torch's and the rule in float64; and rounding at random."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn.optim as so
from shardfn.compat import trusted
from shardfn.optim import fused
from shardfn.optim.elementwise import ADAMW
from shardfn.optim.fused import SLOTS, ULPS
from shardfn.optim.state_dtype import Coded, Opened
from shardfn.quant import codes
from shardfn.quant import fused as choice
from shardfn.shards.blocks import BLOCK, BlockRun, Runs
from shardfn.shards.pieces import units
from tests.interpreted import Call, changed, counted

EPS = torch.finfo(torch.float32).eps
ADAMW_8 = fused.AdamW(ADAMW.in_place)


def columns(n: int, seed: int, dtype: torch.dtype) -> tuple[list[Tensor], Runs]:
    """Parameters, gradients and state of many sizes, with zeros among them."""
    draw = torch.Generator().manual_seed(seed)
    blocks = -(-n // BLOCK)

    def sized(count: int) -> Tensor:
        return 10.0 ** torch.randint(-9, 3, (count,), generator=draw)

    p, g = (torch.randn(n, generator=draw) * sized(n) for _ in range(2))
    of_codes = torch.randint(256, (2, n), generator=draw, dtype=torch.uint8)
    scales = sized(2 * blocks).view(2, -1) * torch.rand(2, blocks, generator=draw)
    scales[:, ::5], g[::7] = 0, 0
    whole = BlockRun(0, n // BLOCK * BLOCK, 0, n // BLOCK, -1)
    rest = BlockRun(whole.stop, n, whole.blocks, 1, -1)
    runs = tuple(run for run in (whole, rest) if run.stop > run.start)
    return [p.to(dtype), g.to(dtype), of_codes[0], scales[0], of_codes[1], scales[1]], runs


def numbers(seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    lr, eps = (10.0 ** -(4 * torch.rand(2, generator=draw, dtype=torch.float64))).tolist()
    b1, b2, weight_decay = torch.rand(3, generator=draw, dtype=torch.float64).tolist()
    usual = {"lr": lr, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    return usual if seed % 2 == 0 else {"lr": lr, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}


def decoded(row: list[Tensor], part: Runs) -> list[Tensor]:
    return [Coded().decode(slot, (row[2 + 2 * i], row[3 + 2 * i]), part) for i, slot in enumerate(SLOTS)]


def terms(mean: Tensor, grad: Tensor, now: dict[str, Any]) -> Tensor:
    return mean.abs() * now["b1"] + grad.abs() * (1 - now["b1"])


def cancelled(row: list[Tensor], part: Runs, step: int, now: dict[str, Any]) -> Tensor:
    """The steps that both terms of the mean would make if neither cancelled the other, in float64."""
    p, g, m, v = (x.double() for x in (row[0], row[1], *decoded(row, part)))
    # With a mean of their size and no gradient, a step is that long.
    square = (v * now["b2"] + (1 - now["b2"]) * g * g) / now["b2"]
    moved, _ = ADAMW.pure(0 * p, 0 * g, (terms(m, g, now) / now["b1"], square), step, now)
    return moved.abs()


def farthest(n: int, dtype: torch.dtype) -> tuple[float, float, float]:
    """How far parameters, means and squares are from the rule in float64, in units that `ULPS` counts."""
    worst = [0.0, 0.0, 0.0]
    for seed in range(6):
        row, part = columns(n, seed, dtype)
        step, now = 1 + 7 * seed, numbers(seed)
        old = [x.double() for x in (row[0], row[1], *decoded(row, part))]
        p, (m, v) = ADAMW.pure(old[0], old[1], tuple(old[2:]), step, now)
        ours = [x.clone() for x in row]
        new = [x.double() for x in ADAMW_8(ours, part, step, now, False)]
        sizes = [old[0].abs() + p.abs() + cancelled(row, part, step, now), terms(old[2], old[1], now), v]
        for i, (x, y) in enumerate(zip((ours[0].double(), *new), (p, m, v), strict=True)):
            limits, rounded = torch.finfo(dtype), i == 0 and dtype != torch.float32
            rounding = limits.eps * y.abs().clamp_min(limits.smallest_normal) if rounded else 2e-45
            off = torch.where(y.abs() < limits.max, (x - y).abs() - rounding, 0.0)
            worst[i] = max(worst[i], float((off / (sizes[i] * EPS)).nan_to_num(nan=0.0).max()))
    return worst[0], worst[1], worst[2]


@pytest.mark.parametrize("dtype", choice.DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK, BLOCK + 1, 20 * BLOCK + 9])
def test_a_step_is_the_rule_up_to_half_the_units_that_are_allowed(
    interpreted: Call, n: int, dtype: torch.dtype
) -> None:
    worst = interpreted(farthest, n, dtype)
    assert max(worst) <= ULPS / 2, worst


def beside_torch(n: int, dtype: torch.dtype) -> list[str]:
    """What differs from the twin by more than is allowed, and state whose codes are not neighbors."""
    found = []
    for seed in range(6):
        row, part = columns(n, 10 + seed, dtype)
        ours, theirs = ([x.clone() for x in row] for _ in range(2))
        ADAMW_8(ours, part, 1 + seed, numbers(seed), True)
        ADAMW_8._twin(theirs, part, 1 + seed, numbers(seed))
        found.append(fused._far(row[0], ours[0], theirs[0], cancelled(row, part, 1 + seed, numbers(seed)).float()))
        for i in (2, 4):
            apart = (ours[i].int() - theirs[i].int()).abs()
            far = (ours[i + 1] - theirs[i + 1]).abs() > 8 * EPS * theirs[i + 1]
            found.append(f"{i}: codes" * bool((apart > 1).any() or (apart > 0).float().mean() > 0.01))
            found.append(f"{i}: scales" * bool(far.any()))
    return [said for said in found if said]


@pytest.mark.parametrize("dtype", choice.DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, BLOCK, 20 * BLOCK + 9])
def test_a_step_is_that_of_torch_up_to_the_units_that_are_allowed(
    interpreted: Call, n: int, dtype: torch.dtype
) -> None:
    assert interpreted(beside_torch, n, dtype) == []


def as_shared() -> list[str]:
    row, part = columns(8 * BLOCK + 77, 3, torch.float32)
    whole, numbered = ([x.clone() for x in row] for _ in range(2))
    ADAMW_8(whole, part, 5, numbers(0), True)
    new = ADAMW_8(numbered, part, 5, numbers(0), False)
    assert all(x.equal(y) for x, y in zip(numbered[2:], row[2:], strict=True)), "state that is not ready is as it was"
    (closed,) = Coded().closed(units({"w": row[0]}), SLOTS, [Opened(0, part, new)], None, collective=False)
    flat = [numbered[0], *(x for pair in closed for x in pair)]
    return [choice.difference("it", x, y) for x, y in zip([whole[0], *whole[2:]], flat, strict=True)]


def test_blocks_that_ranks_share_get_the_bits_of_whole_ones(interpreted: Call) -> None:
    """Their numbers are encoded by eager code, once ranks agree."""
    assert interpreted(as_shared) == [""] * 5


def model(dtype: torch.dtype) -> Any:
    draw = torch.Generator().manual_seed(0)
    shapes = {"w": (40, 33), "square": (32, 32), "b": (70,), "one": (), "none": (0, 4), "long": (3000,)}
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def trained(dtype: torch.dtype, optimizer: Callable[[], so.Optimizer], steps: int) -> tuple[Any, Any]:
    opt, ps = optimizer(), model(dtype)
    state = opt.init(ps)
    for number in range(steps):
        grads = optree.tree_map(lambda x, number=number: torch.sin((number + 1.5) * x), ps)
        ps, state = opt.step(ps, grads, state)
    return ps, state


OPTIMIZERS: dict[str, Callable[[], so.Optimizer]] = {
    "a rule": lambda: so.adamw8bit(0.02, weight_decay=lambda path, shape: 0.1 * (len(shape) > 1)),
    "a schedule": lambda: so.adamw8bit(lambda step: 0.02 / step, b2=0.9),
    "a tensor": lambda: so.adamw8bit(torch.tensor(0.02, dtype=torch.float64)),
    "in part": lambda: so.masked(so.adamw8bit(0.02), lambda path, shape: len(shape) == 1),
}


def runs(name: str, dtype: torch.dtype) -> tuple[int, float]:
    """Calls of the kernel, and how far parameters are from those without it after ten steps."""
    from shardfn.optim import kernels

    with counted(kernels, "adamw") as calls:
        with_it, state = trained(dtype, OPTIMIZERS[name], 10)
    kinds, choice.KINDS = choice.KINDS, ()
    try:
        without, plain = trained(dtype, OPTIMIZERS[name], 10)
    finally:
        choice.KINDS = kinds
    assert optree.tree_structure(state) == optree.tree_structure(plain)
    pairs = zip(optree.tree_leaves(with_it), optree.tree_leaves(without), strict=True)
    return len(calls), max(float((x - y).abs().max()) for x, y in pairs if x.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_without_the_kernel(interpreted: Call, name: str, dtype: torch.dtype) -> None:
    """Blocks stay whole: a launch for each run of blocks, which is one or two for a parameter."""
    calls, apart = interpreted(runs, name, dtype)
    expected = {"in part": 2 + 1}.get(name, 2 + 1 + 1 + 1 + 2)
    assert 10 * expected <= calls <= 10 * expected + 3, "and those of the check"
    assert apart <= (0.03 if dtype == torch.bfloat16 else 5e-3)  # a code may be the next one, once in a thousand


def doubles() -> tuple[list[str], bool]:
    """What goes to eager code, and whether versions of what the kernel overwrites are increased."""
    from shardfn.optim import kernels

    opt, ps = so.adamw8bit(0.02), {"w": torch.randn(600)}
    state = opt.init(ps)
    written = [ps["w"], *optree.tree_leaves((state["codes"], state["scales"]))]
    before = [x._version for x in written]
    opt.step(ps, {"w": torch.randn(600)}, state)
    increased = all(x._version > version for x, version in zip(written, before, strict=True))
    with counted(kernels, "adamw") as calls:
        trained(torch.float64, OPTIMIZERS["a rule"], 1)
        ps, lion = {"w": torch.randn(600)}, so.lion8bit(0.02)
        lion.step(ps, copy.deepcopy(ps), lion.init(ps))
        new = so.adamw8bit(0.02, donate=False)
        new.step(ps, copy.deepcopy(ps), new.init(ps))
    return calls, increased


def test_other_steps_do_not_run_it_and_versions_are_increased(interpreted: Call) -> None:
    assert interpreted(doubles) == ([], True)


def test_a_kernel_that_fails_its_check_is_named_once_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, state = trained(torch.float32, OPTIMIZERS["a rule"], 2)
    for name, value in {"KINDS": ("cpu",), "_has_triton": lambda: True}.items():
        monkeypatch.setattr(choice, name, value)
    monkeypatch.setattr(trusted, "_found", {})
    monkeypatch.setattr(fused.AdamW, "__call__", lambda *_: [])
    with pytest.warns(RuntimeWarning, match=r"8-bit AdamW of torch.float32.*the parameter \[\d+\] is") as seen:
        found, also = trained(torch.float32, OPTIMIZERS["a rule"], 2)
    assert len(seen) == 1
    assert all(map(torch.equal, optree.tree_leaves(found), optree.tree_leaves(expected)))
    assert all(map(torch.equal, optree.tree_leaves(also["codes"]), optree.tree_leaves(state["codes"])))


def infinite(mean: float) -> str:
    """What the check says beside a kernel of torch that has this mean where a gradient is infinite."""

    def in_place(ps: Any, gs: Any, slots: Any, step: int, n: dict[str, Any]) -> None:
        ADAMW.in_place(ps, gs, slots, step, n)
        for p, m in zip(ps, slots[0], strict=True):
            p[m.isinf()] = torch.nan
            m[m.isinf()] = mean

    return fused.AdamW(in_place)._check(torch.float32, torch.float32, torch.device("cpu"))


def test_an_infinite_gradient_may_make_the_mean_infinite_or_nan_but_not_finite(interpreted: Call) -> None:
    """Of torch's own kernels, those of the CPU and of CUDA differ in that."""
    assert interpreted(infinite, torch.nan) == ""
    assert "the mean" in interpreted(infinite, 3.0)


CHANGES = {
    "the other decay": ("v = v * b2", "v = v * b1"),
    "no correction of the mean": ("tl.div_rn(rate, bias1) * m", "rate * m"),
    "no correction of the squares": ("tl.div_rn(tl.sqrt_rn(v), bias2)", "tl.sqrt_rn(v)"),
    "epsilon inside the root": ("tl.div_rn(tl.sqrt_rn(v), bias2) + eps", "tl.div_rn(tl.sqrt_rn(v + eps), bias2)"),
    "decay added to the gradient": ("param * (1.0 - rate * weight_decay)", "param"),
    "scales of zero divide": ("tl.where(top == 0, 1.0, top)", "top"),
    "numbers outside count": ("tl.where(inside, number *", "tl.where(inside | True, number *"),
    "the mean has no sign": ("_encode(m, m_codes, m_scales, m_bounds", "_encode(m, m_codes, m_scales, v_bounds"),
    "the gradient not squared": ("grad * rest2 * grad", "grad * rest2"),
    "the scale of the first block": ("tl.store(scales + block, top", "tl.store(scales + block * 0, top"),
}


def caught(change: str, folder: str) -> tuple[str, str]:
    from shardfn import optim
    from shardfn.optim import kernels

    arguments = torch.float32, torch.float32, torch.device("cpu")
    right, made = ADAMW_8._check(*arguments), changed(kernels, *CHANGES[change], folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "kernels", made)
        return right, ADAMW_8._check(*arguments)


@pytest.mark.parametrize("change", CHANGES)
def test_a_kernel_that_is_slightly_wrong_fails_its_check(interpreted: Call, change: str, tmp_path: Any) -> None:
    right, wrong = interpreted(caught, change, str(tmp_path))
    assert not right
    assert wrong


def test_zero_has_the_code_that_states_begin_with() -> None:
    for code, zero in ((codes.dynamic, 127), (codes.positive, 0)):
        assert codes.numbers(code)[zero] == 0


# --- rounding at random ---


def rounding_optimizers() -> dict[str, so.Optimizer]:
    return {
        "parameters": so.stochastic_rounding(so.sgd(0.02), seed=3),
        "not overwritten": so.stochastic_rounding(so.sgd(0.02, donate=False), seed=3, donate=False),
        "state": so.adamw(0.02, state_dtype=torch.bfloat16, seed=4),
        "both": so.stochastic_rounding(so.adamw(0.02, state_dtype=torch.bfloat16, seed=5), seed=6),
    }


def rounds(name: str) -> tuple[int, bool]:
    """Calls of the kernel in two steps after the check, and whether all is bit for bit as without it."""
    from shardfn.optim import kernels

    dtype = torch.float32 if name == "state" else torch.bfloat16
    trained(dtype, lambda: rounding_optimizers()[name], 1)
    with counted(kernels, "round_at_random") as calls:
        found = trained(dtype, lambda: rounding_optimizers()[name], 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "KINDS", ())
        expected = trained(dtype, lambda: rounding_optimizers()[name], 2)
    leaves = [optree.tree_leaves(x) for x in (found, expected)]
    return len(calls), all(x.equal(y) if isinstance(x, Tensor) else x == y for x, y in zip(*leaves, strict=True))


@pytest.mark.parametrize("name", ["parameters", "not overwritten", "state", "both"])
def test_rounding_by_the_kernel_is_that_without_it_bit_for_bit(interpreted: Call, name: str) -> None:
    """One launch for each tensor that has elements."""
    of_five = {"parameters": 1, "not overwritten": 1, "state": 2, "both": 3}[name]
    assert interpreted(rounds, name) == (2 * 5 * of_five, True)


WRONG_ROUNDING = {
    "the other half": ("key >> SHIFT", "key >> (16 - SHIFT)"),
    "signs are kept": ("(key >> 15) & 0x1FFFF", "(key >> 15)"),
    "no term": ("* factor + term", "* factor"),
    "always down": ("(bits + ((key >> SHIFT) & 0xFFFF))", "bits"),
    "infinity is rounded": (
        "tl.where(finite, up.to(tl.float32, bitcast=True), numbers)",
        "up.to(tl.float32, bitcast=True)",
    ),
    "indices begin at zero": ("(offsets + first)", "offsets"),
}


def caught_rounding(change: str, folder: str) -> tuple[str, str]:
    from shardfn import optim
    from shardfn.optim import kernels, rounding

    right = rounding._kernel_difference(torch.float32, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "kernels", changed(kernels, *WRONG_ROUNDING[change], folder))
        return right, rounding._kernel_difference(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("change", WRONG_ROUNDING)
def test_rounding_that_is_slightly_wrong_fails_its_check(interpreted: Call, change: str, tmp_path: Any) -> None:
    right, wrong = interpreted(caught_rounding, change, str(tmp_path))
    assert not right
    assert wrong
