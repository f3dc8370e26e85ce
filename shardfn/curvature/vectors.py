"""Vectors that are trees of shards: where they lie, their inner products, and random ones that are alike on any mesh.

Inside this folder a vector is a list of tensors, one for each leaf that has a gradient. A rank holds of each what it
holds of the gradient, in float32 or wider.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from shardfn.check.callsites import paused
from shardfn.collectives import functional
from shardfn.collectives.agree import agree
from shardfn.compat import functorch
from shardfn.compat.devices import elements_at_a_time
from shardfn.mesh.axes import sizes
from shardfn.mesh.planned import planned
from shardfn.mesh.scope import current_mesh, independent_axes, scope_of
from shardfn.optim.hyperparameters import kind as kind_of
from shardfn.optim.norms import dots, wide
from shardfn.optim.rounding import drawn_at
from shardfn.optim.sharded_state import finer_axes, start_of
from shardfn.quoting import short
from shardfn.shards.blocks import CHUNK
from shardfn.shards.layout import Layout, is_flat
from shardfn.shards.pieces import Segment, Unit, refuse_complex, units
from shardfn.transforms.autodiff import Variables, layouts_of, moves
from shardfn.transforms.fitting import together
from shardfn.transforms.shortage import RandomNumbers

Vector = list[Tensor]
Kind = Literal["normal", "signs"]


class Space:
    """The vectors that are like the gradient of some parameters.

    Attributes:
        variables: the parameters that have a gradient.
        units: this rank's part of the gradient's leaves, with the parameters' own numbers for values.
    """

    def __init__(self, params: Any, name: str) -> None:
        self.name, self.params, self.variables = name, params, Variables(params)
        refuse_derivative(self.variables.values, name)
        if not self.variables.values:
            raise ValueError(f"{name}: the parameters have no leaf with a gradient: all are frozen, or no numbers")
        nodes, self._tree = _flat(params)
        self._moving = [moves(*(x.values, x.layout) if is_flat(x) else (x, None)) for x in nodes]
        if any(layout is not None and layout.placement.tiers.params != "device" for layout in layouts_of(params)):
            raise NotImplementedError(
                f"{name}: parameters on the host or on disk; its products need them on the device"
            )
        pairs = zip(self.variables.values, self.variables.layouts, strict=True)
        self.units = units(self.variables.gradient([_own(x, layout) for x, layout in pairs]))
        refuse_complex(self.units, name)

    @property
    def like(self) -> Vector:
        """The parameters, on this rank as its part of a vector."""
        return [unit.values for unit in self.moving]

    @property
    def moving(self) -> list[Unit]:
        """The leaves that have a gradient."""
        return [unit for unit in self.units.each if unit.trainable]

    def read(self, tree: Any, what: str = "a vector", fix: str = "") -> Vector:
        """The vector that a tree is: one like the gradient, or like the parameters, of any floating-point dtype.

        Args:
            tree: the tree.
            what: what it is, for messages.
            fix: what to do if it is none.

        Raises:
            ValueError: it is like neither.
            RuntimeError: its derivative may be asked for.
        """
        nodes, structure = _flat(tree)
        if structure != self._tree:
            lone = len(nodes) == 1 and nodes[0] is tree
            raise ValueError(
                f"{self.name}: {what} is a tree of shards like the parameters. This one has another structure, "
                f"{kind_of(tree) if lone else short(str(structure))}, and theirs is {short(str(self._tree))}{fix}"
            )
        refuse_derivative([x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)], self.name)
        given = [node for node, moving in zip(nodes, self._moving, strict=True) if moving]
        rows = zip(given, self.moving, self.variables.layouts, strict=True)
        return [self._leaf(node, unit, layout, what, fix) for node, unit, layout in rows]

    def _leaf(self, node: Any, unit: Unit, layout: Layout | None, what: str, fix: str) -> Tensor:
        x = node.values if is_flat(node) else node
        here = node.layout if is_flat(node) else None
        given = isinstance(x, Tensor) and x.is_floating_point()
        if given and layout is not None and here == layout:
            x = _own(x, layout)
        elif given and here != (None if layout is None else layout.state_layout):
            given = False
        if not given or x.shape != unit.values.shape:
            said = f"{here or 'plain'}, {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{self.name}: {what} is a tree of shards like the parameters. In this one {unit.name or 'the tensor'} "
                f"is {said}, and theirs is {layout or 'plain'}, {tuple(unit.values.shape)}{fix}"
            )
        return x.detach()

    def written(self, vector: Vector) -> Any:
        """The tree of a vector, like the gradient."""
        return self.variables.gradient(vector)

    def tangents(self, vector: Vector) -> Vector:
        """The same numbers like the parameters, of their dtypes: gathered where a gradient is cut further."""
        found = []
        for x, p, layout in zip(vector, self.variables.values, self.variables.layouts, strict=True):
            if layout is not None and layout.state_layout is not layout:
                with scope_of(layout.grid, self.name):
                    axes = finer_axes(layout, layout.state_layout)
                    x = functional.all_gather(x.to(p.dtype), axes, to="invariant")
            found.append(x.to(p.dtype))
        return found

    def zeros(self) -> Vector:
        """A vector of zeros."""
        return [torch.zeros_like(x, dtype=wide(x), memory_format=torch.contiguous_format) for x in self.like]

    def dots(self, many: Sequence[Vector], other: Vector) -> Tensor:
        """Inner products of vectors with another: `[vectors]`, float64 on the CPU, the same bits on every rank.

        Raises:
            ValueError: they differ between ranks by more than rounding.
        """
        with paused():  # the sums are right by construction, and the checker would follow each parameter of each vector
            low, high = self._ends(self._dots(many, other))
            if _apart(low, high, high.abs().max()):  # which may be rounding, if the vectors are orthogonal
                own = self._ends(self._dots([other], other))[1]
                largest = max(float(self._ends(self._dots([v], v))[1]) for v in many)
                if _apart(low, high, (own.clamp(min=0) * max(largest, 0.0)).sqrt()):
                    raise ValueError(
                        f"{self.name}: inner products of vectors differ between ranks, from {float(low.min()):.6g} to "
                        f"{float(high.max()):.6g}: each rank has its own loss, vector or seed, or plain tensors that "
                        f"are cut. What is cut is a leaf of what sf.shard returns"
                    )
        return high.to("cpu", torch.float64)

    def _dots(self, many: Sequence[Vector], other: Vector) -> Tensor:
        return dots([self._units(v) for v in many], self._units(other))

    def same(self, loss: Tensor) -> float:
        """The value of a loss, which is the same on all ranks.

        Raises:
            ValueError: it differs between ranks by more than rounding.
        """
        return self._alike(loss, "the loss", "reduce it over all of them, by psum, say", 1e-3)

    def factor(self, x: float) -> float:
        """A number by which all ranks multiply; raises ValueError if it differs by more than rounding."""
        number = torch.tensor(x, dtype=torch.float64, device=self.like[0].device)
        fix = "each multiplies its part of a vector, so pass the same: the rows of all ranks, say, not of one"
        self._alike(number, "a factor", fix, 1e-12)
        return x

    def _alike(self, number: Tensor, what: str, fix: str, most: float) -> float:
        if planned():
            return 0.0
        with paused(), torch.no_grad():
            x = number.detach().double().view(1)
            low, high = self._ends(torch.where(x.isfinite(), x, math.inf))
        if _apart(low, high, high.abs().max(), most):
            raise ValueError(f"{self.name}: {what} is from {float(low):.6g} to {float(high):.6g} on the ranks: {fix}")
        return float(high)

    def probe(self) -> tuple[float, float]:
        """A sum of the parameters with random signs, which tells other values, and their norm."""
        signs = [x.double() for x in self.drawn("signs", 0, 0)]
        return float(self.dots([self.like], signs)[0]), self.norm([x.to(wide(x)) for x in self.like])

    def agree(self, name: str, **settings: Any) -> None:
        """Raises ValueError on every rank if ranks were given other numbers."""
        lines = [f"{key}: {value!r}" for key, value in settings.items()]
        agree(lines, together(self.params), name, subject=("the arguments", "All ranks search alike: pass the same"))

    def _ends(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest of all ranks' numbers: what is decided by them is decided alike.

        Replicas sum by themselves, perhaps in another order.
        """
        high, low = numbers, -numbers
        meshes: dict[Any, Any] = {unit.layout.grid: None for unit in self.moving if unit.layout is not None}
        for there in [scope_of(grid, self.name) for grid in meshes] or [contextlib.nullcontext()]:
            with there:
                mesh = current_mesh()
                axes = () if mesh is None else tuple(name for name in sizes(mesh) if name not in independent_axes())
                if axes:
                    high, low = functional.pmax(torch.stack([high, low]), axes)
        return -low, high

    def norm(self, vector: Vector) -> float:
        """The Euclidean norm."""
        return float(self.dots([vector], vector)[0].sqrt())

    @property
    def rounding(self) -> float:
        """A relative error that rounding may leave in a vector."""
        return 8 * max(torch.finfo(wide(x)).eps for x in self.like)

    def size(self) -> int:
        """The number of parameters that have a gradient."""
        ones = [torch.ones_like(x, dtype=torch.float64) for x in self.like]
        return round(float(self.dots([ones], ones)[0]))

    def _units(self, vector: Vector) -> Any:
        values = iter(vector)
        each = [u._replace(values=next(values)) if u.trainable else u for u in self.units.each]
        return self.units._replace(each=each)

    def drawn(self, kind: Kind, seed: int, number: int) -> Vector:
        """A random vector: standard normal numbers, or 1 and -1 alike.

        An element depends on the seed, the number, the parameter's path and its place there, but not on the mesh.
        """
        return [random(unit, kind, (kind, seed, number)) for unit in self.moving]


