"""Attention over a cut sequence is attention."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, parallel
from shardfn.compat import attention
from shardfn.testing import World

HEADS, LENGTH, WIDTH = 8, 16, 6


def plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v


def along(gs: Any, ts: Any) -> Any:
    return sum((g * t).sum() for g, t in zip(gs, ts, strict=True))


def drawn(groups: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, HEADS, LENGTH, WIDTH), (2, groups, LENGTH, WIDTH), (2, groups, LENGTH, WIDTH)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


WAYS: dict[str, Any] = {
    "ring, balanced": (parallel.ring_attention, {"balanced": True}),
    "ring, in order": (parallel.ring_attention, {"balanced": False}),
    "ulysses": (parallel.ulysses_attention, {"balanced": False}),
}


def cells(size: int) -> list[tuple[str, bool, int]]:
    return [(way, causal, groups) for way in WAYS for causal in (True, False) for groups in (HEADS, size)]


def called(way: str, causal: bool, axis: Any) -> Any:
    function, options = WAYS[way]
    more = options if function is parallel.ring_attention else {}
    return lambda q, k, v: function(q, k, v, axis, mask=parallel.Mask(causal=causal), **more)


def differences() -> dict[Any, float]:
    size = torch.distributed.get_world_size()
    mesh = sf.make_mesh(context=size, device="cpu")
    found: dict[Any, float] = {}
    for way, causal, groups in cells(size):
        whole, tangent = drawn(groups), drawn(groups, 1)
        f = called(way, causal, "context")

        @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
        def run(
            whole: Any, tangent: Any, f: Any = f, way: str = way, causal: bool = causal
        ) -> dict[str, tuple[Any, Any]]:
            own = parallel.positions(LENGTH, "context", balanced=WAYS[way][1]["balanced"] and causal)
            local, moves = (tuple(x[:, :, own] for x in xs) for xs in (whole, tangent))

            def loss(*args: Tensor) -> Tensor:
                return sf.psum(f(*args).square().sum(), "context")

            def reference(*args: Tensor) -> Tensor:
                return plain(*args, causal=causal).square().sum()

            every = (0, 1, 2)
            grads = torch.func.grad(reference, every)(*whole)
            return {
                "value": (f(*local), plain(*whole, causal=causal)),
                "grad": (sf.grad(loss, every)(*local), grads),
                "func.grad": (torch.func.grad(loss, every)(*local), grads),
                "hvp": (
                    torch.func.jvp(sf.grad(loss, every), local, moves)[1],
                    torch.func.jvp(torch.func.grad(reference, every), whole, tangent)[1],
                ),
                "reverse over reverse": (
                    sf.grad(lambda *xs: along(sf.grad(loss, every)(*xs), moves), every)(*local),
                    torch.func.grad(lambda *xs: along(torch.func.grad(reference, every)(*xs), tangent), every)(*whole),
                ),
                "vmap of grad": (
                    torch.func.vmap(lambda *xs: sf.grad(loss, every)(*(x[None] for x in xs)))(*local),
                    tuple(g[:, None] for g in grads),
                ),
            }

        with torch.no_grad():
            own = sf.shard_map(
                lambda way=way, causal=causal: parallel.positions(
                    LENGTH, "context", balanced=WAYS[way][1]["balanced"] and causal
                ),
                mesh=mesh,
                in_specs=(),
                out_specs=...,
            )()
            for name, (got, wanted) in run(whole, tangent).items():
                pairs = [(got, wanted)] if isinstance(got, Tensor) else list(zip(got, wanted, strict=True))
                worst = max(((a - b[..., own, :]).abs().max() / b.abs().max()).item() for a, b in pairs)
                found[way, causal, groups, name] = worst
    return found


@pytest.mark.parametrize("world", [(2, "processes"), (4, "processes")], indirect=True, ids=["2", "4"])
def test_every_derivative_is_that_of_one_process(world: World) -> None:
    for found in world.with_deadline(100).run(differences):
        assert len(found) == 6 * 12
        wrong = {cell: worst for cell, worst in found.items() if not worst < 1e-12}
        assert not wrong


def of_nothing() -> list[tuple[Any, ...]]:
    """What attention makes of no sequences and of empty ones: its shape, and derivatives for the matrix before it."""
    mesh, found = sf.make_mesh(c=-1, device="cpu"), []
    cases = itertools.product(
        (HEADS, 2), ((0, 4), (3, 0)), (True, False), (parallel.ring_attention, parallel.ulysses_attention)
    )
    for groups, (batch, length), causal, way in cases:
        x = torch.zeros(batch, HEADS, length, 5, dtype=torch.float64)

        def out(w: Tensor, x: Tensor = x, groups: int = groups, causal: bool = causal, way: Any = way) -> Tensor:
            q = x @ sf.pvary(w, "c")
            return way(q, q[:, :groups], q[:, :groups], "c", mask=parallel.Mask(causal=causal))

        def loss(w: Tensor, out: Any = out) -> Tensor:
            return sf.psum(out(w).square().sum(), "c")

        def derivatives(w: Tensor, out: Any = out, loss: Any = loss) -> tuple[Tensor, ...]:
            return out(w), loss(w), sf.grad(loss)(w), torch.func.jvp(sf.grad(loss), (w,), (w,))[1]

        run = sf.shard_map(derivatives, mesh=mesh, in_specs=(P(),), out_specs=...)
        y, *rest = run(torch.ones(5, 6, dtype=torch.float64))
        found.append((y.shape == (batch, HEADS, length, 6), *(x.abs().sum().item() for x in rest)))
    return found


@pytest.mark.parametrize("world", [(1, "alone"), (2, "processes")], indirect=True, ids=["1", "2"])
def test_attention_to_nothing_is_nothing(world: World) -> None:
    assert world.run(of_nothing) == [[(True, 0, 0, 0)] * 16] * world.size


@pytest.mark.parametrize("causal", [True, False])
def test_kernels_and_what_stands_in_for_them_are_attention(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    q, k, v = drawn(HEADS)
    wanted = torch.func.vjp(lambda *xs: plain(*xs, causal=causal), q, k, v)
    ct = torch.cos(q)
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(attention, "_kernel", lambda *_: attention.PLAIN)
        out, lse = attention.attention_with_lse(q, k, v, causal, WIDTH**-0.5)
        found = (out, *attention.attention_backward(ct, q, out, lse, k, v, causal, WIDTH**-0.5))
        for a, b in zip(found, (wanted[0], *wanted[1](ct)), strict=True):
            assert (a - b).abs().max() < 1e-13, f"fused: {fused}"


LAYOUTS: dict[str, Any] = {
    "as it is": lambda x: x,
    "columns side by side": lambda x: x.mT.contiguous().mT,
    "heads side by side": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "places before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other number": lambda x: torch.stack((x, x), -1)[..., 0],
    "behind others": lambda x: torch.cat((x.new_zeros(3), x.flatten()))[3:].view(x.shape),
    "one for all": lambda x: x.new_full((), 0.5).expand(x.shape),
}


def vjp(f: Any, *inputs: Tensor) -> Any:
    return torch.func.vjp(f, *inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_numbers_lie_in_memory_does_not_matter(layout: str) -> None:
    given = (*drawn(HEADS), torch.cos(drawn(HEADS)[0]))
    for chosen in (*((i,) for i in range(4)), range(4)):
        q, k, v, ct = (LAYOUTS[layout](x) if i in chosen else x for i, x in enumerate(given))
        for causal in (True, False):
            wanted, pull = vjp(lambda *xs: plain(*xs, causal=causal), q, k, v)  # noqa: B023
            found, own_pull = vjp(lambda *xs: parallel.attention(*xs, mask=parallel.Mask(causal=causal)), q, k, v)  # noqa: B023
            for a, b in zip((found, *own_pull(ct)), (wanted, *pull(ct)), strict=True):
                assert (a - b).abs().max() < 1e-13, (chosen, causal)


class Demanding:
    """Stands in for `torch.ops.aten`: CUDA's kernels, with what they take for granted and how they return it."""

    def __init__(self) -> None:
        self.met: list[str] = []

    def taken(self, name: str, *rows: Tensor) -> None:
        self.met.append(name)
        for x in rows:
            assert x.shape[-1] % 8 == 0
            assert x.stride(-1) == 1
            assert all(n % 8 == 0 for n in (x.storage_offset(), *x.stride()[:-1]))

    def computed(self, *args: Any, scale: float) -> tuple[Tensor, Tensor]:
        """The output as it lies in memory on CUDA, and the log-sum-exp."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, scale=scale)
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()

    def gradients(self, ct: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Any) -> Any:
        causal, scale = more
        assert lse.shape == q.shape[:-1]
        assert lse.dtype == torch.promote_types(q.dtype, torch.float32)
        # Kernels take the strides for those of a new tensor.
        lse = lse.as_strided(lse.shape, torch.empty(lse.shape).stride(), lse.storage_offset())
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(ct, q, k, v, out, lse, 0.0, causal, scale=scale)

    def _scaled_dot_product_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, debug: bool, *, scale: float
    ) -> Any:
        self.taken("forward", q, k, v)
        return *self.computed(q, k, v, dropout, causal, scale=scale), *[None] * 7

    def _scaled_dot_product_flash_attention_backward(
        self, ct: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Any, scale: float
    ) -> Any:
        self.taken("backward", ct, q, k, v, out)
        assert more[:5] == (None, None, q.shape[2], k.shape[2], 0.0)
        return self.gradients(ct, q, k, v, out, lse, more[5], scale)

    def _scaled_dot_product_cudnn_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: None,
        keep: bool,
        dropout: float,
        causal: bool,
        debug: bool,
        **how: Any,
    ) -> Any:
        self.taken("forward", q, k, v)
        out, lse = self.computed(q, k, v, dropout, causal, **how)
        return out, lse[..., None], *[None] * 7

    def _scaled_dot_product_cudnn_attention_backward(
        self, ct: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Any, scale: float
    ) -> Any:
        self.taken("backward", ct, q, k, v, out)
        assert more[2:8] == (None, None, None, q.shape[2], k.shape[2], 0.0)
        assert lse.shape == (*q.shape[:-1], 1)
        return self.gradients(ct, q, k, v, out, lse.squeeze(-1), more[8], scale)

    def _scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: None, keep: bool, dropout: float, causal: bool, *, scale: float
    ) -> Any:
        self.taken("forward", q, k, v)
        assert keep
        assert q.shape[1] == k.shape[1]
        out, lse = self.computed(q, k, v, dropout, causal, scale=scale)
        return out, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf), None, None

    def _scaled_dot_product_efficient_attention_backward(
        self, ct: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, *more: Any, scale: float
    ) -> Any:
        lse, *rest = more
        self.taken("backward", ct, q, k, v, out)
        assert rest[2:4] == [0.0, (True, True, True, False)]
        assert lse.is_contiguous()
        assert lse.shape == (*q.shape[:2], -(-q.shape[2] // 32) * 32)
        assert lse[..., q.shape[2] :].isinf().all()
        return *self.gradients(ct, q, k, v, out, lse[..., : q.shape[2]].contiguous(), rest[4], scale), None


KERNELS = {"flash": attention.FLASH, "cuDNN": attention.CUDNN, "efficient": attention.EFFICIENT}


def demanding(monkeypatch: pytest.MonkeyPatch, kernel: str = "flash") -> list[str]:
    """Lets one of CUDA's kernels run here; returns which of its two parts ran."""
    stand_in = Demanding()
    monkeypatch.setattr(attention, "_kernel", lambda *_: KERNELS[kernel])
    monkeypatch.setattr(attention, "_aten", stand_in)
    return stand_in.met


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_a_kernel_is_trusted_if_it_computes_attention(
    monkeypatch: pytest.MonkeyPatch, kernel: str, groups: int, causal: bool
) -> None:
    demanding(monkeypatch, kernel)
    q = drawn(groups)[0]
    assert attention._differs(KERNELS[kernel], q.float(), HEADS // groups, causal) == ""
    for name, (forward, backward) in WRONG.items():
        right = KERNELS[kernel]

        def given(*xs: Any, right: Any = right, forward: Any = forward) -> Any:
            return forward(*right.forward(*xs))

        def pulled(*xs: Any, right: Any = right, backward: Any = backward) -> Any:
            return backward(*right.backward(*xs))

        assert attention._differs(
            attention.AttentionKernel("wrong", given, pulled), q.float(), HEADS // groups, causal
        ), name


def as_is(*xs: Any) -> Any:
    return xs


WRONG: dict[str, Any] = {
    "powers of two": (lambda out, lse: (out, lse / 0.6931), as_is),
    "the sum of exponentials": (lambda out, lse: (out, lse.exp()), as_is),
    "not a number": (lambda out, lse: (out * torch.nan, lse), as_is),
    "another order": (as_is, lambda dq, dk, dv: (dq, dv, dk)),
    "without the scale": (as_is, lambda dq, dk, dv: (dq * 2, dk, dv)),
    "another shape": (lambda out, lse: (out, lse[..., None]), as_is),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_torch_has_kernels_with_these_arguments_and_shapes(kernel: str) -> None:
    q, k, v = (torch.empty(2, 4, n, 20, dtype=torch.bfloat16, device="meta") for n in (33, 50, 50))
    out, lse = KERNELS[kernel].forward(q, k, v, False, 0.5)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:3], torch.float32)
    gradients = KERNELS[kernel].backward(out, q, k, v, out, lse, False, 0.5)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (q, k, v)]


