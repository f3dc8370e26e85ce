"""Every collective under every transform, against torch.func on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import shardfn as sf
from shardfn.testing import World
from tests.reference import LINEAR, Case, drawn, mine, worst

BATCH = 3


class Setting:
    """One case on one rank: the local function `f`, the joint function `j`, and what goes into both."""

    def __init__(self, case: Case, axis: Any) -> None:
        self.case, self.n, self.rank = case, sf.axis_size(axis), sf.axis_index(axis)
        self.f = lambda x: case.local(x, axis, self.n)
        self.j = case.joint(self.n)
        self.x = drawn(case.takes, case.shape(self.n), self.n, 1)
        self.t = drawn(case.takes, case.shape(self.n), self.n, 2)
        self.c = torch.randn(self.j(self.x).shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def takes(self, whole: Tensor) -> Tensor:
        return mine(self.case.takes, whole, self.rank)

    def gives(self, whole: Tensor) -> Tensor:
        return mine(self.case.gives, whole, self.rank)

    def loss(self, x: Tensor) -> Tensor:
        """This rank's term of the joint loss; an invariant one is the same on all ranks, and counts once."""
        return self.phi(self.f(x))

    def phi(self, y: Tensor) -> Tensor:
        return (torch.sin(y) * self.gives(self.c)).sum()

    def joint_loss(self, x: Tensor) -> Tensor:
        return (torch.sin(self.j(x)) * self.c).sum()

    def batch(self, whole: Tensor, dim: int = 0) -> Tensor:
        return torch.stack([whole * (i + 1) for i in range(BATCH)], dim)

    def everywhere(self, kind: str, one: Tensor) -> Tensor:
        return one.expand(self.n, *one.shape) if kind == "V" else one


def forward(s: Setting) -> Any:
    return s.f(s.takes(s.x)), s.gives(s.j(s.x))


def autograd(s: Setting) -> Any:
    x = s.takes(s.x).clone().requires_grad_()
    return torch.autograd.grad(s.loss(x), x)[0], s.takes(grad(s.joint_loss)(s.x))


def double_backward(s: Setting) -> Any:
    x = s.takes(s.x).clone().requires_grad_()
    (g,) = torch.autograd.grad(s.loss(x), x, create_graph=True)
    (second,) = torch.autograd.grad(torch.sin(g).sum(), x)
    return second, s.takes(grad(lambda x: torch.sin(grad(s.joint_loss)(x)).sum())(s.x))


def func_grad(s: Setting) -> Any:
    return grad(s.loss)(s.takes(s.x)), s.takes(grad(s.joint_loss)(s.x))


def func_vjp(s: Setting) -> Any:
    return vjp(s.f, s.takes(s.x))[1](s.gives(s.c))[0], s.takes(vjp(s.j, s.x)[1](s.c)[0])


def func_jvp(s: Setting) -> Any:
    got, want = jvp(s.f, (s.takes(s.x),), (s.takes(s.t),)), jvp(s.j, (s.x,), (s.t,))
    return torch.stack(got), torch.stack([s.gives(want[0]), s.gives(want[1])])


def func_vmap(s: Setting) -> Any:
    want = torch.stack([s.gives(s.j(one)) for one in s.batch(s.x)])
    x = s.takes(s.x)
    dims = [vmap(s.f, in_dims=dim)(s.batch(x, dim)) for dim in range(-1, x.ndim + 1)]
    return torch.stack(dims), torch.stack([want] * len(dims))


def vmap_out_dim(s: Setting) -> Any:
    want = torch.stack([s.gives(s.j(one)) for one in s.batch(s.x)], 1)
    return vmap(s.f, out_dims=1)(s.batch(s.takes(s.x))), want


def vmap_nested(s: Setting) -> Any:
    inner = s.batch(s.takes(s.x))
    want = torch.stack([torch.stack([s.gives(s.j(one)) for one in s.batch(s.x)]) * k for k in (1, 2)])
    return vmap(vmap(s.f))(torch.stack([inner, 2 * inner])), want


