"""Parameters from functions that draw them: whole on one process, or made one stage at a time and cut at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor

from shardfn.mesh.selectors import Which
from shardfn.mesh.spec import P, dotted, joined
from shardfn.quant.packed import is_packed, pack
from shardfn.quoting import short_errors
from shardfn.shards.placement import Strategy
from shardfn.shards.random import Drawing, int_seed, mixed
from shardfn.shards.sharding import Rules, Specs, agreed, refuse_second, refuse_sparse

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Make = Callable[[torch.Generator], Any]
Fill = Callable[[str, Tensor, torch.Generator], Tensor]


@short_errors
def init(makers: Any, seed: int, *, fill: Fill | None = None) -> Any:
    """Whole parameters from a tree of makers; on one process the same as `init_sharded` gives on many.

    Args:
        makers: a pytree whose leaves are functions of a `torch.Generator` that return tensors or pytrees of them, and
            tensors.
        seed: any int. Each maker draws from a generator of its own, folded from the seed and the maker's path, also
            where it names none; torch's own generators are left as they are.
        fill: `(path, tensor, generator) -> tensor`, for leaves on the meta device: a tensor of the same shape and
            dtype, with values. For a `quant.Packed` it is asked for the parameter, which is then encoded.

    Returns:
        The tree with what each maker returned in its place, on whatever devices they chose.

    Raises:
        RuntimeError: a maker that seeds torch's own generators.
        TypeError: a leaf that is neither a tensor nor a function; a seed that is not an int; what `fill` returned is
            no tensor, or one of another dtype.
        ValueError: it is of another shape.

    Example:
        >>> import torch
        >>> params = init({"w": lambda generator: torch.randn(2, 3, generator=generator)}, seed=0)
        >>> params["w"].shape
        torch.Size([2, 3])
    """
    return _made(makers, "", seed, fill)


@short_errors
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
    """Parameters made one stage at a time and cut at once, so that a rank never holds more than one stage whole.

    The same seed gives the same parameters on any mesh, and as `init(makers, seed)`.

    Args:
        makers: as for `init`: `{"embed": init_embed, "blocks": [init_block] * 8, "head": init_head}`. A function
            that makes several stages makes them whole: give each stage its own.
        seed: any int, the same on every rank.
        mesh: as for `shard`, like what follows.
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
        lambda: rules.map_stages(makers, rules.cut, lambda path, node: _made(node, path, seed, fill)),
    )


def _made(makers: Any, path: str, seed: int, fill: Fill | None) -> Any:
    """The tensors of a tree of makers that stands at `path`."""
    accessors, leaves, tree = optree.tree_flatten_with_accessor(makers, is_leaf=is_packed)
    made: list[Any] = []
    seen: set[str] = set()
    for accessor, leaf in zip(accessors, leaves, strict=True):
        name = joined(path, dotted(accessor))
        refuse_second(name, seen)
        seen.add(name)
        if isinstance(leaf, Tensor):
            refuse_sparse(name, leaf)
            made.append(_filled(fill, name, leaf, seed) if fill and leaf.is_meta else leaf)
        elif is_packed(leaf):
            if fill and leaf.is_meta:  # in few bits, from the values that `fill` gives it
                like = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
                leaf = pack(_filled(fill, name, like, seed), leaf.format)
            made.append(leaf)
        elif callable(leaf):
            made.append(_made(_drawn(leaf, name, seed), name, seed, fill))
        else:
            raise TypeError(
                f"{name or 'the tree'} is of type {type(leaf).__name__}; a maker is a function of a torch.Generator "
                f"that returns tensors, or a tensor"
            )
    return optree.tree_unflatten(tree, made)


def _filled(fill: Fill, name: str, like: Tensor, seed: int) -> Tensor:
    made: Any = _drawn(functools.partial(fill, name, like), name, seed)
    if not isinstance(made, Tensor) or made.dtype != like.dtype:
        what = f"of {made.dtype}" if isinstance(made, Tensor) else f"of type {type(made).__name__}"
        raise TypeError(f"fill returned {what} for {name}, which is a tensor of {like.dtype}")
    if made.shape != like.shape:
        raise ValueError(f"fill returned shape {list(made.shape)} for {name}, which has {list(like.shape)}")
    return made


def _drawn(make: Make, path: str, seed: int) -> Any:
    """What a maker makes at a path; where it draws without a generator, too, it is from the one that it is given."""
    generator = torch.Generator().manual_seed(mixed(int_seed(seed), path))
    with Drawing(generator, f"the maker of {path or 'the tree'}"):
        return make(generator)
