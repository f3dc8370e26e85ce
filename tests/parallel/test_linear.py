"""Matrices, tables and logits that are cut over an axis give what whole ones give."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import P, parallel
from shardfn.testing import World, simulated, world
from tests.reference import worst

WIDTH, HIDDEN, VOCABULARY, REAL, LENGTH = 6, 8, 16, 11, 8
CUT = {
    "norm": P(),
    "inner": P("tensor"),
    "up": P(None, "tensor"),
    "down": P("tensor"),
    "table": P("tensor"),
    "out": P(None, "tensor"),
}
either = pytest.mark.parametrize("world", [(2, "processes"), (4, "processes")], indirect=True, ids=["2", "4"])


def parameters(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "norm": (WIDTH,), "inner": (HIDDEN,), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
        "table": (VOCABULARY, WIDTH), "out": (WIDTH, VOCABULARY),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}


def plain(p: Any, tokens: Tensor) -> Tensor:
    x = F.embedding(tokens, p["table"])
    h = F.rms_norm(F.rms_norm(x, (WIDTH,), p["norm"]) @ p["up"], (HIDDEN,), p["inner"], eps=0.1)
    x = x + torch.tanh(h) @ p["down"]
    logits = (x @ p["out"])[..., :REAL]
    targets = tokens.roll(1, 1) % REAL
    return F.cross_entropy(logits.flatten(0, 1), targets.where(targets != 3, -100).flatten(), reduction="sum")


def cut(p: Any, tokens: Tensor, sequence: int | None, chunk: int | None) -> Tensor:
    x = parallel.embedding(tokens, p["table"], "tensor", sequence=sequence)
    norm = p["norm"] if sequence is None else sf.pvary(p["norm"], "tensor")
    h = parallel.to_parallel(parallel.rms_norm(x, norm), "tensor", sequence=sequence)
    h = parallel.rms_norm(h @ p["up"], p["inner"], "tensor", eps=0.1)
    x = x + parallel.from_parallel(torch.tanh(h) @ p["down"], "tensor", sequence=sequence)
    targets = tokens.roll(1, 1) % REAL
    losses = parallel.cross_entropy(
        x, p["out"], targets.where(targets != 3, -100), "tensor", vocabulary=REAL, chunk=chunk, sequence=sequence
    )
    assert losses.shape == tokens.shape
    return losses.sum()


def every_derivative() -> dict[Any, float]:
    mesh = sf.make_mesh(tensor=torch.distributed.get_world_size(), device="cpu")
    place = sf.shard_map(lambda p: p, mesh=mesh, in_specs=(CUT,), out_specs=CUT, inputs="global")
    whole, along = parameters(), parameters(1)
    local, moves = place(whole), place(along)
    tokens = torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(2))
    found: dict[Any, float] = {}
    gradient = torch.func.grad(plain)
    for name, sequence, chunk in [("plain", None, None), ("sequence", 1, None), ("chunks", None, 5), ("both", 1, 7)]:

        @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
        def run(p: Any, v: Any, sequence: Any = sequence, chunk: Any = chunk) -> Any:
            def loss(p: Any, tokens: Tensor = tokens) -> Tensor:
                return cut(p, tokens, sequence, chunk)

            return {
                "value": loss(p),
                "grad": sf.grad(loss)(p),
                "hvp": torch.func.jvp(sf.grad(loss), (p,), (v,))[1],
                "each": torch.func.vmap(sf.grad(loss), (None, 0))(p, tokens[:, None]),
            }

        got = run(local, moves)
        wanted = {
            "grad": gradient(whole, tokens),
            "hvp": torch.func.jvp(lambda p: gradient(p, tokens), (whole,), (along,))[1],
            "each": {key: torch.stack([gradient(whole, row[None])[key] for row in tokens]) for key in whole},
        }
        found[name, "value"] = abs(got["value"] / plain(whole, tokens) - 1).item()
        for kind, tree in wanted.items():
            specs = CUT if kind != "each" else {key: P(None, *spec.entries) for key, spec in CUT.items()}
            mine = sf.shard_map(lambda p: p, mesh=mesh, in_specs=(specs,), out_specs=specs, inputs="global")(tree)
            found[name, kind] = max(
                ((got[kind][key] - mine[key]).abs().max() / tree[key].abs().max()).item() for key in whole
            )
    return found


@either
def test_cut_matrices_have_the_derivatives_of_whole_ones(world: World) -> None:
    for found in world.with_deadline(100).run(every_derivative):
        assert len(found) == 16
        assert not {cell: worst for cell, worst in found.items() if not worst < 1e-12}


def memory(chunk: int | None) -> int:
    """The largest tensor that the cross-entropy of 512 places over 4096 words makes, in elements."""
    mesh = sf.make_mesh(tensor=2, device="cpu")
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(x, Tensor):
                    largest = max(largest, x.numel())
            return out

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return parallel.cross_entropy(x, w, torch.zeros(512, dtype=torch.long), "tensor", chunk=chunk).sum()

    with Watch():
        # A checked call looks at tensors byte by byte, which would be counted as elements.
        run = sf.shard_map(sf.grad(loss, (0, 1)), mesh=mesh, in_specs=..., out_specs=..., check=False)
        run(torch.randn(512, 8), torch.randn(8, 2048))
    return largest


@pytest.mark.world(2)
def test_only_a_few_rows_of_logits_exist_at_a_time(world: World) -> None:
    assert world.run(memory, None) == [512 * 2048] * 2
    assert world.run(memory, 16) == [16 * 2048] * 2


def test_the_error_of_the_gradients_does_not_grow_with_the_number_of_chunks() -> None:
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=g).bfloat16() for shape in ((4096, 64), (64, 512)))
    targets = torch.randint(512, (4096,), generator=g)

    def gradients(chunk: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        a, b = x.to(dtype, copy=True).requires_grad_(), (w.to(dtype) / 10).requires_grad_()
        found = torch.autograd.grad(parallel.cross_entropy(a, b, targets, chunk=chunk).sum(), (a, b))
        assert [grad.dtype for grad in found] == [dtype] * 2
        return [grad.double() for grad in found]

    exact = gradients(4096, torch.float64)
    errors = [
        [((a - b).norm() / b.norm()).item() for a, b in zip(gradients(chunk), exact, strict=True)]
        for chunk in (4096, 64, 16)
    ]
    for several in errors[1:]:
        assert all(error < 1.4 * alone for error, alone in zip(several, errors[0], strict=True)), errors


def with_a_common_part() -> dict[Any, float]:
    """How far losses and their derivatives are from those in float64, where logits differ by little from a number.

    The logits are exact: errors are those of the loss alone.
    """
    mesh = sf.make_mesh(tensor=-1, device="cpu")
    g = torch.Generator().manual_seed(0)
    x, w, along = (torch.randint(-4, 5, shape, generator=g) / 4 for shape in ((6, 4), (4, 8), (6, 4)))
    x[:, 0], w[0] = 0, 1
    targets, found = torch.tensor([0, 7, -100, 3, 4, 5]), dict[Any, float]()
    for offset, dtype, chunk in itertools.product((0, 1e2, 1e4, 1e6), (torch.float32, torch.bfloat16), (None, 4)):

        def loss(x: Tensor, w: Tensor, chunk: Any = chunk) -> Tensor:
            return parallel.cross_entropy(x, w, targets, "tensor", chunk=chunk)

        def derivatives(x: Tensor, w: Tensor, along: Tensor, loss: Any = loss) -> Any:
            dx, dw = sf.grad(lambda x, w: loss(x, w).sum(), (0, 1))(x, w)
            moved: Any = torch.func.jvp(lambda x: loss(x, w), (x,), (along,))
            return [loss(x, w), moved[0], dx, moved[1]], dw[1:]

        columns = P(None, "tensor")
        run = sf.shard_map(
            derivatives, mesh=mesh, in_specs=(P(), columns, P()), out_specs=(P(), columns), inputs="global"
        )
        given = [each.to(dtype) for each in (x.index_fill(1, torch.tensor(0), offset), w, along)]
        got, dw = run(*given)
        rows, matrix, moves = (each.double() for each in given)
        logits = (given[0] @ given[1]).double()
        shares = torch.func.grad(lambda logits: F.cross_entropy(logits, targets, reduction="sum"))(logits)
        exact = F.cross_entropy(logits, targets, reduction="none")
        wanted = [exact, exact, shares @ matrix.mT, (shares * (moves @ matrix)).sum(1)]
        mine = (rows.mT @ shares)[1:].chunk(mesh.size(), 1)[mesh.get_rank()]
        names = ("loss", "composed", "dx", "tangent", "dw")
        for name, a, b in zip(names, (*got, dw), (*wanted, mine), strict=True):
            eps = torch.finfo(dtype if name in ("dx", "dw", "tangent") else torch.float32).eps
            found[offset, dtype, chunk, name] = ((a - b).abs().max() / b.abs().max()).item() / eps
    return found


@pytest.mark.parametrize(
    "world", [(1, "alone"), (2, "processes"), (4, "processes")], indirect=True, ids=["1", "2", "4"]
)
def test_what_logits_have_in_common_costs_no_digits(world: World) -> None:
    for found in world.with_deadline(60).run(with_a_common_part):
        assert len(found) == 4 * 2 * 2 * 5
        # In units of one rounding, of which sums have several, in an order that depends on the processor.
        assert not {cell: worst for cell, worst in found.items() if not worst < 4}


def mixed(experts: Tensor, **options: Any) -> Tensor:
    """A mixture whose routing is made by hand; experts multiply with their number."""
    weights = torch.ones(experts.shape, device=experts.device)
    routing = parallel.Routing(experts, weights, torch.zeros(*experts.shape[:2], 4, device=experts.device))
    x, numbers = weights[..., :1], torch.arange(4.0, device=experts.device)
    return parallel.mixture_of_experts(lambda p, x: x * p, numbers, x, routing, **options)


def indices(like: Tensor, *numbers: int) -> Tensor:
    return torch.tensor(numbers, device=like.device)


OUTSIDE: dict[str, tuple[Any, str]] = {
    "a target": (
        lambda w, n: parallel.cross_entropy(w.mT, w, indices(w, 0, -100, n, 1)),
        "cross_entropy: targets are from 0 to 4; they are from 0 to 3, and 1 of 4 are not",
    ),
    "a target, in a batch": (
        lambda w, n: torch.func.vmap(lambda t: parallel.cross_entropy(w.mT, w, t))(
            indices(w, 0, -100, 2, 1, n, 1, n, 0).view(2, 4)
        ),
        "cross_entropy: targets are from 0 to 4; they are from 0 to 3, and 2 of 8 are not",
    ),
    "a target that is differentiated": (
        lambda w, n: sf.grad(lambda w: parallel.cross_entropy(w.mT, w, indices(w, n, 0, 0, 0)).sum())(w),
        "cross_entropy: targets are from 0 to 4; they are from 0 to 3, and 1 of 4 are not",
    ),
    "a token": (
        lambda w, n: parallel.embedding(indices(w, 0, 3 - n, 3 - n), w),
        "embedding: tokens are from -1 to 0; they are from 0 to 3, and 2 of 3 are not",
    ),
    "an expert": (
        lambda w, n: mixed(indices(w, 0, 1, n).view(1, 3, 1), capacity=2),
        "mixture_of_experts: routing.experts are from 0 to 4; they are from 0 to 3, and 1 of 3 are not",
    ),
    "a negative expert": (
        lambda w, n: mixed(indices(w, 0, 1, 3 - n).view(1, 3, 1), capacity=2),
        "mixture_of_experts: routing.experts are from -1 to 1; they are from 0 to 3, and 1 of 3 are not",
    ),
}
"""Calls with a matrix and a number that is inside if it is 3, and outside if it is 4; what is said of the latter."""


def heard_on_a_device() -> dict[str, Any]:
    """What a device says of wrong indices, and when: results are finite, and a later call raises."""
    found = {}
    with simulated(values=True) as device:
        w = torch.ones(4, 4, device=device.name)
        for name, (call, _) in OUTSIDE.items():
            call(w, 3)
            device.reset_counts()
            out = call(w, 4)
            waits = device.synchronizations
            torch.get_device_module(device.name).synchronize()
            try:
                call(w, 3)
                error = ""
            except RuntimeError as caught:
                error = str(caught)
            found[name] = bool(out.isfinite().all()), [one for one in waits if "cpu->sim" not in one.kind], error
    return found


def test_a_device_goes_on_with_a_wrong_index_and_a_later_call_raises() -> None:
    for name, (finite, waits, error) in world(1, "alone").run(heard_on_a_device)[0].items():
        assert (finite, waits) == (True, []), name
        assert OUTSIDE[name][1] in error, name


@pytest.mark.parametrize("name", OUTSIDE)
def test_on_a_cpu_the_call_itself_says_the_same_of_a_wrong_index(name: str) -> None:
    call, message = OUTSIDE[name]
    call(torch.ones(4, 4), 3)
    with pytest.raises(IndexError) as caught:
        call(torch.ones(4, 4), 4)
    assert str(caught.value) == message


INTEGERS = [
    torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
BY_INDEX: dict[str, tuple[str, Any]] = {
    "embedding": ("tokens", lambda i: parallel.embedding(i, torch.arange(8.0).view(4, 2))),
    "cross_entropy": ("targets", lambda i: parallel.cross_entropy(torch.eye(4), torch.eye(4), i, ignore=2, chunk=3)),
    "mixture_of_experts": ("routing.experts", lambda i: mixed(i.view(2, 2, 1))),
    "mixture_of_experts, capacity": ("routing.experts", lambda i: mixed(i.view(2, 2, 1), capacity=1)),
    "num_dropped": ("routing.experts", lambda i: parallel.num_dropped(by_hand(i), 1)),
    "balance_loss": ("routing.experts", lambda i: parallel.balance_loss(by_hand(i))),
}


def by_hand(experts: Tensor) -> parallel.Routing:
    return parallel.Routing(experts.view(1, 4, 1), torch.ones(1, 4, 1), torch.arange(16.0).view(1, 4, 4))


@pytest.mark.parametrize("name", BY_INDEX)
def test_indices_have_any_integer_dtype(name: str) -> None:
    _, call = BY_INDEX[name]
    numbers = torch.tensor([3, 0, 2, 0])
    wanted = call(numbers)
    assert wanted.any()
    for dtype in INTEGERS:
        assert torch.equal(call(numbers.to(dtype)), wanted), dtype


def test_a_target_that_is_ignored_is_compared_as_a_number() -> None:
    """156 is -100 in 8 bits."""
    w = torch.eye(200)
    losses = parallel.cross_entropy(w[[0, 0]], w, torch.tensor([0, 156], dtype=torch.uint8))
    assert torch.equal(losses, F.cross_entropy(w[[0, 0]], torch.tensor([0, 156]), reduction="none"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("name", BY_INDEX)
def test_indices_that_are_no_integers_are_refused(name: str, dtype: torch.dtype) -> None:
    what, call = BY_INDEX[name]
    with pytest.raises(TypeError) as caught:
        call(torch.tensor([1, 0, 1, 0]).to(dtype))
    caller = name.partition(",")[0]
    assert str(caught.value).startswith(f"{caller}: {what} are {dtype} (")
    assert f"they are integers: write {what}.long()" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 0, 7)], ids=str)
def test_a_norm_of_whole_vectors_is_the_one_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x, ct = (torch.randn(shape, generator=g).to(dtype) for _ in range(2))
    w = torch.randn(7, generator=g).to(dtype)

    def run(norm: Any) -> tuple[Tensor, ...]:
        p, q = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = norm(p, q)
        return out, *torch.autograd.grad(out, (p, q), ct)

    ours = run(parallel.rms_norm)
    theirs = run(lambda x, w: F.rms_norm(x, (7,), w))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def norms_on_a_device() -> list[float]:
    """How far a norm's value, gradient, second derivative and gradients of a batch are from those on the CPU."""
    found = []
    with simulated(values=True) as device:
        x, w = torch.randn(3, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)

        def loss(x: Tensor, w: Tensor) -> Tensor:
            return parallel.rms_norm(x, w, eps=0.1).pow(3).sum()

        def twice(x: Tensor, w: Tensor) -> Tensor:
            return sf.grad(lambda x: sf.grad(loss)(x, w).square().sum())(x)

        for form in (loss, sf.grad(loss), twice, torch.func.vmap(sf.grad(loss), (0, None))):
            here, there = form(x, w), form(x.to(device.name), w.to(device.name)).cpu()
            found.append(((here - there).abs().max() / here.abs().max()).item())
    return found


