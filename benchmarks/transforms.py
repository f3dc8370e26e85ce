"""Tries which torch.func transforms work with respect to sharded parameters, in shardfn and its peers.

    OMP_NUM_THREADS=1 python -m benchmarks.transforms

Two gloo processes train a small network in float64; each rank has half of the rows. Each system has a loss function of
a tree of parameters. The transform is applied to that function, with respect to the parameters, and its result is
compared with that of one process with all rows. `jacfwd` is taken along one direction of the parameters. "Functional
collectives" are the differentiable ones of torch.distributed, on parameters sharded by hand. The modules of DDP, FSDP1
and FSDP2 are called with `torch.func.functional_call`; FSDP's modules raise before an ordinary forward and backward, so
these come first.

"right" means equal to the one process up to rounding. All other results except "error" are returned silently.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

import shardfn as sf
from benchmarks.report import Goal, parser, publish
from shardfn.testing import World, WorldError, WorldTimeout

RANKS, WIDTH, ROWS = 2, 6, 4  # rows per rank
ROUNDING = 1e-12
Tree = Any


@dataclass(frozen=True)
class System:
    """The parameters of the network, and its loss as a function of them and of rows `x, y [n, WIDTH]`.

    Attributes:
        params: a tree.
        loss: `(params, x, y) -> ()`, the mean over this rank's rows, or over all rows.
        spread: converts whole parameters to a tree like `params`.
        whole: converts such a tree back to a vector of whole parameters.
        trained: the gradient from an ordinary backward pass.
        share: the factor from the sum of all ranks' losses to the mean over all rows.
        jacfwd: the function for forward Jacobians: torch's, unless the system has its own.
    """

    params: Tree
    loss: Callable[..., Tensor]
    spread: Callable[[Tree], Tree]
    whole: Callable[[Tree], Tensor]
    trained: Callable[[Tensor, Tensor], Tree]
    jacfwd: Callable[..., Any] = jacfwd
    share: float = 1 / RANKS


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def tree_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def direction() -> dict[str, Tensor]:
    seeded = torch.Generator().manual_seed(1)
    return {name: torch.randn(p.shape, generator=seeded).double() for name, p in network().named_parameters()}


def rows() -> tuple[Tensor, Tensor]:
    """The rows of all ranks, `[RANKS, ROWS, WIDTH]`."""
    x, y = torch.randn(2, RANKS, ROWS, WIDTH, generator=torch.Generator().manual_seed(2)).double()
    return x, y


def flat(tree: Tree) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in tree_leaves(tree)])


def mean_error(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


# --- the systems ---


def one_process() -> System:
    net = network()

    def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
        return mean_error(functional_call(net, params, x), y)

    return System(tree_of(net), loss, lambda tree: tree, flat, lambda x, y: grad(loss)(tree_of(net), x, y))


def with_shardfn() -> System:
    mesh = sf.make_mesh(data=RANKS, device="cpu")

    @sf.stage
    def layer(p: Tree, x: Tensor) -> Tensor:
        return x @ p["weight"].T + p["bias"]

    def local(params: Tree, x: Tensor, y: Tensor) -> Tensor:
        return sf.pmean(mean_error(layer(params["2"], torch.tanh(layer(params["0"], x))), y), "data")

    loss = sf.shard_map(local, mesh=mesh, in_specs=..., out_specs=...)

    def spread(tree: Tree) -> Tree:
        by_layer = {n: {name: tree[f"{n}.{name}"] for name in ("weight", "bias")} for n in "02"}
        return sf.shard(by_layer, mesh, sf.full_shard("data"))

    def whole(tree: Tree) -> Tensor:
        return flat([sf.unshard(tree)[n][name] for n in "02" for name in ("weight", "bias")])

    params = spread(tree_of(network()))

    def trained(x: Tensor, y: Tensor) -> Tree:
        leaves = tree_map(lambda p: p.detach().requires_grad_(), params)
        loss(leaves, x, y).backward()
        return tree_map(lambda p: p.grad, leaves)

    return System(params, loss, spread, whole, trained, sf.jacfwd)


def with_collectives() -> System:
    """Each parameter is sharded along its first dimension, and gathered by a differentiable functional collective."""
    net, rank = network(), dist.get_rank()
    group = sf.make_mesh(data=RANKS, device="cpu").get_group()

    def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
        gathered = tree_map(lambda p: funcol.all_gather_tensor_autograd(p, 0, group), params)
        return mean_error(functional_call(net, gathered, x), y)

    def spread(tree: Tree) -> Tree:
        return tree_map(lambda p: p.chunk(RANKS)[rank].clone(), tree)

    def whole(tree: Tree) -> Tensor:
        return flat(tree_map(lambda p: funcol.all_gather_tensor(p.contiguous(), 0, group), tree))

    params = spread(tree_of(net))

    def trained(x: Tensor, y: Tensor) -> Tree:
        leaves = tree_map(lambda p: p.detach().requires_grad_(), params)
        (loss(leaves, x, y) / RANKS).backward()
        return tree_map(lambda p: p.grad, leaves)

    return System(params, lambda *args: loss(*args) / RANKS, spread, whole, trained, share=1)


def with_module(module: nn.Module, spread: Callable[[Tree], Tree], whole: Callable[[Tree], Tensor]) -> System:
    """The gradient is that of the module's hooks: the mean over ranks of each rank's gradient."""

    def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
        return mean_error(functional_call(module, params, x), y)

    def trained(x: Tensor, y: Tensor) -> Tree:
        module.zero_grad()
        mean_error(module(x), y).backward()
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}

    if not isinstance(module, DistributedDataParallel):  # FSDP initializes itself in the first pass
        trained(*(value[0] for value in rows()))
        module.zero_grad()
    return System({name: p.detach() for name, p in module.named_parameters()}, loss, spread, whole, trained)


def with_ddp() -> System:
    def spread(tree: Tree) -> Tree:
        return {f"module.{name}": p for name, p in tree.items()}

    return with_module(DistributedDataParallel(network()), spread, flat)


def with_fsdp1() -> System:
    """The parameters are this rank's part of one flat vector; some of them are empty."""
    module = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=True)
    names = [name for name, _ in module.named_parameters()]
    group = sf.make_mesh(data=RANKS, device="cpu").get_group()

    def spread(tree: Tree) -> Tree:
        mine = flat(tree).chunk(RANKS)[dist.get_rank()]
        sizes = [p.numel() for p in module.parameters()]
        return dict(zip(names, mine.split(sizes), strict=True))

    def whole(tree: Tree) -> Tensor:
        return funcol.all_gather_tensor(flat(tree), 0, group)

    return with_module(module, spread, whole)


