"""Gradients of functions of pytrees: exactly those of the loss as written, not averaged or reduced over ranks.

There are two engines with the same results: plain autograd, which keeps no graph for a second derivative unless
something outside needs one, and torch.func inside its own transforms.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.check import recording
from shardfn.collectives import functional
from shardfn.compat import autograd, dynamo, functorch
from shardfn.mesh.scope import current_axes, scope_of
from shardfn.shards.layout import FlatShard, Layout, is_flat, local_parameters
from shardfn.shards.partition import with_leaves
from shardfn.shards.parts import PARTS, note_gradients
from shardfn.tracebacks import api_boundary
from shardfn.transforms.modules import module_told
from shardfn.transforms.step import OutsideGradient, Step


def value_and_grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """A function that returns what `f` returns and its gradient.

    Args:
        f: returns a scalar (0-d, real, floating) or, with `has_aux`, a pair of a scalar and any pytree.
        argnums: which positional arguments to differentiate; a sequence gives a tuple of gradients.
        has_aux: `f` returns `(loss, aux)`, and the new function `((loss, aux), gradient)`.

    Returns:
        `(*args, **kwargs) -> (value, gradient)`. A gradient is a pytree like its argument, with zeros for a leaf that
        the loss does not use, and None for a leaf that is not a floating or complex tensor. Gradients are of this
        rank's loss with respect to this rank's values: every reduction over ranks is the transpose of a collective in
        `f`. Under torch.compile tensors that `f` closes over are constants: pass as an argument what is to be
        differentiated again.

    Raises:
        TypeError, ValueError: an argument number without an argument; a loss that is not a real scalar; a module
            that does not take these arguments.

    Example:
        >>> import torch
        >>> value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
        (tensor(5.), {'w': tensor([2., 4.])})
    """
    return differentiating(f, argnums, has_aux)


def differentiating(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, unread: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """`value_and_grad`; with `unread`, only the gradient's tangents are valid, not the gradient itself."""
    called = module_told("value_and_grad", f)

    @api_boundary
    @functools.wraps(f)
    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if torch.compiler.is_compiling():
            dynamo.trace_dicts()
        chosen = positions("value_and_grad", f, argnums, args)
        variables = Variables(tuple(args[i] for i in chosen))

        def loss(*values: Tensor) -> tuple[Tensor, Any]:
            return scalar(called(*with_leaves(args, chosen, variables.tree(values)), **kwargs), has_aux, name_of(f))

        traced = torch.compiler.is_compiling() or functorch.inside_transform()
        engine = _by_torch_func if traced else functools.partial(_by_autograd, unread=unread)
        recorder = None if torch.compiler.is_compiling() else recording.current()
        begin = 0 if recorder is None else len(recorder.trace.nodes)
        value, aux, gradients = engine(loss, variables.values, variables.layouts)
        if recorder is not None:
            recorder.differentiated(value, begin, zip(variables.values, gradients, strict=True))
        trees = variables.gradient(gradients)
        return (value, aux) if has_aux else value, trees[0] if isinstance(argnums, int) else trees

    return differentiated


