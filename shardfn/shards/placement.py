"""Placements: the axes over which parameters, gradients and optimizer state are sharded, and their memory tiers.

A strategy is a `Placement`, or a function that returns one for each parameter. The functions here return the placements
that have names, such as `full_shard`; users may write their own. `from_name` takes the names of other libraries.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, ParamSpec

from shardfn.mesh.grid import AxisName, as_names
from shardfn.quant.formats import Format, check_format, int4, int8
from shardfn.quoting import listed, short

_Axes = ParamSpec("_Axes")
Reshard = bool | Literal["step"] | tuple[str, ...]
Keep = bool | Literal["step"] | tuple[str, ...]


Tier = Literal["device", "host", "disk"]


class Tiers(NamedTuple):
    """The memory tiers of parameters, gradients and optimizer state: the device, its host's memory, or disk."""

    params: Tier = "device"
    grads: Tier = "device"
    state: Tier = "device"


@dataclass(frozen=True, init=False)
class Placement:
    """The sharding of a buffer of parameters, its gradient and its optimizer state over a mesh.

    Attributes:
        axes: axes over which parameters are sharded into equal pieces, major to minor. Default: none, parameters are
            unsharded.
        replicas: axes over which parameters are replicated and ranks work on different data: gradients are summed over
            them.
        reshard: when gathered parameters are freed. True: after forward, and backward gathers again; False: after
            backward; `"step"`: after the step, with all its micro-batches; some axes, the first of `axes`: after
            forward, except a copy that is sharded over these axes only, from which backward gathers.
        gradients: axes over which the gradients of `value_and_grad` *and the optimizer state* are sharded: `axes`
            first, then some of `replicas`. Default: `axes`.
        hierarchical: whether to gather one axis after another, starting with the last, with the slowest links.
        only_at: positions of axes; only ranks there hold the parameters, such as `(("pipe", 1),)`; see `only_on`.
        gather_format: format in which floating-point parameters are sent, such as `quant.int8()`; see `stage`.
        reduce_format: format in which their gradients are sent.
        tiers: where parameters, gradients and optimizer state are kept; see `with_tiers`.
        exact: the number of parts of a batch whose sums have the same bits on any mesh; 0 if not; see `with_exact`.

    Raises:
        ValueError: an axis twice; `gradients` or `reshard` that do not fit `axes`; quantized messages with `exact`.

    Example:
        >>> Placement(axes=("shard",), replicas=("replica",)) == hybrid_shard(shard="shard", replica="replica")
        True
    """

    axes: tuple[str, ...]
    replicas: tuple[str, ...]
    reshard: Reshard
    gradients: tuple[str, ...]
    hierarchical: bool
    only_at: tuple[tuple[str, int], ...]
    gather_format: Format | None
    reduce_format: Format | None
    tiers: Tiers
    exact: int

    def __init__(
        self,
        axes: AxisName = (),
        replicas: AxisName = (),
        *,
        reshard: Reshard = True,
        gradients: AxisName | None = None,
        hierarchical: bool = False,
        only_at: tuple[tuple[str, int], ...] = (),
        gather_format: Format | None = None,
        reduce_format: Format | None = None,
        tiers: Tiers = Tiers(),  # noqa: B008
        exact: int = 0,
    ) -> None:
        for name, value in {
            "axes": _names("axes", axes),
            "replicas": _names("replicas", replicas),
            "reshard": reshard,
            "gradients": _names("gradients", axes if gradients is None else gradients),
            "hierarchical": bool(hierarchical),
            "only_at": tuple(only_at),
            "gather_format": gather_format,
            "reduce_format": reduce_format,
            "tiers": Tiers(*tiers),
            "exact": exact,
        }.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        names = (*self.axes, *self.replicas, *self.only_at_axes)
        for name in ("gather_format", "reduce_format"):
            check_format(getattr(self, name), f"a strategy's {name}")
        if self.exact and (self.reduce_format or self.gather_format) is not None:
            raise ValueError(
                "a strategy has exact parts and a gather_format or reduce_format: quantized messages give other bits "
                "on another number of ranks. Leave one of them out"
            )
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(
                f"a strategy names the axis {twice[0]!r} twice: axes={self.axes}, replicas={self.replicas}"
                + (f", only_at={dict(self.only_at)}" if self.only_at else "")
            )
        for kind, tier in self.tiers._asdict().items():
            if tier not in ("device", "host", "disk"):
                raise ValueError(f'a strategy has {kind}={tier!r}; a tier is "device", "host" or "disk"')
        first, rest = self.gradients[: len(self.axes)], self.gradients[len(self.axes) :]
        if first != self.axes or not set(rest) <= set(self.replicas) or len(set(rest)) < len(rest):
            raise ValueError(
                f"a strategy with axes={self.axes} and replicas={self.replicas} has gradients={self.gradients}: they "
                f"must be the axes, in this order, and then some replicas"
            )
        kept_axes = self.reshard if isinstance(self.reshard, tuple) else self.axes
        if kept_axes != self.axes[: len(kept_axes)] or self.reshard not in (True, False, "step", kept_axes):
            raise ValueError(
                f'reshard is True, False, "step", or the first of axes={self.axes}, not reshard={self.reshard!r}'
            )

    @property
    def keep(self) -> Keep:
        """The gathered parameters kept for backward: none, all, or the axes over which the kept copy is sharded."""
        return keep_of(self.reshard)

    def with_reshard(self, reshard: Reshard) -> Placement:
        """The same with a different `reshard`: `full_shard("shard").with_reshard("step")` gathers once for a step."""
        return replace(self, reshard=reshard)

    @property
    def of_state(self) -> Placement:
        """Placement of gradients and optimizer state."""
        if self.gradients == self.axes:
            return self
        replicas = tuple(name for name in self.replicas if name not in self.gradients)
        return Placement(
            self.gradients,
            replicas,
            only_at=self.only_at,
            gather_format=self.gather_format,
            reduce_format=self.reduce_format,
            tiers=self.tiers,
            exact=self.exact,
        )

    def only_on(self, **positions: int) -> Placement:
        """The same, but only on the ranks at these positions: `full_shard("shard").only_on(pipe=1)`.

        Ranks at other positions hold none of the parameters, and do not call their stage. So every rank of a pipelined
        model has the same tree, with the same names and shapes.
        """
        return replace(self, only_at=(*self.only_at, *positions.items()))

    def with_tiers(
        self, *, params: Tier | None = None, grads: Tier | None = None, state: Tier | None = None
    ) -> Placement:
        """The same on other memory tiers than the device: `full_shard("shard").with_tiers(params="host")`.

        Args:
            params: where a rank's pieces of parameters are: `"device"`; `"host"`, the memory of the host; or `"disk"`,
                a file in the folder that `make_mesh(..., scratch=...)` names. Gathers read them from there.
            grads: where gradients go as backward computes them.
            state: where the optimizer's state is; a step streams it through memory, a range at a time.

        Tiers that are left out stay unchanged. On a CPU mesh the host is the device, so `"host"` changes nothing.

        Raises:
            ValueError: there is no such tier.
        """
        tiers = {"params": params, "grads": grads, "state": state}
        return replace(self, tiers=self.tiers._replace(**{k: v for k, v in tiers.items() if v is not None}))

    def with_exact(self, parts: int) -> Placement:
        """The same bits on any mesh: `full_shard("shard").with_exact(8)` for up to 8 ranks.

        A batch is then that many parts of consecutive rows, each a function of its own rows. What crosses parts, such
        as gradients, losses and norms, is added by one tree of additions, which does not depend on the number of ranks.
        `accumulate(f, batch, micro="exact")` computes such gradients.

        Args:
            parts: a power of two, for numbers of ranks that are powers of two and at most as large; or three times a
                power of two, for one rank, and for such numbers of ranks; 0 for none.

        Returns:
            The placement. Its buffers are padded to so many pieces of multiples of 1 KiB.

        Raises:
            TypeError, ValueError: another number; `shard` also raises for a mesh that it does not fit.

        Example:
            >>> hybrid_shard(shard="shard", replica="replica").with_exact(8).exact
            8
        """
        _check_exact(parts)
        return replace(self, exact=parts)

    def without(self, names: Collection[str]) -> Placement:
        """The same, without these axes among replicas and gradients."""
        replicas, gradients = (tuple(n for n in axes if n not in names) for axes in (self.replicas, self.gradients))
        return replace(self, replicas=replicas, gradients=gradients)

    @property
    def only_at_axes(self) -> tuple[str, ...]:
        """Axes along which only one position holds the parameters."""
        return tuple(name for name, _ in self.only_at)

    def dividing(self, axis: AxisName) -> Placement:
        """The same, with gradients and optimizer state sharded over more of the replica axes."""
        more = [name for name in as_names(axis) if name not in self.gradients]
        return replace(self, gradients=(*self.gradients, *more))

    @property
    def secondary(self) -> Placement | None:
        """Placement of the copy that backward gathers from; None if `reshard` keeps no such copy."""
        if not isinstance(self.reshard, tuple):
            return None
        rest = self.replicas + self.axes[len(self.reshard) :]
        return Placement(self.reshard, rest, gradients=self.axes, only_at=self.only_at, exact=self.exact)