def vmap_of_other(s: Setting) -> Any:
    """The batch does not touch the collective's argument."""
    x = s.takes(s.x)
    got = vmap(lambda k: s.f(x) * k)(torch.arange(3.0, dtype=torch.float64))
    return got, torch.stack([s.gives(s.j(s.x)) * k for k in range(3)])


def func_jacrev(s: Setting) -> Any:
    """Row i is the derivative of the sum of every rank's output i: all ranks push the same basis vector."""
    x, y = s.takes(s.x), s.gives(s.j(s.x))
    basis = torch.eye(y.numel(), dtype=torch.float64).view(-1, *y.shape)
    pull = vjp(s.j, s.x)[1]
    rows = [s.takes(pull(s.everywhere(s.case.gives, e).contiguous())[0]) for e in basis]
    return jacrev(s.f)(x), torch.stack(rows).view(*y.shape, *x.shape)


def func_jacfwd(s: Setting) -> Any:
    y = s.gives(s.j(s.x))
    return jacfwd(s.f)(s.takes(s.x)), along_inputs(s, s.j, s.gives).view(*y.shape, *s.takes(s.x).shape)


def along_inputs(s: Setting, f: Any, own: Callable[[Tensor], Tensor]) -> Tensor:
    """Column j is the derivative along every rank's input j at once."""
    x = s.takes(s.x)
    basis = torch.eye(x.numel(), dtype=torch.float64).view(-1, *x.shape)
    return torch.stack([own(jvp(f, (s.x,), (s.everywhere(s.case.takes, e).contiguous(),))[1]) for e in basis], -1)


def grad_of_grad(s: Setting) -> Any:
    got = grad(lambda x: torch.sin(grad(s.loss)(x)).sum())(s.takes(s.x))
    return got, s.takes(grad(lambda x: torch.sin(grad(s.joint_loss)(x)).sum())(s.x))


def jvp_of_grad(s: Setting) -> Any:
    got = jvp(grad(s.loss), (s.takes(s.x),), (s.takes(s.t),))[1]
    return got, s.takes(jvp(grad(s.joint_loss), (s.x,), (s.t,))[1])


def grad_of_jvp(s: Setting) -> Any:
    got = grad(lambda x: s.phi(jvp(s.f, (x,), (torch.sin(x),))[1]))(s.takes(s.x))
    want = grad(lambda x: (torch.sin(jvp(s.j, (x,), (torch.sin(x),))[1]) * s.c).sum())(s.x)
    return got, s.takes(want)


def vmap_of_grad(s: Setting) -> Any:
    want = torch.stack([s.takes(grad(s.joint_loss)(one)) for one in s.batch(s.x)])
    return vmap(grad(s.loss))(s.batch(s.takes(s.x))), want


def grad_of_vmap(s: Setting) -> Any:
    scale = torch.arange(1.0, 1 + BATCH, dtype=torch.float64)
    got = grad(lambda x: vmap(lambda k: s.phi(s.f(x * k)))(scale).sum())(s.takes(s.x))
    want = grad(lambda x: sum(s.joint_loss(x * k) for k in scale))(s.x)
    return got, s.takes(want)


def func_hessian(s: Setting) -> Any:
    x = s.takes(s.x)
    return hessian(s.loss)(x), along_inputs(s, grad(s.joint_loss), s.takes).view(*x.shape, *x.shape)


def shardfn_grad(s: Setting) -> Any:
    return sf.grad(s.loss)(s.takes(s.x)), s.takes(grad(s.joint_loss)(s.x))


REVERSE = [forward, autograd, double_backward, func_grad, func_vjp, func_vmap, vmap_out_dim, vmap_nested]
REVERSE += [vmap_of_other, func_jacrev, grad_of_grad, vmap_of_grad, grad_of_vmap, shardfn_grad]
FORWARD = [func_jvp, func_jacfwd, jvp_of_grad, grad_of_jvp, func_hessian]


