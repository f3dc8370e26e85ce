"""Initializes parameters from functions that draw them: unsharded on one process, or one stage at a time, sharded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from shardfn.mesh.planned import planned
from shardfn.mesh.selectors import Which
from shardfn.mesh.spec import P, dotted, joined
from shardfn.quant.packed import is_packed, pack
from shardfn.shards.placement import Strategy
from shardfn.shards.random import DrawContext, int_seed, mixed
from shardfn.shards.sharding import Rules, Specs, agreed, refuse_second, refuse_sparse
from shardfn.tracebacks import api_boundary

Make = Callable[[torch.Generator], Any]
Fill = Callable[[str, Tensor, torch.Generator], Tensor]


@api_boundary
def init(makers: Any, seed: int, *, fill: Fill | None = None) -> Any:
    """The full parameters from a tree of makers, equal to those that `init_sharded` makes on any mesh.

    Args:
        makers: a pytree whose leaves are tensors, and functions of a `torch.Generator` that return tensors or pytrees
            of tensors.
        seed: any int. Each maker draws from its own generator, seeded from the seed and the maker's path, even where it
            passes no generator to torch; torch's default generators stay unchanged.
        fill: `(path, tensor, generator) -> tensor`, for leaves on the meta device: returns a tensor of the same shape
            and dtype, with values. For a `quant.Packed` it gets the parameter, which is then quantized.

    Returns:
        The tree with each maker's result in its place, on the devices that the makers chose.

    Raises:
        RuntimeError: a maker seeds torch's own generators.
        TypeError: a leaf is neither a tensor nor a function; the seed is not an int; `fill` returned no tensor, or one
            of a different dtype.
        ValueError: `fill` returned a tensor of a different shape.

    Example:
        >>> import torch
        >>> params = init({"w": lambda generator: torch.randn(2, 3, generator=generator)}, seed=0)
        >>> params["w"].shape
        torch.Size([2, 3])
    """
    return _init_tensors(makers, "", seed, fill)


@api_boundary
def init_sharded(
    makers: Any,
    seed: int,
    mesh: DeviceMesh,
    strategy: Strategy,
    *,
    fill: Fill | None = None,
    stages: Which | None = None,
    frozen: Which = (),
    specs: Specs = P(),  # noqa: B008
) -> Any:
    """Parameters made and sharded one stage at a time, so that a rank holds at most one full stage.

    The same seed gives the same parameters on any mesh, and as `init(makers, seed)`.

    Args:
        makers: as for `init`: `{"embed": init_embed, "blocks": [init_block] * 8, "head": init_head}`. A function that
            makes several stages makes them unsharded: give each stage its own function.
        seed: any int, the same on every rank.
        mesh: as for `shard`, like the arguments that follow.
        strategy: as for `shard`.
        fill: `(path, tensor, generator) -> tensor`, for leaves on the meta device.
        stages: as for `shard`.
        frozen: as for `shard`.
        specs: as for `shard`.

    Returns:
        As `shard(init(makers, seed), mesh, strategy)`.

    Raises:
        ValueError, TypeError, RuntimeError: as `shard` and `init`; a leaf on the meta device without `fill`.

    Example:
        ``params = init_sharded({"blocks": [init_block] * 8}, 0, mesh, full_shard("shard"))``
    """
    rules = Rules(mesh, strategy, stages, frozen, specs, "global")
    return agreed(
        rules,
        "init_sharded",
        lambda: rules.map_stages(makers, rules.cut, lambda path, node: _init_tensors(node, path, seed, fill)),
    )


def _init_tensors(makers: Any, path: str, seed: int, fill: Fill | None) -> Any:
    """The tensors from a tree of makers at `path`."""
    accessors, leaves, tree = optree.tree_flatten_with_accessor(makers, is_leaf=is_packed)
    tensors: list[Any] = []
    names: set[str] = set()
    for accessor, leaf in zip(accessors, leaves, strict=True):
        name = joined(path, dotted(accessor))
        refuse_second(name, names)
        names.add(name)
        if isinstance(leaf, Tensor):
            refuse_sparse(name, leaf)
            tensors.append(_checked_fill(fill, name, leaf, seed) if fill and leaf.is_meta else leaf)
        elif is_packed(leaf):
            if fill and leaf.is_meta:  # `fill` makes the parameter itself, which is then quantized
                template = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
                leaf = pack(_checked_fill(fill, name, template, seed), leaf.format)
            tensors.append(leaf)
        elif callable(leaf):
            tensors.append(_init_tensors(_init_tensor(leaf, name, seed), name, seed, fill))
        else:
            raise TypeError(
                f"{name or 'the tree'} is of type {type(leaf).__name__}; a maker is a function of a torch.Generator "
                f"that returns tensors, or a tensor"
            )
    return optree.tree_unflatten(tree, tensors)


def _checked_fill(fill: Fill, name: str, template: Tensor, seed: int) -> Tensor:
    """The values that `fill` returns for a leaf, with their dtype and shape checked."""
    tensor: Any = _init_tensor(functools.partial(fill, name, template), name, seed)
    if not isinstance(tensor, Tensor) or tensor.dtype != template.dtype:
        description = f"of {tensor.dtype}" if isinstance(tensor, Tensor) else f"of type {type(tensor).__name__}"
        raise TypeError(f"fill returned {description} for {name}, which is a tensor of {template.dtype}")
    if tensor.shape != template.shape:
        raise ValueError(f"fill returned shape {list(tensor.shape)} for {name}, which has {list(template.shape)}")
    return tensor


def _init_tensor(make: Make, path: str, seed: int) -> Any:
    """A maker's result at a path; draws without a generator come from the generator that it is given."""
    if planned():
        return drawn_hollow(make, path or "the tree", "init_sharded")
    generator = torch.Generator().manual_seed(mixed(int_seed(seed), path))
    with DrawContext(generator, f"the maker of {path or 'the tree'}"):
        return make(generator)


class _Shapes(TorchFunctionMode):
    """A mode that puts new tensors on the meta device, without data; random ops there ignore generators."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = {name: value for name, value in (kwargs or {}).items() if name != "generator"}
        if arguments.get("device") is not None:
            arguments["device"] = "meta"
        return func(*args, **arguments)


def drawn_hollow(make: Callable[[torch.Generator], Any], path: str, caller: str) -> Any:
    """A maker's result on the device meta: tensors without data.

    Raises:
        ValueError: the maker reads data.
    """
    try:
        with torch.device("meta"), _Shapes():
            return make(torch.Generator())
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"{caller}: the maker of {path} cannot run without numbers ({str(error).partition(chr(10))[0]}): pass "
            f"tensors of the shapes and dtypes that it makes, torch.empty(..., device='meta')"
        ) from error
