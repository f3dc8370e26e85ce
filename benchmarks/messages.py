"""How long error messages become where everything that they could quote is long: trees, names, shapes and meshes.

    python -m benchmarks.messages

Each mistake is made on two ranks, with trees of a thousand parameters and names of 300 letters. An error that does not
come is a failure here: what is not refused cannot be short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import shardfn as sf
import shardfn.optim as so
from benchmarks.report import Goal, parser, publish
from shardfn import P, checkpoint
from shardfn.testing import World

RANKS, LEAVES, LONG, MOST = 2, 1000, 300, 2000


def name(i: int, of: str = "layer") -> str:
    return f"{of}{i}_".ljust(LONG, "x")


def tree(leaves: int = LEAVES, of: str = "layer", size: int = 2) -> dict[str, torch.Tensor]:
    return {name(i, of): torch.ones(size) for i in range(leaves)}


def mesh() -> Any:
    return sf.make_mesh(data=RANKS, device="cpu")


def mapped(f: Callable[..., Any], in_specs: Any, *args: Any, out_specs: Any = ...) -> Any:
    return sf.shard_map(f, mesh=mesh(), in_specs=in_specs, out_specs=out_specs)(*args)


def sharded(of: str = "layer", size: int = 2, leaves: int = LEAVES) -> Any:
    return sf.shard(tree(leaves, of, size), mesh(), sf.full_shard("data"))


def stepped(grads: Any) -> Any:
    optimizer, params = so.adamw(1e-3), sharded()
    return optimizer.step(params, grads, optimizer.init(params))


def same_tensor() -> Any:
    one = torch.ones(2)
    return sf.shard({"a": {name(i): one for i in range(LEAVES)}, "b": {name(0): one}}, mesh(), sf.full_shard("data"))


def staged(wanted: str) -> Any:
    stage = sf.stage(lambda p, x: x * p[name(1, wanted)].sum())
    return mapped(stage, (..., ...), sharded(), torch.ones(2))


MISTAKES: dict[str, Callable[[], Any]] = {
    "specs of another tree": lambda: mapped(lambda p: p, ({n: P() for n in tree(of="other")},), tree()),
    "a spec of an unknown axis": lambda: mapped(lambda p: p, (P(name(0)),), tree()),
    "a spec that is too long": lambda: mapped(lambda p: p, (P(*["data"] * 50),), tree()),
    "an output that no spec fits": lambda: mapped(lambda p: p, (...,), tree(), out_specs={name(1): P()}),
    "what differs between ranks": lambda: sf.assert_replicated(
        {n: x + torch.distributed.get_rank() for n, x in tree().items()}, mesh()
    ),
    "the same tensor twice": same_tensor,
    "leaves that are no tensors": lambda: sf.shard(
        {name(i): object() for i in range(LEAVES)}, mesh(), sf.full_shard("data")
    ),
    "a mesh of long names": lambda: sf.make_mesh(device="cpu", **{name(i): 2 for i in range(20)}),
    "an unknown strategy": lambda: sf.strategy(name(0), shard="data", replica="data"),
    "gradients of another tree": lambda: stepped(sharded("other")),
    "gradients of other shapes": lambda: stepped(sharded(size=4)),
    "no gradients": lambda: stepped({}),
    "a parameter that is not there": lambda: staged("other"),
    "a checkpoint that is not there": lambda: checkpoint.load("no such folder", sharded()),
    "a collective of an unknown axis": lambda: mapped(lambda x: sf.psum(x, name(0)), (...,), tree()),
}


def said(mistake: str) -> str:
    """What comes of a mistake on this rank."""
    try:
        MISTAKES[mistake]()
    except Exception as error:
        return str(error)
    raise AssertionError(f"{mistake} is no error")


def main() -> None:
    args = parser("How long error messages become where all that they could quote is long.").parse_args()
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