Found = dict[str, tuple[float, float]]


def compare(case: Case, axis: Any, cells: list[Callable[[Setting], Any]], sizes: dict[str, int]) -> Found:
    """For each cell the worst difference, and the size of what it is a difference from."""
    mesh = sf.make_mesh(device="cpu", **sizes)

    def run() -> Found:
        found = {}
        for cell in cells:
            got, want = cell(Setting(case, axis))
            assert got.shape == want.shape, (cell.__name__, got.shape, want.shape)
            found[cell.__name__] = (got - want).abs().max().item(), want.abs().max().item()
        return found

    return sf.shard_map(run, mesh=mesh, in_specs=(), out_specs=...)()


def assert_equal(results: list[Found]) -> None:
    for cell in results[0]:
        differences, scales = zip(*(found[cell] for found in results), strict=True)
        assert max(scales) > 1e-3, f"{cell}: zero would pass this"
        assert worst(differences) < 1e-12, cell


@pytest.mark.parametrize("case", LINEAR, ids=str)
@pytest.mark.parametrize("world", [(2, "processes")], indirect=True, ids=["2"])
def test_transforms(world: World, case: Case) -> None:
    assert_equal(world.run(compare, case, "a", REVERSE + FORWARD, {"a": 2}))


@pytest.mark.parametrize("case", LINEAR, ids=str)
@pytest.mark.parametrize("world", [(4, "processes")], indirect=True, ids=["4"])
def test_transforms_over_two_axes(world: World, case: Case) -> None:
    assert_equal(world.run(compare, case, ("b", "a"), REVERSE + FORWARD, {"a": 2, "b": 2}))


# Forward-mode levels belong to the process, not the thread, so torch cannot run them on ranks that are threads.
@pytest.mark.parametrize("case", LINEAR, ids=str)
@pytest.mark.parametrize("world", [(4, "threads")], indirect=True, ids=["4-threads"])
def test_transforms_on_threads(world: World, case: Case) -> None:
    assert_equal(world.run(compare, case, "a", REVERSE, {"a": 4}))


def compiled(case: Case, cell: str) -> Found:
    mesh = sf.make_mesh(a=2, device="cpu")
    torch._dynamo.reset()

    def run() -> Found:
        s = Setting(case, "a")
        x, t = s.takes(s.x), s.takes(s.t)
        functions: dict[str, Callable[[Tensor], Any]] = {
            "forward": s.f,
            "backward": s.loss,
            "grad": grad(s.loss),
            "vmap": lambda x: vmap(s.f)(torch.stack([x, 2 * x])),
            "jvp": lambda x: jvp(s.f, (x,), (t,))[1],
            "vmap_of_grad": lambda x: vmap(grad(s.loss))(torch.stack([x, 2 * x])),
        }
        eager = functions[cell]
        fast = torch.compile(eager, fullgraph=True, backend="aot_eager")
        if cell == "backward":
            eager, fast = (lambda x, h=h: torch.autograd.grad(h(x), x)[0] for h in (eager, fast))
            x = x.clone().requires_grad_()
        want = eager(x)
        return {cell: ((fast(x) - want).abs().max().item(), want.abs().max().item())}

    return sf.shard_map(run, mesh=mesh, in_specs=(), out_specs=...)()


@pytest.mark.parametrize("cell", ["forward", "backward", "grad", "vmap", "jvp", "vmap_of_grad"])
@pytest.mark.parametrize("case", LINEAR, ids=str)
@pytest.mark.parametrize("world", [(2, "processes")], indirect=True, ids=["2"])
def test_compiled_as_one_graph(world: World, case: Case, cell: str) -> None:
    assert_equal(world.run(compiled, case, cell))