def test_a_norm_on_a_device_is_the_one_on_the_cpu() -> None:
    (found,) = world(1, "alone").run(norms_on_a_device)
    assert len(found) == 4
    assert worst(found) < 1e-12, found


BAD: dict[str, tuple[Any, type[Exception], list[str]]] = {
    "a token beyond the table": (
        lambda w: parallel.embedding(torch.tensor([8]), w, "tensor"), IndexError, ["from 8 to 8", "0 to 7"]
    ),
    "a negative token": (
        lambda w: parallel.embedding(torch.tensor([-1]), w, "tensor"), IndexError, ["from -1 to -1", "0 to 7"]
    ),
    "a target beyond the vocabulary": (
        lambda w: parallel.cross_entropy(w[:, :1], w[:1], torch.tensor([0, 1, 2, 7]), "tensor", vocabulary=7),
        IndexError, ["from 0 to 7", "0 to 6", "1 of 4"],
    ),
    "a vocabulary beyond the matrix": (
        lambda w: parallel.cross_entropy(w[:, :1], w[:1], torch.tensor([0, 1, 2, 3]), "tensor", vocabulary=9),
        ValueError, ["vocabulary=9", "4 columns", "2 ranks"],
    ),
    "targets of another shape": (
        lambda w: parallel.cross_entropy(w, w, torch.tensor([0, 1]), "tensor"), ValueError, ["(4, 4)", "(2,)", "[d, v]"]
    ),
    "a norm's weight that is whole": (
        lambda w: parallel.rms_norm(w, torch.ones(8), "tensor"), ValueError, ["(4, 4)", "(8,)", "[d]"]
    ),
    "no rows": (
        lambda w: parallel.cross_entropy(w, w, torch.tensor([0] * 4), "tensor", chunk=0), ValueError, ["chunk must be"]
    ),
}  # fmt: skip


def refusals() -> dict[str, Any]:
    mesh, found = sf.make_mesh(tensor=2, device="cpu"), {}
    for name, (call, *_) in BAD.items():
        try:
            sf.shard_map(call, mesh=mesh, in_specs=..., out_specs=...)(torch.randn(4, 4, dtype=torch.float64))
        except (ValueError, IndexError) as error:
            found[name] = type(error), str(error)
    try:
        sf.shard({"q": torch.randn(4, 3)}, mesh, sf.full_shard(()), specs=P(None, "tensor"))
    except ValueError as error:
        found["heads that do not divide"] = type(error), str(error)
    return found


@pytest.mark.world(2)
def test_what_does_not_fit_is_refused_on_every_rank(world: World) -> None:
    for found in world.run(refusals):
        for name, (_, kind, words) in BAD.items():
            assert found[name][0] is kind, name
            assert all(word in found[name][1] for word in words), (name, found[name][1])
        assert "3 does not divide by 2: pad it to 4" in found["heads that do not divide"][1]
