"""Attention with masks, sinks and soft caps over a cut sequence is dense attention on one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import parallel
from shardfn.testing import World
from tests.reference import worst

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 48, 6


def packed(*lengths: int) -> Tensor:
    """Document ids of one row."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def hidden(start: int, stop: int) -> Tensor:
    places = torch.arange(LENGTH)
    return torch.stack([(start <= places) & (places < stop), torch.zeros(LENGTH, dtype=torch.bool)])


ACROSS = torch.stack([packed(5, 38, 5), packed(12, 12, 24)])  # across three of four ranks; meeting at boundaries
Case = tuple[parallel.Mask, dict[str, Any]]
CASES: dict[str, Case] = {
    "window": (parallel.Mask(window=5), {}),
    "window larger than a piece": (parallel.Mask(window=30), {}),
    "window to both sides": (parallel.Mask(causal=False, window=7), {}),
    "documents": (parallel.Mask(documents=ACROSS), {}),
    "documents, both directions": (parallel.Mask(causal=False, documents=ACROSS), {}),
    "documents in a window": (parallel.Mask(window=9, documents=ACROSS), {}),
    "left padding": (parallel.Mask(padding=hidden(0, 15)), {}),
    "right padding, both directions": (parallel.Mask(causal=False, padding=hidden(31, 48)), {}),
    "padded documents": (parallel.Mask(documents=ACROSS, padding=hidden(40, 48)), {}),
    "sinks": (parallel.Mask(), {"sinks": True}),
    "sinks in a window, padded": (parallel.Mask(window=6, padding=hidden(0, 15)), {"sinks": True}),
    "soft cap": (parallel.Mask(), {"softcap": 0.7}),
    "all at once": (
        parallel.Mask(window=11, documents=ACROSS, padding=hidden(0, 3)), {"sinks": True, "softcap": 0.7, "scale": 0.5}
    ),
}  # fmt: skip


def dense(inputs: Sequence[Tensor], mask: parallel.Mask, options: dict[str, Any]) -> Tensor:
    """Attention by the definition, with a mask `[b, s, s]`; queries that see no key get zeros."""
    q, k, v, sinks = inputs
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * options.get("scale", q.shape[-1] ** -0.5)
    if "softcap" in options:
        scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    seen = torch.ones(len(q), q.shape[2], k.shape[2], dtype=torch.bool)
    if mask.causal:
        seen &= j <= i
    if mask.window is not None:
        seen &= (i - j).abs() < mask.window
    if mask.documents is not None:
        seen &= mask.documents[:, :, None] == mask.documents[:, None]
    if mask.padding is not None:
        seen &= ~mask.padding[:, None]
    weights = scores.exp() * seen[:, None]
    total = weights.sum(-1, keepdim=True)
    if options.get("sinks"):
        total = total + sinks.exp()[:, None, None]
    return (weights / total.where(total > 0, 1)) @ v


def drawn(groups: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Queries, keys, values of a width of their own, and sinks."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (BATCH, HEADS, LENGTH, WIDTH), (BATCH, groups, LENGTH, WIDTH), (BATCH, groups, LENGTH, 4), (HEADS,)
    return tuple(torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)


WAYS: dict[str, tuple[Any, bool]] = {
    "ring, balanced": (partial(parallel.ring_attention, balanced=True), True),
    "ring, in order": (parallel.ring_attention, False),
    "ulysses": (parallel.ulysses_attention, False),
}


def differences(way: str, tile: int) -> dict[Any, float]:
    """For each case, how far value, gradients and a product with the Hessian are from those of the definition."""
    mesh = sf.make_mesh(context=-1, device="cpu")
    attend, balanced = WAYS[way]
    every, found = (0, 1, 2, 3), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(parallel.attention.__globals__, "TILE", tile)
        for name, (mask, options) in CASES.items():
            for groups in (HEADS if tile > LENGTH else 1,):
                whole, tangent = drawn(groups), drawn(groups, 1)

                def local(
                    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Any = mask, options: Any = options
                ) -> Tensor:
                    more = {**options, "sinks": sinks if options.get("sinks") else None}
                    return attend(q, k, v, "context", mask=mask, **more)

                def loss(*xs: Tensor, local: Any = local) -> Tensor:
                    return local(*xs).square().sum()

                def wanted(*xs: Tensor, mask: Any = mask, options: Any = options) -> Tensor:
                    return dense(xs, mask, options).square().sum()

                def run(whole: Any, tangent: Any, local: Any = local, loss: Any = loss) -> Any:
                    own = parallel.positions(LENGTH, "context", balanced=balanced)
                    cut = [[*(x[:, :, own] for x in xs[:3]), xs[3]] for xs in (whole, tangent)]

                    def gradients(*xs: Tensor) -> Any:
                        gs = sf.grad(lambda *xs: sf.psum(loss(*xs), "context"), every)(*xs)
                        return *(sf.all_gather(g, "context", dim=2) for g in gs[:3]), sf.psum(gs[3], "context")

                    product = torch.func.jvp(gradients, tuple(cut[0]), tuple(cut[1]))[1]
                    y = sf.all_gather(local(*cut[0]), "context", dim=2)
                    order = sf.all_gather(own, "context", dim=0)
                    return order, y, gradients(*cut[0]), product

                order, y, grads, product = sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=..., check=False)(
                    whole, tangent
                )
                exact = torch.func.grad(wanted, every)
                for part, got, want in (
                    ("value", (y,), (dense(whole, mask, options),)),
                    ("gradient", grads, exact(*whole)),
                    ("product", product, torch.func.jvp(exact, whole, tangent)[1]),
                ):
                    pairs = [(a, b[:, :, order] if b.ndim == 4 else b) for a, b in zip(got, want, strict=True)]
                    found[name, groups, part] = worst(
                        ((a - b).abs().max() / b.abs().max().clamp(min=1e-300)).item() for a, b in pairs if b.any()
                    )
                    assert all(not a.any() for a, b in pairs if not b.any()), (name, part)
    return found