def grad(f: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """A function that returns the gradient of `f`, as `jax.grad` does; `value_and_grad` without the value.

    Args:
        f: returns a scalar (0-d, real, floating) or, with `has_aux`, a pair of a scalar and any pytree.
        argnums: which positional arguments to differentiate; a sequence gives a tuple of gradients.
        has_aux: `f` returns `(loss, aux)`.

    Returns:
        `(*args, **kwargs) -> gradient`, or `(gradient, aux)` with `has_aux`. A gradient is a pytree like its argument,
        with leaves of the same shapes and dtypes; see `value_and_grad` for its meaning on a mesh.

    Raises:
        TypeError, ValueError: as `value_and_grad`.

    Example:
        >>> import torch
        >>> grad(lambda x: x**3)(torch.tensor(2.0))
        tensor(12.)
    """
    both = value_and_grad(f, argnums, has_aux=has_aux)

    @api_boundary
    @functools.wraps(f)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return differentiated


def positions(where: str, f: Callable[..., Any], argnums: int | Sequence[int], args: Sequence[Any]) -> list[int]:
    """The arguments to differentiate, counted from the first; raises TypeError or ValueError if one is not there."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise TypeError(
                f"{where}: argnums={argnums}, but {name_of(f)} was called with {len(args)} positional arguments "
                f"(arguments to differentiate are passed by position)"
            )
    chosen = [number % len(args) for number in numbers]
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"{where}: argnums={argnums} names an argument of {name_of(f)} twice")
    return chosen


def _by_torch_func(
    loss: Callable[..., Any], leaves: list[Tensor], layouts: list[Layout | None]
) -> tuple[Tensor, Any, Sequence[Tensor]]:
    """The loss, aux and gradients by torch.func."""
    if not leaves:
        return (*loss(), ())
    gradients, (value, aux) = torch.func.grad_and_value(loss, argnums=tuple(range(len(leaves))), has_aux=True)(*leaves)
    if not torch.compiler.is_compiling():
        # A stage's results have an autograd graph outside of all transforms, which shows what else the loss uses.
        reaches_others([functorch.unwrapped(x) for x in optree.tree_leaves((value, aux)) if isinstance(x, Tensor)], [])
    parts = [_divided(g, layout) for g, layout in zip(gradients, layouts, strict=True)]
    return value, aux, unshared(parts) if torch.compiler.is_compiling() else parts


@contextlib.contextmanager
def refusing_writes() -> Iterator[None]:
    """A context that replaces torch's error for a loss that writes into a differentiated parameter by a clearer one."""
    try:
        yield
    except RuntimeError as error:
        if "leaf Variable that requires grad" not in str(error):
            raise
        raise RuntimeError(
            "the loss writes into a parameter by which it is differentiated, at the line above. Compute a new tensor, "
            "such as p * 0.9 for p.mul_(0.9), and change parameters outside of the loss"
        ) from error


def _by_autograd(
    loss: Callable[..., Any], leaves: list[Tensor], layouts: list[Layout | None], unread: bool
) -> tuple[Tensor, Any, Sequence[Tensor]]:
    """The loss, aux and gradients by plain autograd."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("value_and_grad: torch.inference_mode() records no gradients; use torch.no_grad()")
    recording_outside = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, so that graphs outside and forward-mode tangents of the arguments stay connected.
        variables = [leaf.view_as(leaf) for leaf in leaves]
        for variable in variables:
            if not variable.requires_grad:
                variable.requires_grad_()
        with Step(variables, unread=unread) as step:
            with refusing_writes():
                value, aux = loss(*variables)
            reaches_outside = bool(recording_outside or step.schedules) and reaches_others((value, aux), variables)
            connected = any(leaf.requires_grad for leaf in leaves)
            # With a graph, stages communicate differently. So where stages ran, `keep` must not depend on references to
            # tensors, which may differ between ranks.
            is_held = connected or (reaches_outside and autograd.held_leaves(tensors_of((value, aux)), variables))
            keep = recording_outside and (is_held or (reaches_outside and bool(step.schedules)))
            if keep and step.pushed:
                raise OutsideGradient
            by_autograd: list[Tensor | None] = [None] * len(variables)
            step.graph = keep
            with step.differentiating([value]):
                if value.requires_grad and variables:
                    # Derivatives of torch's, as of a determinant, are right in forward mode only if a graph is made.
                    graph = keep or step.pushed
                    by_autograd = list(torch.autograd.grad(value, variables, create_graph=graph, allow_unused=True))
            collected = step.finish()
            follow(collected, variables, layouts)
        gradients = unshared(totals(by_autograd, collected, variables, layouts))
    if keep:
        for variable in variables:
            variable._shardfn_differentiated = True  # type: ignore[attr-defined]
    if step.pushed or (keep and not is_held):
        gradients = [detached(g) for g in gradients]
    if PARTS:
        note_gradients(leaves, variables, gradients)
    return (value, aux, gradients) if keep and is_held else (detached(value), optree.tree_map(detached, aux), gradients)


def follow_parts(recorder: recording.TraceRecorder, flat: Tensor, layout: Layout) -> None:
    """Reports to a checked call the parameters' ranges in a flat shard, or in its gradient."""
    number = {entry.path: k for k, entry in enumerate(layout.entries)}
    parts = local_parameters(FlatShard(flat, layout))
    recorder.values.stretches(
        flat, [(x, recorder.trace.mask(layout.cut_axes(number[path]))) for path, x in parts.items()]
    )


def follow(collected: dict[int, Tensor], variables: Sequence[Tensor], layouts: Sequence[Layout | None]) -> None:
    """Reports to a checked call the axes along which the gradients from stages vary."""
    recorder = recording.current()
    if recorder is None:
        return
    for variable, layout in zip(variables, layouts, strict=True):
        if layout is not None and id(variable) in collected:
            cut = {name for number in range(len(layout.entries)) for name in layout.cut_axes(number)}
            axes = (*layout.state_layout.placement.axes, *cut)
            gradient = collected[id(variable)]
            recorder.declared(gradient, recorder.trace.mask(axes), [variable], "gradient of a stage")
            follow_parts(recorder, gradient, layout.state_layout)


def totals(
    by_autograd: Sequence[Tensor | None],
    collected: dict[int, Tensor],
    variables: Sequence[Tensor],
    layouts: Sequence[Layout | None],
) -> list[Tensor]:
    """Gradients as sums of autograd's part and the part that stages passed to the step."""
    sums = []
    for g, variable, layout in zip(by_autograd, variables, layouts, strict=True):
        total = collected.get(id(variable))
        if total is None:
            total = _divided(torch.zeros_like(variable) if g is None else g, layout)
        elif g is not None:
            total = total + _divided(g, layout)
        sums.append(total)
    return sums


def _divided(gradient: Tensor, layout: Layout | None) -> Tensor:
    """This rank's part of a gradient that is sharded over more axes than its parameter; else the gradient."""
    if layout is None or not _divides(layout):
        return gradient
    has_axes = current_axes() is not None
    with contextlib.nullcontext() if has_axes else scope_of(layout.grid, f"the gradient of {layout.stage!r}"):
        return functional.local_slice(gradient, _divides(layout))


def _divides(layout: Layout) -> tuple[str, ...]:
    """The axes over which a gradient is sharded, but not its parameter; usually none."""
    return layout.placement.gradients[len(layout.placement.axes) :] if layout.state_layout is not layout else ()


class Variables:
    """The leaves of a tree that have a gradient, and the tree's structure.

    Attributes:
        values: these leaves.
        layouts: the layout of each; None if it is not in a flat shard.
    """

    def __init__(self, tree: Any) -> None:
        self._leaves, self._tree = optree.tree_flatten(tree)
        layouts = layouts_of(tree)
        self._at = [i for i, leaf in enumerate(self._leaves) if moves(leaf, layouts[i])]
        self.values: list[Tensor] = [self._leaves[i] for i in self._at]
        self.layouts = [layouts[i] for i in self._at]

    def tree(self, values: Sequence[Any]) -> Any:
        """The tree with `values` for the leaves that have a gradient."""
        return optree.tree_unflatten(self._tree, with_leaves(self._leaves, self._at, values))

    def tree_of(self, values: Sequence[Tensor]) -> Any:
        """The tree with `values` for the leaves that have a gradient, and None for all others."""
        return optree.tree_unflatten(self._tree, with_leaves([None] * len(self._leaves), self._at, values))

    def gradient(self, gradients: Sequence[Tensor]) -> Any:
        """A tree of gradients, None for the other leaves; flat shards get the layout of their gradient."""
        # A None leaf is not a node to optree, so the gradient keeps the argument's structure around it.
        tree = self.tree_of(gradients)
        if all(layout is None or layout.state_layout is layout for layout in self.layouts):
            return tree
        return optree.tree_map(
            lambda node: FlatShard(node.values, node.layout.state_layout) if is_flat(node) else node,
            tree,
            is_leaf=is_flat,
        )


def layouts_of(tree: Any) -> list[Layout | None]:
    """The layout of each leaf of a tree; None for leaves outside of flat shards."""
    nodes = [node for node in optree.tree_leaves(tree, is_leaf=is_flat) if not (is_flat(node) and node.values is None)]
    return [node.layout if is_flat(node) else None for node in nodes]


def moves(leaf: Any, layout: Layout | None = None) -> bool:
    """Whether a leaf has a gradient."""
    differentiable = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    return differentiable and (layout is None or layout.trainable)


def reaches_others(results: Any, variables: Sequence[Tensor]) -> bool:
    """Whether the loss or aux depends on further autograd leaves, over which the function closes.

    Variables of evaluations that have ended do not count: nothing outside can hold them.
    """
    if torch.compiler.is_compiling():
        return False
    variable_ids = {id(variable) for variable in variables}
    leaves = [leaf for leaf in autograd.leaves_of(tensors_of(results)) if id(leaf) not in variable_ids]
    return any(not hasattr(leaf, "_shardfn_differentiated") for leaf in leaves)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def unshared(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gradients without shared memory: autograd may return one tensor twice, or an expanded scalar."""
    if torch.compiler.is_compiling():  # memory is not known yet; the compiler removes copies that are not needed
        return [gradient.clone(memory_format=torch.contiguous_format) for gradient in gradients]
    storages: set[int] = set()
    unshared = []
    for gradient in gradients:
        if not gradient.is_contiguous() and 0 in gradient.stride():
            gradient = gradient.contiguous()
        elif autograd.storage_of(gradient) in storages:
            gradient = gradient.clone()
        storages.add(autograd.storage_of(gradient))
        unshared.append(gradient)
    return unshared


def scalar(result: Any, has_aux: bool, name: str) -> tuple[Tensor, Any]:
    """The loss and aux that a function returned; raises TypeError or ValueError if they are something else."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        kind = type(result).__name__
        raise TypeError(f"with has_aux=True {name}, which is differentiated, must return (loss, aux), got {kind}")
    value, aux = result if has_aux else (result, ())
    if not isinstance(value, Tensor):
        hint = "; for (loss, aux) pass has_aux=True" if isinstance(value, tuple) else ""
        raise TypeError(f"{name}, which is differentiated, must return a tensor, got {type(value).__name__}{hint}")
    if value.ndim or not value.is_floating_point():
        raise ValueError(
            f"{name}, which is differentiated, must return a 0-d, real, floating tensor, got shape "
            f"{tuple(value.shape)}, {value.dtype}: reduce it, for example with .sum() or .mean()"
        )
    return value, aux


def detached(leaf: Any) -> Any:
    """A leaf without its graph; keeps its tangent in forward mode, which `detach` alone would drop."""
    if not isinstance(leaf, Tensor):
        return leaf
    primal, tangent = functorch.unpacked(leaf)
    return primal.detach() if tangent is None else functorch.dual(primal.detach(), tangent.detach())


def name_of(f: Callable[..., Any]) -> str:
    """A function's name in messages."""
    return getattr(f, "__name__", type(f).__name__)