def with_fsdp2() -> System:
    mesh = sf.make_mesh(data=RANKS, device="cpu")
    net = network()
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=mesh)

    cut = {name: p.placements for name, p in net.named_parameters() if isinstance(p, DTensor)}

    def spread(tree: Tree) -> Tree:
        return {name: distribute_tensor(p, mesh, cut[name]) for name, p in tree.items()}

    def whole(tree: Tree) -> Tensor:
        return flat(tree_map(lambda p: p.full_tensor() if isinstance(p, DTensor) else p, tree))

    return with_module(net, spread, whole)


SYSTEMS: dict[str, Callable[[], System]] = {
    "functional collectives": with_collectives,
    "DDP": with_ddp,
    "FSDP1": with_fsdp1,
    "FSDP2": with_fsdp2,
    "shardfn": with_shardfn,
}


# --- the transforms: functions of a system, rows [r, ROWS, WIDTH] and a direction, which return a vector ---


def _loss(s: System, x: Tensor, y: Tensor) -> Callable[[Tree], Tensor]:
    return lambda params: s.loss(params, x.flatten(0, 1), y.flatten(0, 1))


def _moved(s: System, v: Tree, t: Tensor) -> Tree:
    """The parameters plus `t` times `v`."""
    return tree_map(lambda p, d: p + t * d, s.params, v)


def _product(a: Tree, b: Tree) -> Tensor:
    """The inner product over this rank's elements."""
    each = [(p * q).sum() for p, q in zip(tree_leaves(a), tree_leaves(b), strict=True)]
    return torch.stack([one.to_local() if isinstance(one, DTensor) else one for one in each]).sum()


def _vmap_of_grad(s: System, x: Tensor, y: Tensor, v: Tree) -> Tensor:
    """The i-th gradient is of the mean over the i-th rows of all ranks."""
    each = vmap(lambda x, y: grad(s.loss)(s.params, x, y), in_dims=1)(x, y)
    return torch.cat([s.whole(tree_map(lambda g, i=i: g[i], each)) for i in range(ROWS)])


