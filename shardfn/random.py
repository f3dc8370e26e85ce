"""Random numbers that differ along some mesh axes and agree along the others."""

from __future__ import annotations

import hashlib
import operator

import torch

from shardfn.mesh import bound_axis, current_mesh


def fold_in(seed: int, *what: int | str) -> torch.Generator:
    """A generator seeded from `seed` and all of `what`, the same on every rank that folds in the same.

    An axis name stands for this rank's position along the axis: ranks along it get different numbers. An
    int (a step, a layer) is folded in as it is. Axes that are not named do not matter, so their ranks agree.

    Args:
        seed: any int.
        *what: axis names of the mesh in scope, and ints, in an order that counts.

    Returns:
        A new generator on the mesh's device.

    Raises:
        NameError, ValueError: an axis name without a mesh in scope, or one that the mesh does not have.
        TypeError: something that is neither an int nor a name.

    Example:
        Dropout that differs along `data` and agrees along `tensor`, at each step:
        ``keep = torch.rand(x.shape, generator=fold_in(seed, step, "data")) > rate``
    """
    folded = [f"{part}={bound_axis(part, 'fold_in').index}" if isinstance(part, str) else _int(part) for part in what]
    mesh = current_mesh()
    generator = torch.Generator(device=mesh.device_type if mesh else "cpu")
    return generator.manual_seed(mixed(_int(seed), *folded))


def _int(part: object) -> int:
    try:
        return operator.index(part)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"fold_in takes ints and axis names, not {type(part).__name__}") from None


def mixed(seed: int, *parts: int | str) -> int:
    """A 63-bit seed from a seed and further numbers or words: the same everywhere, unrelated for different parts."""
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
