"""Right programs, on which the checker is silent and which it does not change.

Each is what somebody would write: a function of `On`, a mesh and the `shard_map` under test, that returns what to run
and what it gives on this rank, worked out by one process in float64.
"""

from tests.check.programs import (
    axes,
    body,
    by_hand,
    doubts,
    losses,
    neighbors,
    runs,
    stages,
    tensor,
    training,
    transforms,
    values,
    ways,
)
from tests.check.programs.setting import PROGRAMS, On, Right

__all__ = ["PROGRAMS", "On", "Right"]
FILES = (by_hand, losses, training, tensor, axes, transforms, body, values, ways, doubts, neighbors, runs, stages)
