"""Along which axes values vary, followed through a function of whole arguments that somebody differentiates.

A derivative is right where a value that is the same on all ranks meets one that varies only by `pvary`, whose transpose
sums the ranks' gradients. Python numbers, what a function closes over and what custom autograd functions return are not
followed; what they hide is found by comparing the derivatives themselves (`ops.verified`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardfn.mesh.axes import known_axes, sizes
from shardfn.mesh.grid import as_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Axes = frozenset[str]
_MARK = "_shardfn_varies"
_OF_FIRST = ("expand_as", "view_as", "reshape_as", "type_as", "to")  # of another tensor they take no values


class Following(TorchFunctionMode):
    """A context: what torch functions return varies along every axis along which what they are given does.

    Raises:
        ValueError: in a function that is differentiated, a value meets one that varies along more axes; a collective
            along an axis is given what does not vary along it, or `local_slice` what does.
    """

    def __init__(self, mesh: DeviceMesh, name: str) -> None:
        super().__init__()
        self.mesh, self.name = mesh, name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():
            return out
        given = args[:1] if getattr(func, "__name__", "") in _OF_FIRST else (args, kwargs or {})
        known = [x for x in optree.tree_leaves(given) if isinstance(x, Tensor) and hasattr(x, _MARK)]
        results = [x for x in optree.tree_leaves(out) if isinstance(x, Tensor)] if known else []
        if not results:
            return out
        op = str(func.name()).split("::")[-1] if isinstance(func, torch._ops.OpOverload) else ""
        if op in _COLLECTIVES and func.namespace.startswith("shardfn"):
            axes = self._after(op, known[0], args)
        else:
            axes = frozenset().union(*(varies(x) for x in known))
            if any(x.requires_grad for x in results):
                self._meet(known, axes, getattr(func, "__name__", str(func)))
        mark(results, axes)
        return out

    def _meet(self, known: list[Tensor], axes: Axes, what: str) -> None:
        for x in known:
            missing = axes - varies(x)
            if missing and x.requires_grad:
                names = tuple(name for name in sizes(self.mesh) if name in missing)
                raise ValueError(
                    f"{self.name}: in {what}, a value of shape {tuple(x.shape)} that is the same on all ranks along "
                    f"{_said(names)} meets one that varies, and is differentiated: its derivative would be this "
                    f"rank's part of it. Write shardfn.pvary(value, {_said(names)}), whose transpose adds up the parts"
                )

    def _after(self, op: str, x: Tensor, args: Any) -> Axes:
        """What the result of a collective varies along."""
        used = known_axes(self.mesh).used.items()
        have, group = sizes(self.mesh), next(one for one in reversed(args) if isinstance(one, str))
        along = next((frozenset(as_names(names)) for names, axis in used if axis.group == group), frozenset[str]())
        along = frozenset(name for name in along if have[name] > 1)
        takes, gives = _COLLECTIVES[op][0], _COLLECTIVES[op][1]
        before = varies(x)
        names = tuple(name for name in have if name in along)
        if takes == "V" and not along <= before and x.requires_grad:
            raise ValueError(
                f"{self.name}: {op} along {_said(names)} is given a value of shape {tuple(x.shape)} that is "
                f"differentiated and that nothing made vary along it: write shardfn.pvary(value, {_said(names)}) where "
                f"what is the same on all ranks meets what varies, or here, to have it once for each rank"
            )
        if takes == "I" and along & before and x.requires_grad:
            raise ValueError(
                f"{self.name}: {op} along {_said(names)} takes a value that is the same on all ranks along it, but one "
                f"of shape {tuple(x.shape)} varies, and is differentiated"
            )
        return before | along if gives == "V" else before - along


_COLLECTIVES = {
    "psum": "VI",
    "pmax": "VI",
    "pmin": "VI",
    "pvary": "IV",
    "all_gather": "VV",
    "reduce_scatter": "VV",
    "all_gather_invariant": "VI",
    "local_slice": "IV",
    "ppermute": "VV",
    "all_to_all": "VV",
    "ragged_all_to_all": "VV",
}


def varies(x: Tensor) -> Axes:
    """The axes along which a value that is followed varies."""
    found: Axes = getattr(x, _MARK)
    return found


def mark(values: Iterable[Any], axes: Iterable[str]) -> None:
    """Follows these values, which vary along these axes."""
    for x in values:
        setattr(x, _MARK, frozenset(axes))


def marked(x: Any) -> Axes | None:
    """The axes along which a value varies, or None where that is not known."""
    return getattr(x, _MARK, None)


def check_claim(x: Any, axes: Iterable[str], what: str) -> None:
    """Raises ValueError if a value that is differentiated varies along an axis that its spec does not name."""
    more = sorted((marked(x) or frozenset()) - frozenset(axes))
    if more and x.requires_grad:
        raise ValueError(
            f"{what} varies along {_said(tuple(more))}, but its spec does not name it, and it is differentiated: "
            f"make it the same on all ranks, by psum or all_gather(to='invariant') say, or declare how it is cut"
        )


def _said(names: tuple[str, ...]) -> str:
    return repr(names[0]) if len(names) == 1 else repr(names)
