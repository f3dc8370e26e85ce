"""Every torch.func transform with respect to sharded parameters, against the same on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, linearize, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import shardfn as sf
from shardfn import P
from shardfn.testing import World
from tests.models import layer, normal, squares, variables
from tests.reference import worst

vjp: Any = torch.func.vjp  # whose types say that they always return aux
jvp: Any = torch.func.jvp

D = 3
ROWS = 2
OPTIONS: list[dict[str, Any]] = [{}, {"remat": True}, {"reshard": False}]


def scaled(tree: Any) -> Any:
    """A stack of three trees."""
    return optree.tree_map(lambda a: torch.stack([a, 2 * a, -a]), tree)


def sines(tree: Any) -> Tensor:
    return torch.stack([x.sin().sum() for x in optree.tree_leaves(tree)]).sum()


class Setting:
    """A network of stages on this rank's shards and rows, and the plain one on all of them."""

    def __init__(self, mesh: Any, strategy: sf.Placement, options: dict[str, Any]) -> None:
        self.mesh, self.n, self.rank = mesh, mesh.size(), mesh.get_rank()
        self.plain = squares(3, D)
        self.flat = sf.shard(self.plain, mesh, strategy)
        self.direction = [{"w": normal(D, D, seed=30 + i), "b": normal(D, seed=40 + i)} for i in range(3)]
        self.piece = sf.shard(self.direction, mesh, strategy)
        self.rows = normal(self.n, ROWS, D, seed=50)
        self.x = self.rows[self.rank]
        self.stage = sf.stage(layer, **options)

    def net(self, ps: Any, x: Tensor) -> Tensor:
        for p in sf.layers(ps):
            x = self.stage(p, x)
        return x

    def loss(self, ps: Any) -> Tensor:
        return self.net(ps, self.x).square().sum()

    def total(self, ps: Any) -> Tensor:
        return sf.psum(self.loss(ps), self.mesh.mesh_dim_names)

    def mapped(self, f: Callable[[Any], Any]) -> Any:
        return sf.shard_map(f, mesh=self.mesh, in_specs=..., out_specs=...)(self.flat)

    def out(self, ps: Any) -> Tensor:
        return self.net(ps, self.x)

    def plain_net(self, ps: Any, x: Tensor) -> Tensor:
        for p in ps:
            x = layer(p, x)
        return x

    def joint(self, ps: Any) -> Tensor:
        """The sum of all ranks' losses."""
        return self.plain_net(ps, self.rows).square().sum()

    def outs(self, ps: Any) -> Tensor:
        """All ranks' outputs, of which this one's is `[self.rank]`."""
        return self.plain_net(ps, self.rows)

    def leaves(self) -> Any:
        return variables(self.flat)

    def tree(self, tensors: Any) -> Any:
        return optree.tree_unflatten(optree.tree_structure(self.flat), list(tensors))

    def tangent(self) -> Any:
        """A direction: this rank's part, and the whole."""
        return self.piece, self.direction


def whole(tree: Any) -> Any:
    return sf.unshard(tree)


# --- each gives pairs of what shards gave and what whole parameters give ---


def func_grad(s: Setting) -> Any:
    yield whole(grad(s.loss)(s.flat)), grad(s.joint)(s.plain)


def grad_of_parameters_and_input(s: Setting) -> Any:
    g, gx = grad(lambda ps, x: s.net(ps, x).square().sum(), argnums=(0, 1))(s.flat, s.x)
    yield whole(g), grad(s.joint)(s.plain)
    yield gx, grad(lambda x: s.plain_net(s.plain, x).square().sum())(s.x)


def shardfn_grad(s: Setting) -> Any:
    yield whole(sf.grad(s.loss)(s.flat)), grad(s.joint)(s.plain)


def shardfn_grad_in_a_transform(s: Setting) -> Any:
    """With a derivative outside that does not touch it."""
    found = []

    def outside(k: Tensor) -> Tensor:
        found.append(optree.tree_map(torch.detach, sf.grad(s.loss)(s.flat)))
        return k**2

    yield grad(outside)(torch.ones(()).double()), torch.tensor(2.0).double()
    yield whole(found[0]), grad(s.joint)(s.plain)


def func_vjp(s: Setting) -> Any:
    y, pull = vjp(s.out, s.flat)
    yield y, s.outs(s.plain)[s.rank]
    yield whole(pull(y.cos())[0]), vjp(s.outs, s.plain)[1](s.outs(s.plain).cos())[0]


def vjp_called_twice(s: Setting) -> Any:
    pull, plain_pull = vjp(s.out, s.flat)[1], vjp(s.outs, s.plain)[1]
    cs = [normal(s.n, ROWS, D, seed=k) for k in (70, 71)]
    for c in (*cs, cs[0]):
        yield whole(pull(c[s.rank])[0]), plain_pull(c)[0]


