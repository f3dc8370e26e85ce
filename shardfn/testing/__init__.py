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

_EXTRA = ("cloudpickle", "hypothesis", "pytest")


def _explained(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error, with the extra to install if one of its packages is missing."""
    if error.name not in _EXTRA:
        return error
    message = f"shardfn.testing needs {error.name}, which is in the extra testing: pip install '.[testing]'"
    return ModuleNotFoundError(message, name=error.name)


try:
    from shardfn.simulated.device import Device, Wait, simulated
    from shardfn.testing.errors import Failure, WorldError, WorldTimeout
    from shardfn.testing.world import World, world
except ModuleNotFoundError as error:
    raise _explained(error) from None

if TYPE_CHECKING:
    import shardfn.testing.strategies as strategies

__all__ = ["Device", "Failure", "Wait", "World", "WorldError", "WorldTimeout", "simulated", "strategies", "world"]


def __getattr__(name: str) -> Any:
    # Lazy: hypothesis is slow to import, and only these strategies need it.
    if name == "strategies":
        from importlib import import_module

        try:
            return import_module("shardfn.testing.strategies")
        except ModuleNotFoundError as error:
            raise _explained(error) from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
