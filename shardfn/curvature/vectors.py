"""Vectors as trees of shards: conversions, inner products, and mesh-independent random vectors.

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
from shardfn.optim.rounding import random_bits_at
from shardfn.optim.sharded_state import finer_axes, start_of
from shardfn.quoting import short
from shardfn.shards.blocks import CHUNK
from shardfn.shards.layout import Layout, is_flat
from shardfn.shards.pieces import Segment, Unit, refuse_complex, units
from shardfn.transforms.autodiff import Variables, layouts_of, moves
from shardfn.transforms.fitting import program_ranks
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
        self.units = units(self.variables.gradient([_gradient_part(x, layout) for x, layout in pairs]))
        refuse_complex(self.units, name)

    @property
    def local_params(self) -> Vector:
        """The parameters as a vector: this rank's shards."""
        return [unit.values for unit in self.moving]

    @property
    def moving(self) -> list[Unit]:
        """The leaves that have a gradient."""
        return [unit for unit in self.units.each if unit.trainable]

    def read(self, tree: Any, subject: str = "a vector", fix: str = "") -> Vector:
        """Reads a tree like the gradient or the parameters, of any floating-point dtype, as a vector.

        Args:
            tree: the tree.
            subject: name of the tree in messages.
            fix: what to do if it is none.

        Raises:
            ValueError: it is like neither.
            RuntimeError: its derivative may be asked for.
        """
        nodes, structure = _flat(tree)
        if structure != self._tree:
            is_leaf = len(nodes) == 1 and nodes[0] is tree
            raise ValueError(
                f"{self.name}: {subject} is a tree of shards like the parameters. This one has another structure, "
                f"{kind_of(tree) if is_leaf else short(str(structure))}, and theirs is {short(str(self._tree))}{fix}"
            )
        refuse_derivative([x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)], self.name)
        selected = [node for node, moving in zip(nodes, self._moving, strict=True) if moving]
        rows = zip(selected, self.moving, self.variables.layouts, strict=True)
        return [self._leaf(node, unit, layout, subject, fix) for node, unit, layout in rows]

    def _leaf(self, node: Any, unit: Unit, layout: Layout | None, subject: str, fix: str) -> Tensor:
        x = node.values if is_flat(node) else node
        node_layout = node.layout if is_flat(node) else None
        valid = isinstance(x, Tensor) and x.is_floating_point()
        if valid and layout is not None and node_layout == layout:
            x = _gradient_part(x, layout)
        elif valid and node_layout != (None if layout is None else layout.state_layout):
            valid = False
        if not valid or x.shape != unit.values.shape:
            description = type(x).__name__
            if isinstance(x, Tensor):
                description = f"{node_layout or 'plain'}, {tuple(x.shape)}, {x.dtype}"
            raise ValueError(
                f"{self.name}: {subject} is a tree of shards like the parameters. In this one "
                f"{unit.name or 'the tensor'} is {description}, and theirs is {layout or 'plain'}, "
                f"{tuple(unit.values.shape)}{fix}"
            )
        return x.detach()

    def written(self, vector: Vector) -> Any:
        """Returns the tree of a vector, like the gradient."""
        return self.variables.gradient(vector)

    def tangents(self, vector: Vector) -> Vector:
        """Casts a vector to the parameters' dtypes; gathers leaves whose gradient is sharded further."""
        tangents = []
        for x, p, layout in zip(vector, self.variables.values, self.variables.layouts, strict=True):
            if layout is not None and layout.state_layout is not layout:
                with scope_of(layout.grid, self.name):
                    axes = finer_axes(layout, layout.state_layout)
                    x = functional.all_gather(x.to(p.dtype), axes, to="invariant")
            tangents.append(x.to(p.dtype))
        return tangents

    def zeros(self) -> Vector:
        """A vector of zeros."""
        return [torch.zeros_like(x, dtype=wide(x), memory_format=torch.contiguous_format) for x in self.local_params]

    def dots(self, vectors: Sequence[Vector], other: Vector) -> Tensor:
        """Inner products of vectors with another: `[vectors]`, float64 on the CPU, equal on every rank.

        Raises:
            ValueError: they differ between ranks by more than rounding.
        """
        with paused():  # the sums are right by construction, and the checker would follow each parameter of each vector
            low, high = self._ends(self._dots(vectors, other))
            if _ranks_differ(low, high, high.abs().max()):  # which may be rounding, if the vectors are orthogonal
                other_square = self._ends(self._dots([other], other))[1]
                largest = max(float(self._ends(self._dots([v], v))[1]) for v in vectors)
                if _ranks_differ(low, high, (other_square.clamp(min=0) * max(largest, 0.0)).sqrt()):
                    raise ValueError(
                        f"{self.name}: inner products of vectors differ between ranks, from {float(low.min()):.6g} to "
                        f"{float(high.max()):.6g}: each rank has its own loss, vector or seed, or plain tensors are "
                        f"sharded. Pass leaves that sf.shard returned"
                    )
        return high.to("cpu", torch.float64)

    def _dots(self, vectors: Sequence[Vector], other: Vector) -> Tensor:
        return dots([self._units(v) for v in vectors], self._units(other))

    def same(self, loss: Tensor) -> float:
        """Returns the value of a loss, which must be equal on all ranks.

        Raises:
            ValueError: it differs between ranks by more than rounding.
        """
        return self._check_equal(loss, "the loss", "reduce it over all of them, by psum, say", 1e-3)

    def factor(self, x: float) -> float:
        """A number by which all ranks multiply; raises ValueError if it differs by more than rounding."""
        value = torch.tensor(x, dtype=torch.float64, device=self.local_params[0].device)
        fix = "each multiplies its part of a vector, so pass the same: the rows of all ranks, say, not of one"
        self._check_equal(value, "a factor", fix, 1e-12)
        return x

    def _check_equal(self, value: Tensor, subject: str, fix: str, tolerance: float) -> float:
        if planned():
            return 0.0
        with paused(), torch.no_grad():
            x = value.detach().double().view(1)
            low, high = self._ends(torch.where(x.isfinite(), x, math.inf))
        if _ranks_differ(low, high, high.abs().max(), tolerance):
            raise ValueError(
                f"{self.name}: {subject} is from {float(low):.6g} to {float(high):.6g} on the ranks: {fix}"
            )
        return float(high)

    def probe(self) -> tuple[float, float]:
        """Returns a checksum of the parameters, their sum with random signs, and their norm."""
        signs = [x.double() for x in self.random_vector("signs", 0, 0)]
        return float(self.dots([self.local_params], signs)[0]), self.norm([x.to(wide(x)) for x in self.local_params])

    def agree(self, name: str, **settings: Any) -> None:
        """Raises ValueError on every rank if settings differ between ranks."""
        lines = [f"{key}: {value!r}" for key, value in settings.items()]
        agree(
            lines, program_ranks(self.params), name, subject=("the arguments", "All ranks search alike: pass the same")
        )

    def _ends(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the minima and maxima over ranks, so that all ranks decide equally.

        Replicas sum by themselves, perhaps in another order.
        """
        high, low = numbers, -numbers
        meshes: dict[Any, Any] = {unit.layout.grid: None for unit in self.moving if unit.layout is not None}
        for context in [scope_of(grid, self.name) for grid in meshes] or [contextlib.nullcontext()]:
            with context:
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
        return 8 * max(torch.finfo(wide(x)).eps for x in self.local_params)

    def size(self) -> int:
        """The number of parameters that have a gradient."""
        ones = [torch.ones_like(x, dtype=torch.float64) for x in self.local_params]
        return round(float(self.dots([ones], ones)[0]))

    def _units(self, vector: Vector) -> Any:
        values = iter(vector)
        leaves = [u._replace(values=next(values)) if u.trainable else u for u in self.units.each]
        return self.units._replace(each=leaves)

    def random_vector(self, kind: Kind, seed: int, index: int) -> Vector:
        """Returns a random vector of standard normal numbers, or of 1 and -1.

        An element depends on the seed, the index, the parameter's path and its place there, but not on the mesh.
        """
        return [random(unit, kind, (kind, seed, index)) for unit in self.moving]


def _ranks_differ(low: Tensor, high: Tensor, scale: Tensor, tolerance: float = 1e-3) -> bool:
    """Whether ranks differ by more than rounding; never in a plan, which has no numbers."""
    return not planned() and bool((high - low > tolerance * scale).any())


def refuse_derivative(tensors: Sequence[Tensor], name: str) -> None:
    """Raises RuntimeError if a derivative with respect to these tensors may be taken."""
    followed = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if followed or functorch.inside_transform() or functorch.inside_forward_mode():
        raise RuntimeError(
            f"{name}: a derivative through a product would be wrong, as parameters and vectors are constants in it. "
            f"Detach them, or call it under torch.no_grad() outside of transforms; for derivatives write "
            f"sf.jvp(sf.grad(loss), ...)"
        )


@contextlib.contextmanager
def draws_restored(tensors: Sequence[Tensor]) -> Iterator[RandomNumbers]:
    """A context that restores torch's generators, also of these devices, and yields their state."""
    before = RandomNumbers(tensors)
    try:
        yield before
    finally:
        before.restore()


def _flat(tree: Any) -> tuple[list[Any], Any]:
    return optree.tree_flatten(tree, is_leaf=is_flat, none_is_leaf=True)


def _gradient_part(x: Tensor, layout: Layout | None) -> Tensor:
    """Returns this rank's part of a leaf whose gradient is sharded further than the parameter."""
    if layout is None or layout.state_layout is layout:
        return x.detach()
    start = start_of(layout, layout.state_layout)
    return x.detach()[start : start + layout.state_layout.piece]


def random(unit: Unit, kind: Kind, salt: tuple[Any, ...]) -> Tensor:
    """Random numbers for the elements of a leaf, in float32 or wider; zeros in padding."""
    out = torch.zeros_like(unit.values, dtype=wide(unit.values), memory_format=torch.contiguous_format)
    step = elements_at_a_time(out.device, CHUNK, 2**22)
    for part in unit.filled:
        for start in range(part.start, part.stop, step):
            stop = min(start + step, part.stop)
            places = _full_indices(part, start, stop, out.device)
            draws = random_bits_at(places, part.path, len(part.whole), 4 if kind == "normal" else 1, salt)
            bits = [x.double() for x in draws]
            if kind == "signs":
                numbers = 1 - 2 * (bits[0] % 2)
            else:  # Box and Muller (1958)
                radius = (-2 * ((bits[0] * 2**16 + bits[1] + 0.5) / 2**32).log()).sqrt()
                numbers = radius * (2 * math.pi * (bits[2] * 2**16 + bits[3]) / 2**32).cos()
            out.view(-1)[start:stop] = numbers
    return out


def _full_indices(part: Segment, start: int, stop: int, device: torch.device) -> Tensor:
    """Row-major indices in the full parameter of a range of a unit's elements."""
    indices = torch.arange(part.first + start - part.start, part.first + stop - part.start, device=device)
    if part.shape == part.whole:
        return indices
    places, step = torch.zeros_like(indices), 1
    for n, full_size, corner in reversed(list(zip(part.shape, part.whole, part.corner, strict=True))):
        places += (indices % n + corner) * step
        indices, step = indices // n, step * full_size
    return places


def add_(out: Vector, x: Vector, factor: float = 1.0) -> Vector:
    """Adds a multiple of a vector to another, in place."""
    for a, b in zip(out, x, strict=True):
        a.add_(b, alpha=factor)
    return out


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
    """Linear combinations of vectors by weights `[vectors, combinations]`, in place, some elements at a time."""
    for i in range(len(basis[0])):
        flat = [v[i].view(-1) for v in basis]
        step = elements_at_a_time(flat[0].device, CHUNK, 2**22)
        for start in range(0, len(flat[0]), step):
            part = torch.stack([x[start : start + step] for x in flat], 1).double() @ weights.to(flat[0].device)
            for x, new in zip(flat, part.unbind(1), strict=False):
                x[start : start + step] = new
    return basis[: weights.shape[1]]