def autograd(s: Setting) -> Any:
    leaves = s.leaves()
    gs = torch.autograd.grad(s.loss(leaves), optree.tree_leaves(leaves))
    yield whole(s.tree(gs)), grad(s.joint)(s.plain)


def backward_twice(s: Setting) -> Any:
    leaves = s.leaves()
    loss = s.loss(leaves)
    loss.backward(retain_graph=True)
    loss.backward()
    yield whole(optree.tree_map(lambda x: x.grad / 2, leaves)), grad(s.joint)(s.plain)


def func_jvp(s: Setting) -> Any:
    mine, everything = s.tangent()
    y, t = jvp(s.out, (s.flat,), (mine,))
    want = jvp(s.outs, (s.plain,), (everything,))
    yield (y, t), (want[0][s.rank], want[1][s.rank])


def hvp_forward_over_reverse(s: Setting) -> Any:
    mine, everything = s.tangent()
    for take in (grad, sf.grad):
        g, h = jvp(take(s.loss), (s.flat,), (mine,))
        yield (whole(g), whole(h)), jvp(grad(s.joint), (s.plain,), (everything,))


def hvp_reverse_over_forward(s: Setting) -> Any:
    mine, everything = s.tangent()
    h = grad(lambda p: jvp(s.loss, (p,), (mine,))[1])(s.flat)
    yield whole(h), grad(lambda p: jvp(s.joint, (p,), (everything,))[1])(s.plain)


def hvp_reverse_over_reverse(s: Setting) -> Any:
    want = grad(lambda p: sines(grad(s.joint)(p)))(s.plain)
    yield whole(grad(lambda p: sines(grad(s.loss)(p)))(s.flat)), want
    yield whole(sf.grad(lambda p: sines(sf.grad(s.loss)(p)))(s.flat)), want


def third_derivative(s: Setting) -> Any:
    got = grad(lambda p: sines(grad(lambda q: sines(grad(s.loss)(q)))(p)))(s.flat)
    yield whole(got), grad(lambda p: sines(grad(lambda q: sines(grad(s.joint)(q)))(p)))(s.plain)


def double_backward(s: Setting) -> Any:
    leaves = s.leaves()
    ts = optree.tree_leaves(leaves)
    first = torch.autograd.grad(s.loss(leaves), ts, create_graph=True)
    second = torch.autograd.grad(sines(list(first)), ts, create_graph=True)
    third = torch.autograd.grad(sines(list(second)), ts)

    def twice(p: Any) -> Any:
        return grad(lambda q: sines(grad(s.joint)(q)))(p)

    yield whole(s.tree([g.detach() for g in first])), grad(s.joint)(s.plain)
    yield whole(s.tree([g.detach() for g in second])), twice(s.plain)
    yield whole(s.tree(third)), grad(lambda p: sines(twice(p)))(s.plain)


def gradient_penalty(s: Setting) -> Any:
    """A loss of a derivative with respect to the input, as plain code writes it."""

    def penalized(net: Any, ps: Any, x: Tensor) -> Tensor:
        gx = grad(lambda x: net(ps, x).square().sum())(x)
        return gx.square().sum() + net(ps, x).sum()

    got = grad(lambda ps: penalized(s.net, ps, s.x))(s.flat)
    also = sf.grad(lambda ps: penalized(s.net, ps, s.x))(s.flat)
    want = grad(lambda ps: penalized(s.plain_net, ps, s.rows))(s.plain)
    yield whole(got), want
    yield whole(also), want


def func_vmap(s: Setting) -> Any:
    yield vmap(s.net, in_dims=(None, 0))(s.flat, s.x), s.outs(s.plain)[s.rank]
    yield vmap(s.net, in_dims=(None, 1), out_dims=1)(s.flat, s.x.T), s.outs(s.plain)[s.rank].T


def per_sample_gradients(s: Setting) -> Any:
    def of(net: Any) -> Any:
        return lambda ps, x: net(ps, x).square().sum()

    want = vmap(grad(of(s.plain_net)), in_dims=(None, 1))(s.plain, s.rows)
    for take in (grad, sf.grad):
        got = vmap(take(of(s.net)), in_dims=(None, 0))(s.flat, s.x)
        yield vmap(whole)(got), want


def ensemble(s: Setting) -> Any:
    yield vmap(s.net, in_dims=(0, None))(scaled(s.flat), s.x), vmap(s.outs)(scaled(s.plain))[:, s.rank]


def ensemble_gradients(s: Setting) -> Any:
    yield vmap(whole)(vmap(grad(s.loss))(scaled(s.flat))), vmap(grad(s.joint))(scaled(s.plain))