@pytest.mark.central
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tile", [512, 3])
@pytest.mark.world(4, "processes")
def test_masked_attention_on_four_ranks_has_the_derivatives_of_the_definition(
    world: World, way: str, tile: int
) -> None:
    for found in world.with_deadline(150).run(differences, way, tile):
        assert len(found) == 3 * len(CASES)
        assert not {case: error for case, error in found.items() if not error < 1e-12}


def test_blocks_without_visible_keys_are_skipped_and_no_mask_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parallel.attention.__globals__, "TILE", 64)
    length, largest, products = 2048, [0], [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes = [x.untyped_storage().nbytes() // x.itemsize for x in torch.utils._pytree.tree_leaves(out)
                     if isinstance(x, Tensor)]  # fmt: skip
            largest[0] = max([largest[0], *sizes])
            if func is torch.ops.aten.bmm.default:
                products[0] += args[0].shape[1] * args[1].shape[2]
            return out

    q, k, v = (torch.randn(1, 1, length, 64) for _ in range(3))
    ids = packed(*[128] * 16)[None]
    for mask, share in (
        (parallel.Mask(window=64), 1 / 8), (parallel.Mask(window=64, documents=ids), 1 / 16),
        (parallel.Mask(causal=False, documents=ids, window=64), 1 / 8),
    ):  # fmt: skip
        largest[0] = products[0] = 0
        with Watch():
            sf.grad(lambda *xs, mask=mask: parallel.attention(*xs, mask=mask).sum(), (0, 1, 2))(q, k, v)
        assert largest[0] <= 2 * length * 64
        assert 0 < products[0] <= share * 7 * length * length


def test_whole_documents_are_computed_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parallel.attention.__globals__, "TILE", 8)
    kernels = parallel.attention.__globals__["kernels"]
    met: list[tuple[int, int, bool]] = []
    attend = kernels.attention_with_lse

    def counted(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
        met.append((q.shape[2], k.shape[2], causal))
        return attend(q, k, v, causal, scale)

    monkeypatch.setattr(kernels, "attention_with_lse", counted)
    monkeypatch.setattr(kernels, "masked_attention", None)
    q, k, v = (torch.randn(1, 1, 64, 4) for _ in range(3))
    parallel.attention(q, k, v, mask=parallel.Mask(documents=packed(32, 16, 16)[None]))
    assert sorted(met) == [(16, 16, True), (16, 16, True), (32, 32, True)]


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "local ids": ({"mask": parallel.Mask(documents=torch.zeros(2, 8))}, ValueError, "documents must be [2, 48]"),
    "attention_mask": ({"mask": parallel.Mask(padding=torch.ones(2, 48))}, TypeError, "padding must be torch.bool"),
    "no window": ({"mask": parallel.Mask(window=0)}, ValueError, "window must be a positive number of positions"),
    "a dense mask": ({"mask": torch.ones(48, 48)}, TypeError, "mask must be a parallel.Mask, got Tensor"),
    "sinks of one head": ({"sinks": torch.zeros(1)}, ValueError, "sinks must be [4], one for each head, got [1]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_masks_that_do_not_fit_are_refused(case: str) -> None:
    options, kind, message = REFUSED[case]
    with pytest.raises(kind) as caught:
        parallel.attention(*drawn(HEADS)[:3], **options)
    assert message in str(caught.value)


WINDOWS = [(window, balanced) for window in (1, 2, 9, 10, 17, 18, 40, 1000) for balanced in (False, True)]


def hops() -> list[tuple[int, int]]:
    """For each window, how often a rank sends keys in forward, and keys and gradients in both passes."""
    mesh, found = sf.make_mesh(context=8, device="cpu"), []
    q = torch.ones(1, 1, 16, 4)
    for window, balanced in WINDOWS:
        attend = partial(parallel.ring_attention, mask=parallel.Mask(window=window), balanced=balanced)

        def loss(q: Tensor, k: Tensor, v: Tensor, attend: Any = attend) -> Tensor:
            total: Tensor = attend(q, k, v, "context").sum()
            return total

        counts = []
        for run in (loss, sf.grad(loss, (0, 1, 2))):
            with sf.collectives.ledger() as log:
                sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=..., check=False)(q, q, q)
            counts.append(log.count(op="ppermute"))
        found.append((counts[0], counts[1]))
    return found


@pytest.mark.world(8, "fake")
def test_keys_that_a_window_hides_from_all_are_not_sent(world: World) -> None:
    steps = [min(7, 2 * -(-2 * (w - 1) // 16) if balanced else -(-(w - 1) // 16)) for w, balanced in WINDOWS]
    assert steps[:6] == [0, 0, 1, 2, 1, 2]
    assert world.run(hops)[0] == [(n, 2 * n + (n + 1 if n else 0)) for n in steps]
