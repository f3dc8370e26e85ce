"""The length of error messages when everything that they could quote is long: trees, names, shapes and meshes.

    python -m benchmarks.messages

Each mistake is made on two ranks, with trees of hundreds of parameters and names of 300 letters. A mistake that raises
no error is a failure. `tests/test_quoting.py` uses the same mistakes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch

import shardfn as sf
import shardfn.optim as so
from benchmarks.report import Goal, parser, publish
from shardfn import P, checkpoint, interop, lora, quant, run
from shardfn.testing import World

RANKS, LEAVES, LONG, MOST = 2, 500, 300, 2000
FEW = 60  # leaves of trees that are sharded or saved, where each leaf takes time


def name(i: int, of: str = "layer") -> str:
    return f"{of}{i}_".ljust(LONG, "x")


def tree(leaves: int = LEAVES, of: str = "layer", size: int = 2) -> dict[str, torch.Tensor]:
    return {name(i, of): torch.ones(size) for i in range(leaves)}


def mesh() -> Any:
    return sf.make_mesh(data=RANKS, device="cpu")


def mapped(f: Callable[..., Any], in_specs: Any, *args: Any, out_specs: Any = ...) -> Any:
    return sf.shard_map(f, mesh=mesh(), in_specs=in_specs, out_specs=out_specs)(*args)


def sharded(of: str = "layer", size: int = 2, leaves: int = FEW) -> Any:
    return sf.shard(tree(leaves, of, size), mesh(), sf.full_shard("data"))


def stepped(grads: Any) -> Any:
    optimizer, params = so.adamw(1e-3), sharded()
    return optimizer.step(params, grads, optimizer.init(params))


def same_tensor() -> Any:
    one = torch.ones(2)
    return sf.shard({"a": {name(i): one for i in range(LEAVES)}, "b": {name(0): one}}, mesh(), sf.full_shard("data"))


def deep(levels: int = 100) -> Any:
    """A tree with one leaf, whose path has thirty thousand letters."""
    node: Any = torch.ones(3)
    for i in reversed(range(levels)):
        node = {name(i, "level"): node}
    return node


def unlike(rank_differs: Callable[[int], Any]) -> Any:
    return rank_differs(torch.distributed.get_rank())


def saved(folder: str) -> Any:
    checkpoint.save(folder, {"params": sharded()})
    return folder


def loaded(like: Callable[[], Any], **how: Any) -> Any:
    return checkpoint.load(saved(shared_folder()), like(), **how)


def shared_folder() -> str:
    """A path in a new folder, the same on all ranks."""
    found: list[Any] = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(found, 0)
    return f"{found[0]}/one"


def model(stages: int = 40) -> Any:
    module = torch.nn.Sequential()
    for i in range(stages):
        module.add_module(name(i), torch.nn.Linear(2, 2))
    return interop.functional(module, stages=["Linear"])


def lora_of(targets: list[str]) -> Any:
    return lora.init({"a": {name(i): torch.ones(2, 2) for i in range(LEAVES)}}, targets, 2, seed=0)


def staged(wanted: str) -> Any:
    stage = sf.stage(lambda p, x: x * p[name(1, wanted)].sum())
    return mapped(stage, (..., ...), sharded(), torch.ones(2))


def top_level() -> str:
    """A checkpoint with many keys at the top level."""
    folder = shared_folder()
    checkpoint.save(folder, sharded())
    return folder


Mistake = tuple[Callable[[], Any], str]
"""A call that raises, and a part of its message."""

MISTAKES: dict[str, Mistake] = {
    "specs of another tree": (
        lambda: mapped(lambda p: p, ({n: P() for n in tree(of="other")},), tree()),
        "one for a whole subtree",
    ),
    "specs that are fewer": (lambda: mapped(lambda p: p, ({name(0): P()},), tree()), "one for a whole subtree"),
    "specs by name of none": (
        lambda: mapped(lambda p: p, {name(i): P() for i in range(LEAVES)}, tree()),
        "the parameters are p",
    ),
    "too many specs": (lambda: mapped(lambda *p: p, (P(),) * LEAVES, tree()), "give one for each"),
    "a spec of an unknown axis": (lambda: mapped(lambda p: p, (P(name(0)),), tree()), "the mesh has data=2"),
    "a spec that is too long": (lambda: mapped(lambda p: p, (P(*["data"] * 50),), tree()), "an axis shards a"),
    "a spec of too many dimensions": (lambda: mapped(lambda p: p, (P(*[None] * 5000),), tree()), "give it at most 1"),
    "what is no spec": (lambda: mapped(lambda p: p, (name(0) * 50,), tree()), "write P("),
    "a spec of a deep tree that does not divide": (
        lambda: sf.shard(deep(), mesh(), sf.full_shard("data"), specs=P("data")),
        "",
    ),
    "rules by path that leave leaves out": (
        lambda: mapped(lambda p: p, (sf.by_path([("other", P()), (name(1), P())]),), tree()),
        "pass strict=False",
    ),
    "an output that no spec fits": (
        lambda: mapped(lambda p: p, (...,), tree(), out_specs={name(1): P()}),
        "one for a whole subtree",
    ),
    "what differs between ranks": (
        lambda: sf.shards.assert_replicated({n: x + torch.distributed.get_rank() for n, x in tree().items()}, mesh()),
        "make the parameters with init_sharded",
    ),
    "trees that differ between ranks": (
        lambda: unlike(lambda rank: sf.shard(tree(of="layer" if rank else "other"), mesh(), sf.full_shard("data"))),
        "rank 1 has",
    ),
    "the same tensor twice": (same_tensor, ""),
    "leaves that are no tensors": (
        lambda: sf.shard({name(i): object() for i in range(LEAVES)}, mesh(), sf.full_shard("data")),
        "",
    ),
    "a mesh of long names": (
        lambda: sf.make_mesh(device="cpu", **{name(i): 2 for i in range(2000)}),
        "let one axis be -1",
    ),
    "a mesh of two rests": (lambda: sf.make_mesh(device="cpu", **{name(i): -1 for i in range(2000)}), "one of size -1"),
    "an unknown strategy": (lambda: sf.strategies.from_name(name(0) * 50, shard="data", replica="data"), "full_shard"),
    "gradients of another tree": (lambda: stepped(sharded("other")), "the gradients' structure"),
    "gradients of other shapes": (lambda: stepped(sharded(size=4)), "float32, 1/2 over data"),
    "no gradients": (lambda: stepped({}), "the gradients' structure"),
    "a state of another tree": (
        lambda: so.adamw(1e-3).step(sharded(), sharded(), so.adamw(1e-3).init(sharded("other"))),
        "init(params)",
    ),
    "a masked optimizer of nothing": (
        lambda: so.masked(so.adamw(1e-3), "no parameter").init(tree()),
        "there are layer0",
    ),
    "a product of two trees": (lambda: so.vdot(tree(), tree(of="other")), "the trees differ"),
    "a parameter that is not there": (lambda: staged("other"), ""),
    "a partition into nothing": (
        lambda: sf.shards.partition(tree(), [name(i, "other") for i in range(LEAVES)]),
        "there are layer0",
    ),
    "parts of two trees": (lambda: sf.shards.combine(tree(), tree(of="other")), "both trees that partition returns"),
    "parameters that are not there, whole": (
        lambda: sf.unshard(sharded(), only=[name(i, "other") for i in range(LEAVES)]),
        "the parameters are layer0",
    ),
    "ranks that are not there": (
        lambda: sf.unshard(sharded(), ranks=list(range(9, 9 + LEAVES))),
        "whose ranks are 0, 1",
    ),
    "what no rule for bits matches": (
        lambda: quant.quantize(tree(), quant.nf4(), [name(i, "other") for i in range(LEAVES)]),
        "no parameter matches",
    ),
    "frozen ones that are not there": (
        lambda: sf.shard(tree(), mesh(), sf.full_shard("data"), frozen=[name(i, "other") for i in range(LEAVES)]),
        "the parameters are layer0",
    ),
    "a put of what is no tree": (lambda: sf.shards.to_tier(name(0) * 50, tree()), "the tree comes first"),  # type: ignore[arg-type]
    "columns of other lengths": (
        lambda: run.batches({name(i): torch.ones(2 + (i > 2)) for i in range(LEAVES)}, mesh(), "data", batch=2, seed=0),
        "must be equal in all tensors",
    ),
    "a batch of other lengths": (
        lambda: sf.accumulate(lambda p, b: p, {name(i): torch.ones(2 + (i > 2)) for i in range(LEAVES)}, micro=2)(
            tree(1)
        ),
        "the same number of rows",
    ),
    "adapters of nothing": (lambda: lora_of([name(i, "other") for i in range(LEAVES)]), "end in"),
    "parameters of another model": (lambda: model()(tree(), torch.ones(2)), "have the structure of `tree`"),
    "buffers of another model": (
        lambda: interop.functional(torch.nn.BatchNorm1d(2), mutable_buffers=[name(i) for i in range(LEAVES)]),
        "nothing matches",
    ),
    "a checkpoint that is not there": (lambda: checkpoint.load("no such folder", sharded()), "there is no folder"),
    "a checkpoint of another tree": (lambda: loaded(lambda: {"params": sharded("other")}), "missing in the checkpoint"),
    "a checkpoint of other shapes": (lambda: loaded(lambda: {"params": sharded(size=4)}), "is float32"),
    "a part that is not there": (
        lambda: checkpoint.load(top_level(), sharded(), part=name(0, "part")),
        "There is no part",
    ),
    "a collective of an unknown axis": (
        lambda: mapped(lambda x: sf.psum(x, name(0)), (...,), tree()),
        "the mesh has data=2",
    ),
}


def said(mistake: str) -> str:
    """The error message of a mistake on this rank."""
    try:
        MISTAKES[mistake][0]()
    except Exception as error:
        return str(error)
    raise AssertionError(f"{mistake}: no error")


def main() -> None:
    args = parser("The length of error messages when everything that they could quote is long.").parse_args()
    rows, goals = [], []
    with World(RANKS, kind="threads", deadline=60) as world:
        for mistake in MISTAKES:
            messages = world.run(said, mistake)
            most = max(map(len, messages))
            rows.append({"mistake": mistake, "letters": most, "begins": messages[0][:70].replace("\n", " ")})
            goals.append(Goal(f"{mistake}: letters of the message", most, MOST))
    publish(f"messages on trees of {LEAVES} parameters with names of {LONG} letters", rows, goals, args.json)


if __name__ == "__main__":
    main()