def grad_through_an_ensemble(s: Setting) -> Any:
    got = grad(lambda p: vmap(s.loss)(scaled(p)).square().sum())(s.flat)

    def joint(p: Any) -> Tensor:
        each = vmap(lambda q: s.outs(q).square().sum((1, 2)))(scaled(p))
        return each.square().sum()

    yield whole(got), grad(joint)(s.plain)


def func_jacrev(s: Setting) -> Any:
    """Row i is the derivative of the sum of every rank's output i."""
    got = jacrev(s.out)(s.flat)
    yield vmap(vmap(whole))(got), jacrev(lambda p: s.outs(p).sum(0))(s.plain)


def shardfn_jacfwd(s: Setting) -> Any:
    """torch's own pushes a basis on each rank at once, which is refused."""
    yield whole(s.mapped(sf.jacfwd(s.total))), jacfwd(s.joint)(s.plain)


def shardfn_hessian(s: Setting) -> Any:
    yield whole(s.mapped(sf.hessian(s.total))), hessian(s.joint)(s.plain)


def gauss_newton(s: Setting) -> Any:
    mine, everything = s.tangent()
    _, jv = jvp(s.out, (s.flat,), (mine,))
    (got,) = vjp(s.out, s.flat)[1](jv)
    want = vjp(s.outs, s.plain)[1](jvp(s.outs, (s.plain,), (everything,))[1])[0]
    yield whole(got), want


def jvp_of_a_vjp_function(s: Setting) -> Any:
    c, t = normal(s.n, ROWS, D, seed=70), normal(s.n, ROWS, D, seed=71)
    pull, plain_pull = vjp(s.out, s.flat)[1], vjp(s.outs, s.plain)[1]
    got = jvp(lambda c: pull(c)[0], (c[s.rank],), (t[s.rank],))
    yield tuple(map(whole, got)), (plain_pull(c)[0], plain_pull(t)[0])


def jvp_through_a_vjp(s: Setting) -> Any:
    mine, everything = s.tangent()
    c, t = normal(s.n, ROWS, D, seed=70), normal(s.n, ROWS, D, seed=71)
    got = jvp(lambda p, c: vjp(s.out, p)[1](c)[0], (s.flat, c[s.rank]), (mine, t[s.rank]))
    yield tuple(map(whole, got)), jvp(lambda p, c: vjp(s.outs, p)[1](c)[0], (s.plain, c), (everything, t))


def batched_cotangents(s: Setting) -> Any:
    leaves = s.leaves()
    cs = normal(4, s.n, ROWS, D, seed=70)
    gs = torch.autograd.grad(s.out(leaves), optree.tree_leaves(leaves), cs[:, s.rank], is_grads_batched=True)
    yield vmap(whole)(s.tree(gs)), vmap(lambda c: vjp(s.outs, s.plain)[1](c)[0])(cs)


def vmap_of_a_vjp_function(s: Setting) -> Any:
    cs = normal(4, s.n, ROWS, D, seed=70)
    got = vmap(vjp(s.out, s.flat)[1])(cs[:, s.rank])[0]
    yield vmap(whole)(got), vmap(lambda c: vjp(s.outs, s.plain)[1](c)[0])(cs)


def grad_through_an_update(s: Setting) -> Any:
    """Meta-learning: the derivative of the loss after a step, with respect to what the step began from."""

    def after(loss: Any, p: Any) -> Tensor:
        return loss(optree.tree_map(lambda a, g: a - 0.1 * g, p, grad(loss)(p)))

    want = grad(lambda p: after(s.joint, p))(s.plain)
    yield whole(grad(lambda p: after(s.loss, p))(s.flat)), want
    leaves = s.leaves()
    ts = optree.tree_leaves(leaves)
    gs = torch.autograd.grad(s.loss(leaves), ts, create_graph=True)
    after_step = s.loss(s.tree([a - 0.1 * g for a, g in zip(ts, gs, strict=True)]))
    yield whole(s.tree(torch.autograd.grad(after_step, ts))), want


Case = Callable[[Setting], Any]
FIRST = [
    func_grad,
    grad_of_parameters_and_input,
    shardfn_grad,
    shardfn_grad_in_a_transform,
    func_vjp,
    vjp_called_twice,
    autograd,
    backward_twice,
]
REVERSE = [
    hvp_reverse_over_reverse,
    third_derivative,
    double_backward,
    gradient_penalty,
    func_vmap,
    per_sample_gradients,
    ensemble,
    ensemble_gradients,
    grad_through_an_ensemble,
    func_jacrev,
    batched_cotangents,
    vmap_of_a_vjp_function,
    grad_through_an_update,
]
FORWARD = [
    func_jvp,
    hvp_forward_over_reverse,
    hvp_reverse_over_forward,
    shardfn_jacfwd,
    shardfn_hessian,
    gauss_newton,
    jvp_of_a_vjp_function,
    jvp_through_a_vjp,
]

