"""What there is to know of a torch op before it runs: what it reads, what it writes, where its values begin."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["made", "like", "empty", "copy", "each", "plain"]

_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_")
_LIKE = ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
         "new_zeros", "new_ones", "new_full")  # fmt: skip
_OVERWRITE = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "geometric_",
              "log_normal_", "cauchy_", "random_", "set_")  # fmt: skip
_DETACH = ("detach", "detach_", "_local_scalar_dense", "argmax", "argmin")
_SIZES = ("size", "sizes", "input_sizes", "self_sizes", "normalized_shape", "stride", "output_size", "implicit")
_STATISTICS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm",
               "_batch_norm_with_update", "batch_norm_with_update", "_batch_norm_impl_index")  # fmt: skip
_DRAWN = {"native_dropout": 1, "_scaled_dot_product_flash_attention": 6, "_scaled_dot_product_cudnn_attention": 6,
          "_scaled_dot_product_efficient_attention": 2}  # fmt: skip
DISTRIBUTIONS = ("multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet")


@dataclass(frozen=True)
class Facts:
    """Of one op.

    Attributes:
        base: as in `aten.mul.Tensor`, without the library and the overload.
        digest: the same on every rank.
        kind: `"made"`: of no tensor; `"like"`: of a tensor's shape alone; `"empty"`: with no value yet;
            `"copy"`: replaces what it writes to; `"each"`: item by item of several lists.
        random: whether it draws.
        drawn: which of its results is what it drew, or the seed of that; None where all are.
        distributed: whether it draws each number from a distribution of its own, which a tensor says.
        chance: position of the argument without which it draws nothing.
        writes: positions and names of the arguments that it writes to.
        out: those of them that it does not read, `out=`.
        sizes: positions and names of those that are only a shape.
        detaches: whether its result is not differentiated.
        reduction: position of the argument that says whether a loss is a mean or a sum, if it has one.
        dims: position of the argument that says along which dimensions it goes, and what that is if it is not given.
        statistics: whether it normalises by a batch's statistics, where it is told to train.
    """

    base: str
    digest: int
    kind: Kind
    random: bool
    drawn: int | None
    distributed: bool
    chance: int | None
    writes: tuple[int | str, ...]
    out: tuple[str, ...]
    sizes: frozenset[int | str]
    detaches: bool
    reduction: int | None
    dims: tuple[int, Any] | None
    statistics: bool


@functools.cache
def facts_of(op: Any) -> Facts:
    """What is known of an op."""
    schema = getattr(op, "_schema", None)
    name = str(getattr(op, "name", lambda: str(op))()).split("::")[-1] if schema is not None else str(op)
    base = name.split(".")[0]
    arguments = [] if schema is None else schema.arguments
    writes, sizes = [], []
    reduction = chance = dims = None
    for i, argument in enumerate(arguments):
        place = argument.name if argument.kwarg_only else i
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(place)
        if argument.name == "reduction":
            reduction = i
        if argument.name == "dim":
            dims = (i, argument.default_value)
        if argument.name == "dropout_p" or (argument.name == "p" and base == "native_dropout"):
            chance = i
        if argument.name in _SIZES:
            sizes.append(place)
    takes = schema is None or any("Tensor" in str(argument.type) for argument in arguments)
    random = schema is not None and torch.Tag.nondeterministic_seeded in op.tags
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
    kind: Kind = "plain"
    lists = any("List[Tensor]" in str(argument.type) for argument in arguments)
    if lists and base.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        kind = "each"
    elif base in _EMPTY:
        kind = "empty"
    elif base in _LIKE:
        kind = "like"
    elif base in _OVERWRITE:
        kind = "copy"
    elif not takes:
        kind = "made"
    return Facts(
        base, digest, kind, random, _DRAWN.get(base), base in DISTRIBUTIONS, chance, tuple(writes),
        tuple(place for place in writes if isinstance(place, str)), frozenset(() if kind == "made" else sizes),
        base in _DETACH, reduction, dims, base in _STATISTICS,
    )  # fmt: skip
