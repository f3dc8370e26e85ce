"""bitsandbytes' and torchao's optimizers: ours are equal to them, and theirs run on shards."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import checkpoint
from shardfn.quant import codes
from shardfn.testing import World
from tests.reference import library

STEP = 2.0 / (2**16 - 1)  # of the table by which bitsandbytes looks numbers up on the CPU, from -1 to 1


def gradient(w: Tensor, number: int, spread: float = 0.0) -> Tensor:
    """Of very different sizes, in a block too if there is a spread, so that most codes are met."""
    noise = torch.randn(len(w), generator=torch.Generator().manual_seed(number))
    within = torch.logspace(-spread, 0, len(w))[torch.arange(len(w)) * 7 % len(w)]
    return (w + noise) * torch.logspace(-4, 1, len(w)) * within


def far_from_bounds(x: Tensor, scales: Tensor, table: Tensor, most: float) -> Tensor:
    """Where no bound between two codes is as near as that."""
    scaled = x / scales.repeat_interleave(256)[: len(x)]
    bounds = (table[1:] + table[:-1]) / 2
    return (scaled[:, None] - bounds).abs().amin(1) > most


CASES: dict[str, tuple[so.Optimizer, dict[str, Any]]] = {
    "adam": (so.adamw8bit(1e-2, weight_decay=0.1), {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}),
    "lion": (so.lion8bit(1e-2, weight_decay=0.1), {"beta1": 0.9, "beta2": 0.99, "eps": 0.0}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_bitsandbytes(name: str, dtype: torch.dtype) -> None:
    """From the same state: parameters and scales to rounding, and codes but where two are equally near.

    On the CPU bitsandbytes rounds numbers to multiples of `STEP` before it looks for the nearest code.
    """
    library("bitsandbytes")
    ops = torch.ops.bitsandbytes
    optimizer, numbers = CASES[name]
    ps = {"w": torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype)}
    state = optimizer.init(ps)
    slots = list(state["codes"])
    tables = [
        code.decode(torch.arange(256, dtype=torch.uint8)) for code in (codes.dynamic, codes.positive)[: len(slots)]
    ]
    for number in range(6):
        grad = gradient(ps["w"].float(), number, 4.0).to(dtype)
        p = ps["w"].clone()
        theirs = [(state["codes"][s]["w"].clone(), state["scales"][s]["w"].clone()) for s in slots]
        (state1, absmax1), (state2, absmax2) = (*theirs, (None, None))[:2]
        table2 = tables[1] if len(tables) > 1 else None
        before = [
            table[x.int()] * s.repeat_interleave(256)[:3000] for table, (x, s) in zip(tables, theirs, strict=True)
        ]
        ops.optimizer_update_8bit_blockwise(
            name, grad, p, state1, state2, numbers["beta1"], numbers["beta2"], 0.0, 0.0, numbers["eps"], number + 1,
            1e-2, tables[0], table2, absmax1, absmax2, 0.1, 1.0, False,
        )  # fmt: skip
        ps, state = optimizer.step(ps, {"w": grad}, state)
        assert (ps["w"] - p).abs().max() <= (2**-8 if dtype == torch.bfloat16 else 1e-6) * p.abs().max()
        g, betas = grad.float(), (numbers["beta1" if name == "adam" else "beta2"], numbers["beta2"])
        exact = [beta * x + (1 - beta) * g ** (1 + i) for i, (beta, x) in enumerate(zip(betas, before, strict=False))]
        for slot, table, x, (found, scales) in zip(slots, tables, exact, theirs, strict=True):
            ours, own = state["codes"][slot]["w"], state["scales"][slot]["w"]
            torch.testing.assert_close(own, scales, rtol=1e-6, atol=0)
            assert not ((ours != found) & far_from_bounds(x, own, table, STEP)).any()
            nearest, _ = ops.quantize_blockwise(x.double(), table, 256)  # of float64 it takes the nearest
            assert not ((ours != nearest) & far_from_bounds(x, own, table, 2e-6)).any()


def test_a_run_is_that_of_bitsandbytes() -> None:
    optim = library("bitsandbytes").optim
    start = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    for make, ours in ((optim.AdamW8bit, so.adamw8bit(1e-2)), (optim.Lion8bit, so.lion8bit(1e-2, weight_decay=0.01))):
        w = start.clone().requires_grad_()
        theirs = make([w], lr=1e-2, weight_decay=0.01, min_8bit_size=0)
        ps = {"w": start.clone()}
        state = ours.init(ps)
        for number in range(30):
            w.grad = gradient(w.detach(), number)
            theirs.step()
            ps, state = ours.step(ps, {"w": gradient(ps["w"], number)}, state)
        assert (ps["w"] - w.detach()).norm() < 0.02 * (w.detach() - start).norm()


# --- theirs, on shards ---

THEIRS = {"bitsandbytes": ("AdamW8bit", {"min_8bit_size": 0}), "torchao": ("AdamW8bit", {})}


def bits_of(x: Any) -> int:
    """Bytes of a tensor, or of the tensors that one is made of."""
    if hasattr(x, "__tensor_flatten__"):
        return sum(bits_of(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.nbytes if isinstance(x, Tensor) else 0


def saved(path: str, state: Any) -> str:
    """What is said of a checkpoint, or whether it has the same state."""
    try:
        checkpoint.save(path, state)
        again = checkpoint.load(
            path, optree.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, state)
        )
    except (TypeError, ValueError, RuntimeError, checkpoint.CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    pairs = zip(optree.tree_leaves(again), optree.tree_leaves(state), strict=True)
    return "the same" if all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs) else "others"


def uncompiled(run: Callable[..., Any], *args: Any) -> Any:
    """`run(*args)`. torchao compiles its steps, for which these are too little work."""
    with torch.compiler.set_stance("force_eager"):
        return run(*args)


def on_shards(libraries: list[str], folder: str) -> list[Any]:
    """How far the parameters are from AdamW's; bytes of state a parameter; what a checkpoint of it says."""
    mesh = sf.make_mesh(device="cpu", shard=2)
    found: list[Any] = []
    whole = {"w": torch.randn(520, 256, generator=torch.Generator().manual_seed(0)) * 3, "b": torch.ones(40)}
    for name in libraries:
        kind, options = THEIRS[name]
        make = getattr(importlib.import_module(f"{name}.optim"), kind)
        for strategy in (sf.full_shard("shard"), sf.strategies.zero1("shard")):
            runs = []
            for optimizer in (so.from_torch(make, block=256, lr=1e-2, weight_decay=0.01, **options), so.adamw(1e-2)):
                ps = sf.shard(whole, mesh, strategy)
                state = optimizer.init(ps)
                for number in range(8):
                    grads = optree.tree_map(lambda x, number=number: torch.sin(x + number) / 8, ps)
                    ps, state = optimizer.step(ps, grads, state)
                runs.append((sf.unshard(ps), state))
            (got, state), (want, _) = runs
            moved = (want["w"] - whole["w"]).norm()
            share = sum(map(bits_of, optree.tree_leaves(state["memory"]))) / (520 * 256 / 2)
            path = f"{folder}/{name}-{len(found)}"
            said = [saved(f"{path}-{i}", x) for i, x in enumerate((state, checkpoint.ByRank(state)))]
            found.append((((got["w"] - want["w"]).norm() / moved).item(), share, said))
    return found


