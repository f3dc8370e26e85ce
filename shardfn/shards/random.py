"""Random numbers that differ along some mesh axes and agree along others."""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.compat import dispatch, modes
from shardfn.mesh.axes import device_of
from shardfn.mesh.grid import AxisName
from shardfn.mesh.scope import bound_axis, current_mesh, is_part


def fold_in(seed: int, *what: int | AxisName) -> torch.Generator:
    """A generator seeded from `seed` and all of `what`, the same on every rank that folds in the same values.

    An axis name stands for this rank's position along the axis, so ranks along it draw different numbers. An int (a
    step, a layer) is folded in unchanged. Ranks along all other axes draw the same. In a part of a batch that is added
    exactly (`Placement.with_exact`), the data axes stand for the number of the part, on any mesh.

    Args:
        seed: any int.
        *what: axis names of the mesh in scope, tuples of them for the position along their product, and ints; the order
            matters.

    Returns:
        A new generator on the mesh's device.

    Raises:
        NameError, ValueError: an axis name without a mesh in scope, or one that the mesh does not have.
        TypeError: an argument that is neither an int nor a name, nor a tuple of names.

    Example:
        Dropout that differs along `data` and agrees along `tensor`, at each step:
        ``keep = torch.rand(x.shape, generator=fold_in(seed, step, "data")) > rate``
    """
    folded = [_position(part) if isinstance(part, (str, tuple)) else _int(part) for part in what]
    mesh = current_mesh()
    generator = torch.Generator(device=device_of(mesh) if mesh else "cpu")
    return generator.manual_seed(mixed(_int(seed), *folded))


def _position(axis: AxisName) -> str:
    bound = bound_axis(axis, "fold_in")
    return f"part={bound.index}" if is_part(bound) else f"{axis}={bound.index}"


def _int(part: object) -> int:
    try:
        return operator.index(part)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"fold_in: arguments must be ints or axis names, got {type(part).__name__}") from None


def int_seed(seed: object) -> int:
    """A seed of any integer type, as an int.

    Raises:
        TypeError: it is something else, whose `repr` may differ between ranks.
    """
    try:
        return operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"a seed is an int, not {str(seed)[:40]!r} of type {type(seed).__name__}") from None


def mixed(seed: int, *parts: int | str) -> int:
    """A 63-bit seed, hashed from a seed and further numbers or words: the same on every machine."""
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class DrawContext(modes.DispatchMode):
    """A context in which random ops draw from a given generator; torch's default generators stay unchanged.

    On accelerators ops draw from a generator with the same seed.

    Args:
        generator: a generator on the CPU.
        function: the function that draws, for messages.
    """

    def __init__(self, generator: torch.Generator, function: str) -> None:
        super().__init__()
        self.seed, self.what = generator.initial_seed(), function
        self.generators = {"cpu": generator}

    def __enter__(self) -> Any:
        self.before = torch.get_rng_state()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if error is None:
            self._refuse_seeding()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else _first_device(args)
        overload = dispatch.drawing(func)
        if overload is None or device.type == "meta":
            result = func(*args, **kwargs)  # the tag only says that it may draw
            self._refuse_seeding(f" by {func.name()}, which takes no generator")
            return result
        op, number = overload
        if kwargs.get("generator") is not None or (number < len(args) and args[number] is not None):
            return func(*args, **kwargs)
        self._refuse_seeding()
        return op(*args[:number], **kwargs | {"generator": self._generator_on(device)})

    def _generator_on(self, device: torch.device) -> torch.Generator:
        key = "cpu" if device.type == "cpu" else str(device)
        if key not in self.generators:
            self.generators[key] = torch.Generator(device=device).manual_seed(self.seed)
        return self.generators[key]

    def _refuse_seeding(self, suffix: str = "") -> None:
        """Raises RuntimeError if torch's own generator has changed, and restores it."""
        if not torch.equal(torch.get_rng_state(), self.before):
            torch.set_rng_state(self.before)
            verb = "draws from" if suffix else "seeds"
            raise RuntimeError(
                f"{self.what} {verb} torch's own generator{suffix}: the numbers would not depend on its "
                f"seed and path alone. Draw from the torch.Generator that it is given"
            )


def _first_device(args: Any) -> torch.device:
    return next((x.device for x in optree.tree_leaves(args) if isinstance(x, Tensor)), torch.device("cpu"))