TRANSFORMS: dict[str, Callable[..., Tensor]] = {
    "loss.backward()": lambda s, x, y, v: s.whole(s.trained(x.flatten(0, 1), y.flatten(0, 1))),
    "grad": lambda s, x, y, v: s.whole(grad(_loss(s, x, y))(s.params)),
    "vjp": lambda s, x, y, v: s.whole(vjp(_loss(s, x, y), s.params)[1](torch.ones(()).double())[0]),
    "jacrev": lambda s, x, y, v: s.whole(jacrev(_loss(s, x, y))(s.params)),
    "jvp": lambda s, x, y, v: jvp(_loss(s, x, y), (s.params,), (v,))[1],
    "jvp in inputs": lambda s, x, y, v: jvp(
        lambda x: s.loss(s.params, x.flatten(0, 1), y.flatten(0, 1)), (x,), (torch.ones_like(x),)
    )[1],
    "jacfwd": lambda s, x, y, v: s.whole(s.jacfwd(_loss(s, x, y))(s.params)),
    "jacfwd of jacrev along a direction": lambda s, x, y, v: s.whole(
        jacfwd(lambda t: jacrev(_loss(s, x, y))(_moved(s, v, t)))(torch.zeros(()).double())
    ),
    "vmap over parameters": lambda s, x, y, v: vmap(_loss(s, x, y))(
        tree_map(lambda p, d: torch.stack((p, p + d)), s.params, v)
    ),
    "jvp of grad": lambda s, x, y, v: s.whole(jvp(grad(_loss(s, x, y)), (s.params,), (v,))[1]),
    "grad of grad": lambda s, x, y, v: s.whole(grad(lambda p: _product(grad(_loss(s, x, y))(p), v))(s.params)),
    "vmap of grad": _vmap_of_grad,
}


# --- one try ---


def tried(system: str, transform: str) -> str:
    """The verdict on this rank's result."""
    warnings.simplefilter("ignore")
    run, (x, y), v, rank = TRANSFORMS[transform], rows(), direction(), dist.get_rank()
    reference = one_process()
    made = SYSTEMS[system]()
    wanted = run(reference, x, y, v)
    mine = run(reference, x[rank : rank + 1], y[rank : rank + 1], v)
    unmoved = _loss(reference, x[rank : rank + 1], y[rank : rank + 1])(reference.params)
    try:
        found = run(made, x[rank : rank + 1], y[rank : rank + 1], made.spread(v)).detach()
        if transform == "jvp in inputs":  # each rank has the mean over its own rows
            dist.all_reduce(found)
            found *= made.share
    except Exception as error:
        return f"error: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return _verdict(found, wanted, mine, unmoved)


def _verdict(found: Tensor, wanted: Tensor, mine: Tensor, unmoved: Tensor) -> str:
    def is_(other: Tensor) -> bool:
        return found.shape == other.shape and bool((found - other).norm() <= ROUNDING * other.norm())

    if is_(wanted):
        return "right"
    if not found.any():
        return "all zeros"
    if is_(mine):
        return "this rank's rows only"
    if is_(unmoved.expand_as(wanted)):
        return "its own weights instead"
    return "another value"


def outcome(world: World, system: str, transform: str) -> str:
    """The verdict on all ranks' results together."""
    try:
        found = world.run(tried, system, transform)
    except (WorldError, WorldTimeout) as error:
        return f"error: {type(error).__name__}"
    return next((one for one in found if one != "right"), "right")


def main() -> None:
    options = parser("Every torch.func transform of sharded parameters, in shardfn and its peers, on 2 ranks.")
    options.add_argument("--errors", action="store_true", help="also print each error's message")
    args = options.parse_args()
    found: dict[tuple[str, str], str] = {}
    for system in SYSTEMS:
        with World(RANKS) as world:
            for transform in TRANSFORMS:
                found[transform, system] = outcome(world, system, transform)
    table = [
        {"transform": transform} | {system: found[transform, system].split(":")[0] for system in SYSTEMS}
        for transform in TRANSFORMS
    ]
    wrong = sum(found[transform, "shardfn"] != "right" for transform in TRANSFORMS)
    trained = sum(found["loss.backward()", system] != "right" for system in SYSTEMS)
    goals = [
        Goal("transforms that are not right in shardfn", wrong, 0),
        Goal("systems whose ordinary backward is not right", trained, 0),
    ]
    publish(f"transforms of sharded parameters, {RANKS} ranks, torch {torch.__version__}", table, goals, args.json)
    if args.errors:
        for (transform, system), said in found.items():
            if said.startswith("error"):
                print(f"{system}, {transform}: {said}")


if __name__ == "__main__":
    main()