def test_torch_chooses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, bool]] = []

    def choice(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool = False, **how: Any) -> int:
        assert how == {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "scale": 0.5}
        asked.append((q.shape[1], k.shape[1], enable_gqa))
        return chosen if len(asked) == 1 else torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION.value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    q, k, v = drawn(2)
    for backend, kernel in attention._CUDA.items():
        chosen = backend
        asked.clear()
        assert attention._chosen_kernel(q, k, v, True, 0.5) is kernel
        assert asked == [(HEADS, 2, True)]
    chosen = torch.nn.attention.SDPBackend.MATH.value
    asked.clear()
    assert attention._chosen_kernel(q, k, v, True, 0.5) is attention.EFFICIENT
    assert asked == [(HEADS, 2, True), (HEADS, HEADS, False)]
    asked.clear()
    assert attention._chosen_kernel(q, q, q, True, 0.5) is attention.PLAIN


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_the_kernels_of_a_gpu_get_what_they_take_for_granted(
    monkeypatch: pytest.MonkeyPatch, kernel: str, layout: str, causal: bool
) -> None:
    met = demanding(monkeypatch, kernel)
    *inputs, ct = (LAYOUTS[layout](x) for x in (*drawn(HEADS), torch.cos(drawn(HEADS)[0])))
    wanted, pull = vjp(lambda *xs: plain(*xs, causal=causal), *inputs)
    found, own_pull = vjp(lambda *xs: parallel.attention(*xs, mask=parallel.Mask(causal=causal)), *inputs)
    for a, b in zip((found, *own_pull(ct)), (wanted, *pull(ct)), strict=True):
        assert (a - b).abs().max() < 1e-13
    assert met == ["forward", "backward"]