def _check_exact(parts: Any) -> None:
    """Raises TypeError or ValueError unless it is a power of two, three times one, or 0."""
    if isinstance(parts, bool) or not isinstance(parts, int):
        raise TypeError(f"with_exact: parts must be an integer, got {short(repr(parts), 80)}")
    if parts < 0 or (parts and not any(parts % n == 0 and (parts // n).bit_count() == 1 for n in (1, 3))):
        raise ValueError(f"with_exact: parts must be a power of two, or three times one, such as 8 or 12, got {parts}")


def _names(kind: str, axis: AxisName) -> tuple[str, ...]:
    if not isinstance(axis, (str, tuple)) or not all(isinstance(name, str) for name in axis):
        raise TypeError(f"a strategy's {kind} must be a mesh axis name or a tuple of names, got {axis!r}")
    return as_names(axis)


def keep_of(reshard: Reshard) -> Keep:
    """The `keep` that corresponds to a `reshard`."""
    return not reshard if isinstance(reshard, bool) else reshard


def _keywords_only(make: Callable[_Axes, Placement]) -> Callable[_Axes, Placement]:
    """Wraps a strategy so that axes passed by position raise TypeError, as their order could mean either."""

    @functools.wraps(make)
    def named(*axes: _Axes.args, **axes_by_name: _Axes.kwargs) -> Placement:
        if axes:
            first, second = (*map(repr, axes), *('"shard"', '"replica"')[len(axes) :])[:2]
            raise TypeError(
                f"{make.__name__}({listed(map(repr, axes))}): name the axis that shards and the axis that "
                f"replicates: write {make.__name__}(shard={first}, replica={second}), or the other way round"
            )
        return make(*axes, **axes_by_name)

    return named


Strategy = Placement | Callable[[str, tuple[int, ...]], Placement]
"""A placement for all parameters, or a function from a parameter's path and full shape to a placement."""


def ddp(axis: AxisName) -> Placement:
    """Replicates parameters, gradients and optimizer state over `axis` (DDP, NO_SHARD, ZeRO stage 0).

    Args:
        axis: the mesh axes along which ranks work on different data, a name or a tuple of names.

    Returns:
        The placement, for `shard`. A step all-reduces the gradient of each stage, and gathers nothing.

    Source:
        Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.

    Example:
        >>> ddp("data").replicas, ddp("data").gradients
        (('data',), ())
    """
    return Placement(replicas=as_names(axis))


def zero1(axis: AxisName) -> Placement:
    """Replicates parameters, and shards optimizer state over `axis` (ZeRO stage 1, distributed optimizer).

    ZeRO-1 allows unsharded gradients; shardfn never needs them, so this is the same placement as `zero2`.

    Args:
        axis: the mesh axes along which ranks work on different data.

    Returns:
        The placement, for `shard`. A step reduce-scatters the gradient of each stage; the optimizer updates `1/n` of
        the parameters and all-gathers them. Forward and backward gather nothing.

    Source:
        Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.

    Example:
        >>> zero1("data") == zero2("data")
        True
    """
    return zero2(axis)


def zero2(axis: AxisName) -> Placement:
    """Replicates parameters, and shards gradients and optimizer state over `axis` (DeepSpeed's stage 2).

    Nothing is gathered while micro-batches accumulate. PyTorch's SHARD_GRAD_OP, which also shards parameters, is
    `shard_grad_op`.

    Args:
        axis: the mesh axes along which ranks work on different data.

    Returns:
        The placement, for `shard`; it communicates as `zero1` does.

    Source:
        Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.

    Example:
        >>> zero2("data").axes, zero2("data").gradients
        ((), ('data',))
    """
    return Placement(replicas=as_names(axis), gradients=as_names(axis))


def shard_grad_op(axis: AxisName) -> Placement:
    """As `full_shard`, but gathered parameters are kept for backward (PyTorch's SHARD_GRAD_OP).

    Args:
        axis: the mesh axes over which parameters, gradients and optimizer state are sharded.

    Returns:
        The placement, for `shard`. A step all-gathers the parameters of each stage once, in forward; by the end of
        forward a rank holds all of them.

    Source:
        Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.

    Example:
        >>> shard_grad_op("data") == full_shard("data").with_reshard(False)
        True
    """
    return Placement(axes=as_names(axis), reshard=False)


def full_shard(axis: AxisName) -> Placement:
    """Shards parameters, gradients and optimizer state over `axis` (FSDP's FULL_SHARD, ZeRO stage 3).

    Args:
        axis: the mesh axes over which they are sharded, a name or a tuple of names, major to minor.

    Returns:
        The placement, for `shard`. The parameters of a stage are all-gathered for its forward, freed, and all-gathered
        again for its backward, which reduce-scatters their gradient.

    Source:
        Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.

    Example:
        >>> full_shard(("replica", "shard")).axes
        ('replica', 'shard')
    """
    return Placement(axes=as_names(axis))


@_keywords_only
def hybrid_shard(*, shard: AxisName, replica: AxisName) -> Placement:
    """Shards as `full_shard` over `shard`, and replicates over `replica` (FSDP's HYBRID_SHARD, HSDP).

    Args:
        shard: the axes over which parameters are sharded, with fast links, such as those within a node.
        replica: the axes along which these groups are replicated.

    Returns:
        The placement, for `shard`. Gathers stay within `shard`; gradients are reduce-scattered there, and all-reduced
        over `replica`.

    Source:
        Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.

    Example:
        >>> hybrid_shard(shard="shard", replica="replica").replicas
        ('replica',)
    """
    return Placement(axes=as_names(shard), replicas=as_names(replica))


@_keywords_only
def hybrid_shard_zero2(*, shard: AxisName, replica: AxisName) -> Placement:
    """As `hybrid_shard`, but gathered parameters are kept for backward (FSDP's _HYBRID_SHARD_ZERO2).

    Args:
        shard: the axes over which parameters are sharded.
        replica: the axes along which these groups are replicated.

    Returns:
        The placement, for `shard`: `hybrid_shard(shard=shard, replica=replica).with_reshard(False)`.

    Example:
        >>> hybrid_shard_zero2(shard="shard", replica="replica").reshard
        False
    """
    return hybrid_shard(shard=shard, replica=replica).with_reshard(False)


@_keywords_only
def hfsdp(*, shard: AxisName, replica: AxisName) -> Placement:
    """As `hybrid_shard`, with gradients and optimizer state also sharded over `replica` (Megatron's hybrid FSDP).

    Args:
        shard: the axes over which parameters are sharded.
        replica: the axes over which gradients and optimizer state are also sharded.

    Returns:
        The placement, for `shard`. Gradients are reduce-scattered over `shard`, then over `replica`; an optimizer's
        step all-gathers parameters over `replica`.

    Example:
        >>> hfsdp(shard="shard", replica="replica").gradients
        ('shard', 'replica')
    """
    shard, replica = as_names(shard), as_names(replica)
    return Placement(axes=shard, replicas=replica, gradients=shard + replica)


@_keywords_only
def hpz(*, shard: AxisName, replica: AxisName) -> Placement:
    """As `full_shard` over both axes; backward gathers over `shard` alone, from a kept copy (ZeRO++'s hpZ).

    Args:
        shard: the axes with fast links, over which the copy that forward keeps is sharded.
        replica: the other axes.

    Returns:
        The placement, for `shard`. Forward gathers over both, backward within `shard`; from forward to backward a
        rank holds a copy of the parameters divided by the size of `shard`.

    Source:
        Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023: one of its
        three parts; `zeropp` is all of them.

    Example:
        >>> hpz(shard="shard", replica="replica").reshard
        ('shard',)
    """
    shard, replica = as_names(shard), as_names(replica)
    return Placement(axes=shard + replica, reshard=shard)


@_keywords_only
def zeropp(
    *, shard: AxisName, replica: AxisName, gather_format: Format | None = None, reduce_format: Format | None = None
) -> Placement:
    """As `hpz`, with quantized communication (ZeRO++): parameters in 8 bits, gradients in 4.

    Parameters are rounded when forward gathers them, and backward computes with the same numbers. Gradients are summed
    over `shard` first, so that less of them crosses `replica`, and rounded before each sum. The optimizer updates
    parameters in full precision.

    Args:
        shard: the axes with fast links.
        replica: the other axes.
        gather_format: format of parameters. Default: `quant.int8(256)`, 1.02 bytes each (qwZ).
        reduce_format: format of gradients. Default: `quant.int4(64)`, 0.56 bytes each (qgZ).

    Returns:
        The placement, for `shard`.

    Source:
        Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023.

    Example:
        >>> zeropp(shard="shard", replica="replica").reduce_format
        Format(name='int4', block=64, double=False)
    """
    return replace(
        hpz(shard=shard, replica=replica),
        gather_format=gather_format or int8(256),
        reduce_format=reduce_format or int4(64),
    )


def mics(shard: AxisName, *, replica: AxisName = ()) -> Placement:
    """As `hybrid_shard`, where `shard` is several axes that are gathered one after another (MiCS).

    Args:
        shard: the axes over which parameters are sharded, fast links first: `("gpu", "node")` gathers small pieces over
            nodes first, then within each node.
        replica: the axes along which these groups are replicated.

    Returns:
        The placement, for `shard`.

    Source:
        Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud", 2022.

    Example:
        >>> mics(("gpu", "node")).hierarchical
        True
    """
    return Placement(axes=as_names(shard), replicas=as_names(replica), hierarchical=True)


def replicate_small(strategy: Strategy, below: int) -> Callable[[str, tuple[int, ...]], Placement]:
    """A strategy that replicates parameters of fewer than `below` elements on every rank, as `ddp` does.

    In each stage they form a separate buffer, which is never gathered, and whose gradient is all-reduced.

    Args:
        strategy: for the other parameters: a placement, or a function of a parameter's path and full shape.
        below: a number of elements of the full parameter.

    Returns:
        A strategy, for `shard`.

    Raises:
        TypeError: `strategy` is not a strategy.

    Example:
        >>> replicate_small(full_shard("shard"), below=100)("norm.weight", (64,)) == ddp("shard")
        True
    """
    if not isinstance(strategy, Placement) and not callable(strategy):
        raise TypeError(
            f'replicate_small: {strategy!r} is not a strategy; write replicate_small(full_shard("shard"), '
            f"below={below})"
        )

    def rule(path: str, shape: tuple[int, ...]) -> Placement:
        chosen = strategy if isinstance(strategy, Placement) else strategy(path, shape)
        return (
            Placement(replicas=chosen.axes + chosen.replicas, only_at=chosen.only_at, exact=chosen.exact)
            if math.prod(shape) < below
            else chosen
        )

    return rule


def _normalized(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()


_SPAWNED = " ".join(f"{how}{some}" for how in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook") for some in (
    "", "_find_unused_parameters_true", "_find_unused_parameters_false"))  # fmt: skip
_NAMES: dict[str, tuple[Callable[..., Placement], str]] = {
    "ddp": (
        ddp,
        f"NO_SHARD fsdp:3 zero:0 zero0 zero_stage_0 deepspeed_stage_0 distributed_data_parallel {_SPAWNED[4:]}",
    ),
    "zero1": (zero1, "zero:1 zero_stage_1 deepspeed_stage_1 distributed_optimizer zero_redundancy_optimizer optim"),
    "zero2": (zero2, "zero:2 zero_stage_2 deepspeed deepspeed_stage_2 ddp_sharded optim_grads"),
    "shard_grad_op": (shard_grad_op, "fsdp:2"),
    "full_shard": (
        full_shard,
        "fsdp:1 zero:3 fsdp fsdp1 fsdp_native fsdp2 fully_shard fully_sharded_data_parallel zero3 zero_stage_3 "
        "deepspeed_stage_3 optim_grads_params",
    ),
    "hybrid_shard": (hybrid_shard, "fsdp:4 hsdp"),
    "hybrid_shard_zero2": (hybrid_shard_zero2, "fsdp:5 _HYBRID_SHARD_ZERO2"),
    "hfsdp": (hfsdp, "hybrid_fsdp"),
    "hpz": (hpz, "zero_hpz"),
    "zeropp": (zeropp, "zero++ zeroplusplus zero_plus_plus"),
    "mics": (mics, ""),
}
_OWN = {
    _normalized(each): (own, each) for own, (_, others) in reversed(_NAMES.items()) for each in (*others.split(), own)
}
"""Every name without case and separators: the one in `_NAMES`, and how it is written."""
_OVER_ALL = ("ddp", "zero1", "zero2", "shard_grad_op", "full_shard")


def from_name(name: str, *, shard: AxisName = "shard", replica: AxisName = ()) -> Placement:
    """A strategy by any of its names: PyTorch's, Accelerate's, Lightning's, DeepSpeed's, Hugging Face's or Megatron's.

    A name means what it means in its library: `"deepspeed_stage_2"` replicates parameters (`zero2`), `"SHARD_GRAD_OP"`
    shards them (`shard_grad_op`). The part of Lightning's names that says how processes start, such as `_spawn`, is
    ignored. So is `find_unused_parameters`: a parameter that no rank used has no gradient, and a stage that only some
    ranks run is an error. `auto_wrap` is ignored, as `shard` does this by itself.

    Args:
        name: such as `"FULL_SHARD"`, `"full_shard auto_wrap"`, `"deepspeed_stage_2"` or `"hsdp"`; case, `-`, `_` and
            spaces do not matter. Accelerate's numbers are written `"fsdp:3"`, DeepSpeed's `"zero:3"`.
        shard: the axes over which parameters are sharded, such as those within a node.
        replica: the axes along which these groups are replicated. Strategies with one kind of axes use both.

    Returns:
        The placement, for `shard`.

    Raises:
        ValueError: an unknown name; a bare number, which means different things to different libraries; a name that
            includes offloading; a hybrid strategy without `replica`.

    Example:
        >>> from_name("HYBRID_SHARD", shard="x", replica="y") == hybrid_shard(shard="x", replica="y")
        True
        >>> from_name("full_shard auto_wrap") == full_shard("shard")
        True
    """
    canonical = _own_name(name)
    make, _ = _NAMES[canonical]
    if canonical in _OVER_ALL:
        return make(as_names(replica) + as_names(shard))
    if not as_names(replica) and canonical != "mics":
        raise ValueError(
            f"strategy {name!r} distinguishes two kinds of axes: pass replica= as well as shard={shard!r}: parameters, "
            f"or the copies that are gathered again, are the same over it"
        )
    return make(shard=shard, replica=replica)


def _own_name(name: Any) -> str:
    """The name in `_NAMES` for a name of another library."""
    text = str(getattr(name, "name", name)).removeprefix("ShardingStrategy.").replace("|", " ")  # an enum's, too
    plain_name = _normalized(re.sub(r"(?i)[\s,+]auto[_-]?wrap\b|\bauto[_-]?wrap[\s,+]", " ", text))
    if plain_name in _OWN:
        return _OWN[plain_name][0]
    if plain_name.isdecimal():
        spelled = [f'"{library}:{plain_name}"' for library in ("fsdp", "zero") if f"{library}:{plain_name}" in _OWN]
        raise ValueError(
            f"strategy {name!r}: a bare number means different things to different libraries (3 is DDP to Accelerate, "
            f"and full sharding to DeepSpeed): write {' or '.join(spelled) or 'a name'}, Accelerate's numbers as "
            f'"fsdp:1" to "fsdp:5" and DeepSpeed\'s as "zero:0" to "zero:3"'
        )
    stripped = re.sub(r"(cpu|nvme|optimizer|param)?offload(nvme|cpu)?", "", plain_name)
    if stripped != plain_name:
        plain = next((name for name in (stripped, stripped.removeprefix("fsdpnative")) if name in _OWN), "fullshard")
        raise ValueError(
            f'strategy {short(repr(name))}: offloading is not part of a name. Use "{_OWN[plain][0]}" and, of the '
            f'result, .with_tiers(params="host", grads="host", state="host"), or "disk" for "host"; for activations '
            f'use stage(f, remat="offload")'
        )
    near = difflib.get_close_matches(plain_name, _OWN, 1)
    raise ValueError(
        f"there is no strategy {short(repr(name))}{f': did you mean {_OWN[near[0]][1]!r}?' if near else '.'} There are "
        f"{listed(_NAMES, len(_NAMES))}. Names of FSDP, DeepSpeed, Accelerate, Lightning and Megatron mean the same "
        f"here, such as 'FULL_SHARD', 'zero:3' or 'hsdp'"
    )