def _apart(low: Tensor, high: Tensor, scale: Tensor, most: float = 1e-3) -> bool:
    """Whether ranks differ by more than rounding; not if they have no numbers, as in a plan."""
    return not planned() and bool((high - low > most * scale).any())


def refuse_derivative(tensors: Sequence[Tensor], name: str) -> None:
    """Raises RuntimeError where a derivative of what is made of these tensors may be asked for."""
    followed = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if followed or functorch.inside_transform() or functorch.inside_forward_mode():
        raise RuntimeError(
            f"{name}: parameters or a vector may be differentiated here, and a derivative through a product would be "
            f"wrong, as both are constants. If that is meant, detach them, or call it under torch.no_grad() and "
            f"outside of transforms; else write sf.jvp(sf.grad(loss), ...)"
        )


@contextlib.contextmanager
def draws_restored(tensors: Sequence[Tensor]) -> Iterator[RandomNumbers]:
    """A context that leaves torch's generators, of these tensors' devices too, as they were; gives their state."""
    before = RandomNumbers(tensors)
    try:
        yield before
    finally:
        before.restore()


def _flat(tree: Any) -> tuple[list[Any], Any]:
    return optree.tree_flatten(tree, is_leaf=is_flat, none_is_leaf=True)


def _own(x: Tensor, layout: Layout | None) -> Tensor:
    """This rank's part of a leaf, where gradients are cut further than parameters."""
    if layout is None or layout.state_layout is layout:
        return x.detach()
    start = start_of(layout, layout.state_layout)
    return x.detach()[start : start + layout.state_layout.piece]