@pytest.mark.world(2)
def test_optimizers_of_other_libraries_run_on_shards(world: World, tmp_path: Path) -> None:
    for name in THEIRS:
        library(name)
    for found in world.with_deadline(120).run(uncompiled, on_shards, list(THEIRS), str(tmp_path)):
        for (off, share, (plainly, by_rank)), name in zip(
            found, [name for name in THEIRS for _ in range(2)], strict=True
        ):
            assert off < 0.02
            assert 2.0 < share < 2.5
            if name == "bitsandbytes":
                assert "save ByRank(value)" in plainly
                assert by_rank == "the same"
            else:
                assert "OptimState8bit: pass those" in plainly
                assert "OptimState8bit: pass those" in by_rank


def rounding_at_random() -> dict[str, str]:
    """What is said of torchao's rounding where several ranks have the same elements; whether these stay the same."""
    make, mesh = importlib.import_module("torchao.optim").AdamW8bit, sf.make_mesh(device="cpu", replica=2, shard=1)
    optimizer = so.from_torch(make, block=256, lr=1e-3, bf16_stochastic_round=True)
    plain = so.stochastic_rounding(so.from_torch(make, block=256, lr=1e-3))
    whole, found = {"w": torch.linspace(-2, 2, 512).bfloat16()}, {}
    torch.manual_seed(mesh.get_rank())
    for name, strategy in (("ddp", sf.ddp("replica")), ("cut", sf.strategies.zero1("replica"))):
        ps = sf.shard(whole, mesh, strategy)
        for kind, one in (("theirs", optimizer), ("ours", plain)):
            try:
                made, _ = one.step(ps, optree.tree_map(torch.sin, ps), one.init(ps))
                found[f"{name}, {kind}"] = str(made["w"].values.double().sum().item())
            except ValueError as error:
                found[f"{name}, {kind}"] = str(error)
    return found


@pytest.mark.world(2)
def test_random_numbers_of_other_libraries_are_not_for_copies(world: World) -> None:
    library("torchao")
    first, second = world.with_deadline(120).run(uncompiled, rounding_at_random)
    assert first == second
    assert "AdamW8bit draws random numbers" in first["ddp, theirs"]
    assert "w is the same over 'replica'" in first["ddp, theirs"]
    assert all("draws" not in said for name, said in first.items() if name != "ddp, theirs")