FULL = (("shard",), ())
HYBRID = (("shard",), ("replica",))
BOTH = (("replica", "shard"), ())


def compared(case: Case, sizes: dict[str, int], axes: Any, every: Any) -> Any:
    mesh = sf.make_mesh(**sizes, device="cpu")
    found = {}
    for options in every:
        s = Setting(mesh, sf.Placement(*axes), options)
        whole(sf.grad(s.loss)(s.flat))  # ranks compare what they run, the first time
        with sf.collectives.ledger() as log:
            pairs = list(case(s))
        differences, scales = [], []
        for got, want in pairs:
            (a, one), (b, other) = optree.tree_flatten(got), optree.tree_flatten(want)
            assert one == other, (one, other)
            assert [x.shape for x in a] == [y.shape for y in b]
            differences += [(x - y).abs().max().item() for x, y in zip(a, b, strict=True)]
            scales += [y.abs().max().item() for y in b]
        in_place = [record for record in log.select(scheduled=False) if record.stage]
        found[str(options)] = (worst(differences), max(scales), log.count(scheduled=True), len(in_place))
    return found


def check(world: World, case: Case, sizes: dict[str, int], axes: Any, every: Any = tuple(OPTIONS)) -> None:
    for found in world.run(compared, case, sizes, axes, every):
        for difference, scale, scheduled, in_place in found.values():
            assert difference < 1e-12 * max(1.0, scale), found
            assert scale > 1e-3, "zero would pass this"
            assert scheduled + in_place > 0


@pytest.mark.parametrize("case", FIRST + REVERSE + FORWARD, ids=lambda case: case.__name__)
@pytest.mark.parametrize("world", [(2, "processes")], indirect=True, ids=["2"])
def test_a_transform(world: World, case: Case) -> None:
    check(world, case, {"shard": 2}, FULL)


@pytest.mark.parametrize("case", FIRST + REVERSE + FORWARD, ids=lambda case: case.__name__)
@pytest.mark.parametrize("axes", [HYBRID, BOTH], ids=["hybrid", "full"])
@pytest.mark.parametrize("world", [(4, "processes")], indirect=True, ids=["4"])
def test_a_transform_over_two_axes(world: World, case: Case, axes: Any) -> None:
    check(world, case, {"replica": 2, "shard": 2}, axes, OPTIONS[: 2 if axes == HYBRID else 1])


@pytest.mark.parametrize("case", FIRST + REVERSE, ids=lambda case: case.__name__)
@pytest.mark.parametrize("world", [(4, "threads")], indirect=True, ids=["4-threads"])
def test_a_transform_on_threads(world: World, case: Case) -> None:
    check(world, case, {"shard": 4}, FULL)


# --- code that torch traces into a graph ---


def lined(f: Any) -> Any:
    return lambda x: linearize(f, x)[1](x)


def remade(f: Any) -> Any:
    """A graph made at another point, and after it other stages have run."""
    return lambda x: make_fx(f)(x + 1)(x)


def replicas_agree(s: Setting, x: Tensor) -> Tensor:
    """A value that ranks compare while it is traced."""
    sf.shards.assert_replicated({"sum": sf.psum(x, s.mesh.mesh_dim_names)}, s.mesh)
    return s.net(s.flat, x.sin() * s.net(s.flat, torch.ones_like(x)))


def in_a_graph(transform: Any, check: bool) -> Any:
    """Pairs of what a traced function of stages gives in a mapped one, and of what the plain one gives."""
    s = Setting(sf.make_mesh(shard=2, device="cpu"), sf.full_shard("shard"), {})

    def total(x: Tensor) -> Tensor:
        return sf.psum(replicas_agree(s, x).square().sum(), "shard")

    def plain(x: Tensor) -> Tensor:
        return s.plain_net(s.plain, x.sin() * s.plain_net(s.plain, torch.ones_like(x))).square().sum()

    mapped = sf.shard_map(transform(total), mesh=s.mesh, in_specs=P("shard"), out_specs=P(), check=check)
    want = plain(s.rows) if transform is remade else jvp(plain, (s.rows,), (s.rows,))[1]
    return mapped(s.x), want


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("transform", [lined, remade])
@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("world", [(2, "processes")], indirect=True, ids=["2"])
def test_a_graph_of_stages(world: World, transform: Any, check: bool) -> None:
    for found, want in world.run(in_a_graph, transform, check):
        torch.testing.assert_close(found, want)
