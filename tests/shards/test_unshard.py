"""Whole parameters where they are asked for, and as many as are asked for; nothing elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import shardfn as sf
import shardfn.optim as so
from shardfn import P
from shardfn.shards.layout import is_flat
from shardfn.testing import World
from shardfn.testing import world as shared_world
from tests.models import STRATEGIES, mesh_of, same
from tests.refusals import told
from tests.resident import Largest


def whole() -> dict[str, Any]:
    """Of several dtypes in a stage, of odd sizes, of no element and of no dimension."""
    g = torch.Generator().manual_seed(0)

    def block() -> dict[str, Any]:
        return {
            "w": torch.randn(6, 8, generator=g, dtype=torch.float64),
            "v": torch.randn(8, 6, generator=g).bfloat16(),
            "b": torch.randn(7, generator=g, dtype=torch.float64),
            "scale": torch.tensor(2.5, dtype=torch.float64),
            "none": torch.empty(0, 4),
            "ids": torch.randint(9, (5,), generator=g),
            "mask": torch.rand(3, generator=g) > 0.5,
        }

    return {"": {"norm": torch.randn(3, generator=g)}, "blocks": [block() for _ in range(2)], "head": torch.ones(5, 2)}


CUTS = sf.by_path([(r".*\.w", P("tensor", ("pipe",))), (r".*\.v", P(None, "tensor"))], strict=False)


def at_places(path: str, shape: tuple[int, ...]) -> sf.Placement:
    return (
        sf.full_shard("shard").only_on(pipe=int(path.split(".")[1]) % 2) if "blocks" in path else sf.full_shard("shard")
    )


def placements() -> dict[str, Callable[[], Any]]:
    """Ways to cut the tree on 4 ranks, by names."""

    def on(strategy: Any, specs: Any = None, **sizes: int) -> Callable[[], Any]:
        more = {} if specs is None else {"specs": specs}
        return lambda: sf.shard(whole(), mesh_of(**sizes), strategy, frozen=r".*\.b", **more)

    return {
        **{name: on(STRATEGIES[name], replica=2, shard=2) for name in ("ddp", "full_shard", "hybrid_shard", "hpz")},
        "turned axes": on(sf.full_shard(("shard", "replica")), replica=2, shard=2),
        "tensor": on(sf.full_shard("shard"), CUTS, shard=1, tensor=2, pipe=2),
        "tensor, sharded": on(sf.full_shard("shard"), sf.by_path([(r".*\.[wv]", P(None, "tensor"))], strict=False),
                              shard=2, tensor=2),
        "at places": on(at_places, shard=2, pipe=2),
    }  # fmt: skip


def nothing(tree: Any) -> Any:
    return optree.tree_map(lambda x: None, tree)


def on_some_ranks() -> tuple[list[str], dict[str, int]]:
    """What is wrong, on this rank, and how many bytes it sent to one other."""
    rank, wrong, want = dist.get_rank(), [], whole()
    sent: dict[str, int] = {}
    for name, place in placements().items():
        params = place()
        shards = [x for x in optree.tree_leaves(params, is_leaf=is_flat) if is_flat(x)]
        before = [x.values.clone() for x in shards]
        piece = max(x.values.nbytes for x in shards)
        for ranks, to in (([2], None), ([3, 1, 0], "cpu")):
            with sf.collectives.ledger() as log, Largest() as seen:
                got = sf.unshard(params, ranks=ranks, to=to)
            sent.setdefault(name, log.bytes(op="all_to_all"))
            if not same(got, want if rank in ranks else nothing(want)):
                wrong.append(f"{name}, {ranks}, {to}")
            if rank not in ranks and seen.bytes > piece:
                wrong.append(f"{name}, {ranks}: {seen.bytes} bytes for a piece of {piece}")
        if not all(map(torch.equal, before, (x.values for x in shards))):
            wrong.append(f"{name}: the shards have changed")
        if not same(sf.unshard(params, to="cpu"), want):
            wrong.append(f"{name}, to")
        for chosen in (None, [1]):
            got = sf.unshard(params, ranks=chosen, only=[r"blocks\.1\.[wvb]", "head", "norm"])
            part = nothing(want) | {"head": want["head"], "": want[""]}
            part["blocks"][1] |= {key: want["blocks"][1][key] for key in "wvb"}
            if not same(got, part if chosen is None or rank in chosen else nothing(want)):
                wrong.append(f"{name}, only, {chosen}")
    return wrong, sent


@pytest.mark.world(4)
def test_only_the_ranks_that_are_named_get_whole_parameters(world: World) -> None:
    found = world.run(on_some_ranks)
    assert [wrong for wrong, _ in found] == [[]] * 4
    total = sum(x.nbytes for x in optree.tree_leaves(whole()))
    for name in found[0][1]:
        sent = [by_name[name] for _, by_name in found]
        assert sum(sent) <= total, (name, "each element is sent once", sent)
        assert (sum(sent) == 0) is (name == "ddp"), (name, sent)


def gradients_and_states() -> list[bool]:
    """Of what is no parameter: gradients, optimizer states, trees with plain tensors and numbers."""
    mesh, rank = mesh_of(replica=2, shard=2), dist.get_rank()
    params = sf.shard(whole(), mesh, sf.strategies.zero1(("replica", "shard")), frozen=r".*\.b")
    state = so.adamw(0.1).init(params)
    tree = {"params": params, "state": state, "step": 3, "plain": torch.arange(3.0)}
    got, want = sf.unshard(tree, ranks=[3]), sf.unshard(tree)
    kept = {"step": 3, "plain": tree["plain"]}
    none = {name: optree.tree_map(lambda x: None if isinstance(x, Tensor) else x, want[name]) for name in want}
    some = sf.unshard(tree, only=r"plain|blocks\.0\.w")
    return [
        optree.tree_structure(got) == optree.tree_structure(want if rank == 3 else {**none, **kept}),
        got["plain"].equal(tree["plain"]) and got["step"] == 3 and some["step"] == 3,
        some["plain"].equal(tree["plain"]),
        some["params"]["head"] is None and some["state"]["mean"]["blocks"][0]["w"].eq(0).all().item(),
        rank != 3 or same(got["params"], whole()),
    ]


@pytest.mark.world(4)
def test_states_and_plain_tensors_are_left_as_they_are(world: World) -> None:
    assert all(map(all, world.run(gradients_and_states)))


class Live(TorchDispatchMode):
    """The most bytes on the CPU, of what ops newly make, that there are at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.known = 0, dict[StorageWeakRef, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {StorageWeakRef(x.untyped_storage()) for x in optree.tree_leaves((args, kwargs)) if is_cpu(x)}
        for x in filter(is_cpu, optree.tree_leaves(out)):
            storage = x.untyped_storage()
            if (ref := StorageWeakRef(storage)) not in before:
                self.known[ref] = storage.nbytes()
        self.known = {ref: n for ref, n in self.known.items() if not ref.expired()}
        self.most = max(self.most, sum(self.known.values()))
        return out


def is_cpu(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "cpu"


def most_while_moving() -> list[tuple[int, int]]:
    """The device to which stages are moved is one without memory: what stays is on the one that they come from."""
    tree = {"blocks": [{"w": torch.ones(64, 64), "b": torch.ones(64)} for _ in range(8)]}
    params, found = sf.shard(tree, mesh_of(shard=2), sf.full_shard("shard")), []
    for ranks in (None, [0], [0, 1]):
        with Live() as seen:
            whole = sf.unshard(params, ranks=ranks, to="meta")
        assert all(x.is_meta for x in optree.tree_leaves(whole))
        found.append((seen.most, 2 * params["blocks"][0].values.nbytes))
    return found


@pytest.mark.world(2)
def test_one_stage_is_moved_before_the_next_is_gathered(world: World) -> None:
    for rank, found in enumerate(world.run(most_while_moving)):
        for (most, stage), holds in zip(found, (True, rank == 0, True), strict=True):
            assert most <= (2.1 if holds else 0.6) * stage, (rank, holds)


def only_what_is_chosen_is_gathered() -> tuple[list[str], list[int]]:
    params = sf.shard(whole(), mesh_of(shard=2), sf.full_shard("shard"))
    with sf.collectives.ledger() as seen:
        sf.unshard(params, only="head")
    with sf.collectives.ledger() as sent:
        sf.unshard(params, ranks=[1], only=r"blocks\.1\.w")
    return [one.op for one in seen.records if one.bytes > 16], [one.bytes for one in sent.records]


@pytest.mark.world(2)
def test_what_is_not_chosen_is_not_gathered(world: World) -> None:
    for ops, sent in world.run(only_what_is_chosen_is_gathered):
        assert ops == ["all_gather"]
        assert sum(sent) <= 6 * 8 * 8


def one_parameter_has_a_gradient() -> float:
    params = sf.shard({"a": {"w": torch.ones(3, 4).double(), "b": torch.ones(4).double()}, "c": torch.ones(2).double()},
                      mesh_of(shard=2), sf.full_shard("shard"))  # fmt: skip

    def loss(ps: Any) -> Tensor:
        return (sf.unshard(ps, only=r"a\.w", to="cpu")["a"]["w"] ** 2).sum()

    grads = sf.unshard(torch.func.grad(loss)(params))
    assert same(grads, {"a": {"w": torch.full((3, 4), 2.0).double(), "b": torch.zeros(4).double()},
                        "c": torch.zeros(2).double()})  # fmt: skip
    return 0.0


@pytest.mark.world(2)
def test_one_parameter_alone_is_differentiable(world: World) -> None:
    world.run(one_parameter_has_a_gradient)


def refusals() -> dict[str, tuple[str, str]]:
    """What was said, and what must be in it."""
    mesh, rank = mesh_of(shard=2), dist.get_rank()
    params = sf.shard({"a": torch.ones(4), "b": torch.ones(2)}, mesh, sf.full_shard("shard"))
    everything: Any = functools.partial(sf.unshard, params)

    def to_rank_0(ps: Any) -> Any:
        return sf.unshard(ps, ranks=[0])["a"]

    def backward() -> Any:
        return to_rank_0(optree.tree_map(lambda x: x.clone().requires_grad_(), params))

    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "not in the mesh": (
            lambda: everything(ranks=[2]),
            "ValueError: unshard: ranks=[2], but rank 2 is not in the mesh (shard=2), whose ranks are 0, 1",
        ),
        "twice": (
            lambda: everything(ranks=[0, 0]),
            "ValueError: unshard: ranks must name at least one rank and each once, or be None for all, got [0, 0]",
        ),
        "none": (lambda: everything(ranks=[]), "ValueError: unshard: ranks must name at least one rank"),
        "a number": (
            lambda: everything(ranks=0),
            "TypeError: unshard: ranks must be a list of global ranks, such as [0], or None for all, got 0",
        ),
        "a name": (lambda: everything(ranks="0"), "TypeError: unshard: ranks must be a list of global ranks"),
        "a bool": (lambda: everything(ranks=[True]), "TypeError: unshard: ranks must be a list of global ranks"),
        "wrong on one": (lambda: everything(ranks=[0] if rank else [5]), "ValueError: unshard: "),
        "differ": (
            lambda: everything(ranks=[rank]),
            "ValueError: unshard: ranks= and only= differ between ranks: rank 0 has ranks=(0,)",
        ),
        "some name none": (
            lambda: everything(ranks=[0], only="a" if rank else "b"),
            "ValueError: unshard: ranks= and only= differ between ranks: rank 0 has only=['b']",
        ),
        "nothing matches": (
            lambda: everything(only=r"head\..*"),
            "ValueError: unshard: only: nothing matches 'head\\\\..*'; the parameters are a, b",
        ),
        "not a pattern": (lambda: everything(only="("), "ValueError: only: '(' is not a regular expression"),
        "no device": (
            lambda: everything(to="nowhere"),
            "ValueError: unshard: to='nowhere' is not a device of this process",
        ),
        "a dtype": (
            lambda: everything(to=torch.float64),
            "ValueError: unshard: to=torch.float64 is not a device of this process",
        ),
        "not here": (
            lambda: everything(to="xpu", ranks=[0]),
            "ValueError: unshard: to='xpu' is not a device of this process",
        ),
        "not on one": (lambda: everything(to="cpu" if rank else "xpu"), "ValueError: unshard: "),
        "raised on one": (lambda: everything(only=lambda path, shape: 1 / rank > 0), "Error: "),
        "grad": (
            lambda: torch.func.grad(lambda ps: (to_rank_0(ps), torch.ones(()))[1])(params),
            "NotImplementedError: unshard: with ranks=[0] it has no derivative and no batches, and stage 'a' carries "
            "a gradient: leave ranks out",
        ),
        "vmap": (
            lambda: torch.vmap(to_rank_0)(optree.tree_map(lambda x: torch.stack([x, x]), params)),
            "stage 'a' carries a batch",
        ),
        "jvp": (lambda: torch.func.jvp(to_rank_0, (params,), (params,)), "stage 'a' carries a tangent"),
        "value_and_grad": (
            lambda: sf.value_and_grad(lambda ps: (to_rank_0(ps), torch.ones(()))[1])(params),
            "stage 'a' carries a gradient",
        ),
        "backward": (backward, "stage 'a' carries a gradient"),
    }
    said = {name: (told(call), text) for name, (call, text) in calls.items()}
    with torch.no_grad():
        backward()
    assert (to_rank_0(params) is None) is (rank != 0)
    return said


@pytest.mark.world(2)
def test_what_cannot_be_gathered_is_refused_on_every_rank(world: World) -> None:
    for said in world.run(refusals):
        for name, (words, text) in said.items():
            assert text in words, (name, words)


def test_one_process_is_all_ranks() -> None:
    def body() -> None:
        params = sf.shard(whole(), sf.make_mesh(shard=1, device="cpu"), sf.full_shard("shard"))
        assert same(sf.unshard(params, ranks=[0], to="cpu"), whole())
        assert sf.unshard({"x": torch.ones(2)}, ranks=[0])["x"].sum() == 2
        assert sf.unshard(params, only="head")["head"].equal(whole()["head"])

    shared_world(1, "threads").run(body)
