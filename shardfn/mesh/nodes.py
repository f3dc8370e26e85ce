"""Which axes of a mesh lie within a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise


def across(hosts: Sequence[str], sizes: dict[str, int]) -> str:
    """What to say of an axis that spans nodes though it would fit into one; empty where there is none.

    Args:
        hosts: of each rank.
        sizes: axis name -> ranks along it, slowest-varying first.
    """
    inner, largest = 1, max(Counter(hosts).values(), default=0)
    for name, size in reversed(sizes.items()):
        inner *= size
        if inner > largest:
            return ""
        for first in range(0, len(hosts), inner):
            row = hosts[first : first + inner]
            if len(set(row)) > 1:
                shown = ", ".join(row[:8]) + (", ..." if len(row) > 8 else "")
                return (
                    f"axis {name!r} spans nodes, though a node has up to {largest} ranks: ranks {first} to "
                    f"{first + inner - 1} are on {shown}. {_fix(hosts)}"
                )
    return ""


def _fix(hosts: Sequence[str]) -> str:
    changes = sum(one != other for one, other in pairwise(hosts))
    if changes >= len(set(hosts)):
        return (
            "Let the ranks of a node be consecutive: srun --distribution=block, mpirun --map-by slot, "
            "torchrun --node-rank in the order of the nodes"
        )
    return "Let the sizes of the last axes divide the ranks of each node, and start as many on every node"
