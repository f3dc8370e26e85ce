"""What a parameter begins with that no file has: what its classes give it when a module is built.

Source: `PreTrainedModel.initialize_weights` of transformers, for the order: inner modules first, each by the innermost
model around it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardfn.checkpoint.team import CheckpointError
from shardfn.shards.random import Drawing, int_seed, mixed


def beginning(module: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """The values of one parameter, which depend on the seed and its name alone.

    The `reset_parameters` of its module and of those around it, and then what `_init_weights` of the models around it
    do, run on copies in which every other parameter is on the device meta.

    Args:
        module: a shell, which is not changed.
        name: of the parameter, in the whole module.
        shape: of the parameter.
        dtype: floating or complex.
        seed: any int.

    Returns:
        On the CPU.

    Raises:
        CheckpointError: its classes have no way of their own, or one that needs more than this parameter.
    """
    path, _, at = name.rpartition(".")
    holder = module.get_submodule(path)
    unset = torch.full(shape, math.nan, dtype=dtype) if dtype.is_floating_point or dtype.is_complex else None
    if unset is None:
        raise CheckpointError(f"{_what(name, holder)}, which is of {dtype}: {_INSTEAD}")
    copies = _Copies({id(holder._parameters[at]): nn.Parameter(unset)})
    words = path.split(".") if path else []
    around = [copies.of(module.get_submodule(".".join(words[:n]))) for n in range(len(words), -1, -1)]
    generator = torch.Generator().manual_seed(mixed(int_seed(seed), name))
    try:
        with torch.no_grad(), Drawing(generator, f"what {name} begins with"):
            for ways in (_resets(around), _by_models(around)):
                for way in ways:
                    way()
    except Exception as error:
        raise CheckpointError(f"{_what(name, holder)} ({type(error).__name__}: {error}): {_INSTEAD}") from error
    made = around[0]._parameters[at]
    if not isinstance(made, Tensor) or made.shape != shape or made.dtype != dtype or bool(made.isnan().any()):
        raise CheckpointError(f"{_what(name, holder)}: {_INSTEAD}")
    return made.detach()


_INSTEAD = "build it outside of interop.meta(), or give its class a reset_parameters() that sets it"


def _what(name: str, holder: nn.Module) -> str:
    return (
        f"these files lack {name}, which neither reset_parameters() nor _init_weights() of {type(holder).__name__} and "
        f"the modules around it sets from nothing"
    )


class _Copies:
    """Modules without values, but for some parameters; each is copied once, and its attributes are its own."""

    def __init__(self, instead: dict[int, Tensor]) -> None:
        self.instead, self.made = instead, dict[int, Any]()

    def of(self, m: Any) -> Any:
        """A copy of a module and of all inside."""
        if id(m) not in self.made:
            made = self.made[id(m)] = object.__new__(type(m))
            vars(made).update(vars(m))
            for kind, one in (("_parameters", self._empty), ("_buffers", self._empty), ("_modules", self.of)):
                vars(made)[kind] = {name: None if x is None else one(x) for name, x in vars(m)[kind].items()}
        return self.made[id(m)]

    def _empty(self, x: Tensor) -> Tensor:
        if id(x) not in self.instead:
            like: Any = torch.empty(x.shape, dtype=x.dtype, device="meta")
            made: Any = nn.Parameter(like, x.requires_grad) if isinstance(x, nn.Parameter) else like
            made._is_hf_initialized = True  # by which transformers leaves it alone
            self.instead[id(x)] = made
        return self.instead[id(x)]


def _resets(around: list[Any]) -> list[Callable[[], Any]]:
    """As torch's layers begin, and others after their example."""
    found = (getattr(m, name, None) for m in around for name in ("_reset_parameters", "reset_parameters"))
    return [reset for reset in found if callable(reset)]


def _by_models(around: list[Any]) -> list[Callable[[], Any]]:
    """As models begin that set the weights of the modules inside."""
    found: list[Callable[[], Any]] = []
    for number, m in enumerate(around):
        models = [one for one in around[number:] if callable(getattr(one, "_init_weights", None))]
        if models and inspect.signature(models[0]._init_weights).parameters:
            found.append(functools.partial(models[0]._init_weights, m))
        elif models and models[0] is m:
            found.append(m._init_weights)
    return found
