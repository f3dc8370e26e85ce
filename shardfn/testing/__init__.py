"""Worlds of ranks for tests.

from shardfn.testing import world

def test_every_rank_sees_the_sum():
    def body():
        x = torch.ones(3)
        dist.all_reduce(x)
        return x

    for x in world(4).run(body):
        assert x.tolist() == [4, 4, 4]
"""

from typing import TYPE_CHECKING, Any

from shardfn.testing.errors import Failure, WorldError, WorldTimeout
from shardfn.testing.simulated import Device, Wait, simulated
from shardfn.testing.world import World, world

if TYPE_CHECKING:
    import shardfn.testing.strategies as strategies

__all__ = [
    "Device",
    "Failure",
    "Wait",
    "World",
    "WorldError",
    "WorldTimeout",
    "simulated",
    "strategies",
    "world",
]


def __getattr__(name: str) -> Any:
    # Hypothesis is needed only by those who draw, and it is slow to import.
    if name == "strategies":
        from importlib import import_module

        return import_module("shardfn.testing.strategies")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