def by_kernel(kernel: str) -> dict[Any, float]:
    size = torch.distributed.get_world_size()
    mesh, found = sf.make_mesh(context=size, device="cpu"), {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        met = demanding(monkeypatch, kernel)
        for way, causal, groups in cells(size):
            balanced, f = WAYS[way][1]["balanced"] and causal, called(way, causal, "context")

            @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
            def worst(whole: Any, f: Any = f, causal: bool = causal, balanced: bool = balanced) -> float:
                own = parallel.positions(LENGTH, "context", balanced=balanced)
                local = [x[:, :, own] for x in whole]

                def loss(*args: Tensor) -> Tensor:
                    return sf.psum(f(*args).square().sum(), "context")

                reference = torch.func.grad(lambda *xs: plain(*xs, causal=causal).square().sum(), (0, 1, 2))(*whole)
                got = (f(*local), *sf.grad(loss, (0, 1, 2))(*local))
                pairs = zip(got, (plain(*whole, causal=causal), *reference), strict=True)
                return max(((a - b[:, :, own]).abs().max() / b.abs().max()).item() for a, b in pairs)

            found[way, causal, groups] = worst(drawn(groups))
        assert met.count("backward") >= len(found)
    return found


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("world", [2, 4], indirect=True)
def test_a_ring_of_gpu_kernels_is_attention(world: World, kernel: str) -> None:
    for found in world.with_deadline(100).run(by_kernel, kernel):
        assert len(found) == 12
        assert not {cell: worst for cell, worst in found.items() if not worst < 1e-12}


def refusals() -> list[str]:
    mesh, found = sf.make_mesh(context=2, device="cpu"), []
    q, k, v = (x[:, :, :7] for x in drawn(HEADS))
    for call in (
        lambda: parallel.ring_attention(q, k, v, "context", balanced=True),
        lambda: parallel.ring_attention(q, k[:, :3], v[:, :3], "context"),
        lambda: parallel.ring_attention(q, k[:, :, :5], v[:, :, :5], "context"),
        lambda: parallel.ulysses_attention(q[:, :3], k[:, :3], v[:, :3], "context"),
        lambda: parallel.positions(6, "context", balanced=True),
    ):
        with pytest.raises(ValueError, match=r"attention|positions") as caught:
            sf.shard_map(call, mesh=mesh, in_specs=(), out_specs=...)()
        found.append(str(caught.value))
    return found


@pytest.mark.world(2)
def test_what_does_not_fit_is_refused_on_every_rank(world: World) -> None:
    for odd, heads, lengths, shared, positions in world.run(refusals):
        assert "7 positions" in odd
        assert "multiple of 4" in odd
        assert "8 heads of queries are not a multiple of 3" in heads
        assert "7 queries and 5 keys" in lengths
        assert "q has 3 heads" in shared
        assert "use ring_attention" in shared
        assert "pad it to 8" in positions


def goes_on_after(name: str, error: type[BaseException]) -> list[Any]:
    """What calls give, of which the second fails in the middle of the ring, as on all ranks."""
    mesh, whole, inside = sf.make_mesh(context=-1, device="cpu"), drawn(HEADS), []
    kernel, size = getattr(attention, name), torch.distributed.get_world_size()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sf.psum(parallel.ring_attention(q, k, v, "context", balanced=True).square().sum(), "context")

    def fails(*args: Any) -> Any:
        inside.append(name)
        if len(found) == 1 and len(inside) == min(2, size - 1):
            raise error("in the middle")
        return kernel(*args)

    found: list[Any] = []
    positions = partial(parallel.positions, LENGTH, "context", balanced=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, name, fails)
        for _ in range(3):
            inside.clear()
            mapped = sf.shard_map(sf.value_and_grad(run), mesh=mesh, in_specs=..., out_specs=...)
            places = sf.shard_map(positions, mesh=mesh, in_specs=(), out_specs=...)()
            try:
                found.append(mapped(*(x[:, :, places] for x in whole))[0].item())
            except BaseException as raised:
                found.append(str(raised))
    return found


@pytest.mark.world(4, "processes")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["attention_with_lse", "attention_backward"])
def test_a_ring_that_fails_in_the_middle_leaves_nothing_under_way(world: World, name: str, error: Any) -> None:
    wanted = plain(*drawn(HEADS), causal=True).square().sum().item()
    for first, failed, then in world.with_deadline(30).run(goes_on_after, name, error):
        assert failed == "in the middle"
        assert first == then == pytest.approx(wanted, rel=1e-12)