def random(unit: Unit, kind: Kind, salt: tuple[Any, ...]) -> Tensor:
    """Random numbers for the elements of a leaf, in float32 or wider, and zeros where no parameter is."""
    into = torch.zeros_like(unit.values, dtype=wide(unit.values), memory_format=torch.contiguous_format)
    step = elements_at_a_time(into.device, CHUNK, 2**22)
    for part in unit.filled:
        for start in range(part.start, part.stop, step):
            stop = min(start + step, part.stop)
            places = _places(part, start, stop, into.device)
            draws = drawn_at(places, part.path, len(part.whole), 4 if kind == "normal" else 1, salt)
            bits = [x.double() for x in draws]
            if kind == "signs":
                numbers = 1 - 2 * (bits[0] % 2)
            else:  # Box and Muller (1958)
                radius = (-2 * ((bits[0] * 2**16 + bits[1] + 0.5) / 2**32).log()).sqrt()
                numbers = radius * (2 * math.pi * (bits[2] * 2**16 + bits[3]) / 2**32).cos()
            into.view(-1)[start:stop] = numbers
    return into


def _places(part: Segment, start: int, stop: int, device: torch.device) -> Tensor:
    """Row-major indices in the whole parameter, of which other axes may have cut a part, of elements of a unit."""
    own = torch.arange(part.first + start - part.start, part.first + stop - part.start, device=device)
    if part.shape == part.whole:
        return own
    places, step = torch.zeros_like(own), 1
    for n, of, corner in reversed(list(zip(part.shape, part.whole, part.corner, strict=True))):
        places += (own % n + corner) * step
        own, step = own // n, step * of
    return places


def add_(into: Vector, x: Vector, factor: float = 1.0) -> Vector:
    """Adds a multiple of a vector to another, in place."""
    for a, b in zip(into, x, strict=True):
        a.add_(b, alpha=factor)
    return into


def scale_(x: Vector, factor: float) -> Vector:
    """Multiplies a vector by a number, in place."""
    torch._foreach_mul_(x, factor)
    return x


def subtract_(x: Vector, basis: Sequence[Vector], factors: Tensor) -> Vector:
    """Subtracts multiples of vectors from one, in place."""
    for v, h in zip(basis, factors.tolist(), strict=True):
        add_(x, v, -h)
    return x


def combined_(basis: list[Vector], weights: Tensor) -> list[Vector]:
    """Linear combinations of vectors `[vectors, combinations]`, in their place, some elements at a time."""
    for i in range(len(basis[0])):
        flat = [v[i].view(-1) for v in basis]
        step = elements_at_a_time(flat[0].device, CHUNK, 2**22)
        for start in range(0, len(flat[0]), step):
            part = torch.stack([x[start : start + step] for x in flat], 1).double() @ weights.to(flat[0].device)
            for x, new in zip(flat, part.unbind(1), strict=False):
                x[start : start + step] = new
    return basis[: weights.shape[1]]