def test_inputs_of_other_dtypes_are_refused_before_anything_is_sent(world: World) -> None:
    def run() -> str:
        mesh = sf.make_mesh(context=-1, device="cpu")
        q, k, v = drawn(HEADS)
        with pytest.raises(TypeError) as caught:
            sf.shard_map(
                lambda q, k, v: parallel.ring_attention(q, k, v, "context"), mesh=mesh, in_specs=..., out_specs=...
            )(q, k.float(), v)
        return str(caught.value)

    for said in world.run(run):
        assert said.endswith(
            "q is torch.float64, k torch.float32 and v torch.float64; they have one dtype: write k.to(q.dtype)"
        )


@pytest.mark.parametrize("fused", [True, False])
def test_keys_that_several_heads_share_are_not_repeated(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    if not fused:
        monkeypatch.setattr(attention, "_kernel", lambda *_: attention.PLAIN)
    q, k, v = (torch.randn(1, heads, length, 16) for heads, length in ((8, 4), (2, 64), (2, 64)))
    largest = [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            tensors = [x for x in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(x, Tensor)]
            largest[0] = max(largest[0], *(x.untyped_storage().nbytes() // x.itemsize for x in tensors), 0)
            return out

    def total(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return parallel.attention(q, k, v, mask=parallel.Mask(causal=False)).square().sum()

    with Watch():
        found = [*sf.grad(total, (0, 1, 2))(q, k, v), torch.func.jvp(total, (q, k, v), (q, k, v))[1]]
    assert largest[0] <= 2 * 64 * 16, largest  # the keys are that large; repeated, they are four times as large
    repeated = lambda q, k, v: total(q, *(x.repeat_interleave(4, 1) for x in (k, v)))  # noqa: E731
    wanted = [*sf.grad(repeated, (0, 1, 2))(q, k, v), torch.func.jvp(repeated, (q, k, v), (q, k, v))[1]]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
