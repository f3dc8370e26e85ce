"""Hessians, Gauss-Newton and Fisher matrices of sharded parameters, as linear maps on trees of shards.

A product runs on the schedule of the stages: `sf.jvp` and `sf.grad`, one batch after another. Nothing but vectors is
kept between products.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Real
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from shardfn.check.callsites import paused
from shardfn.collectives.agree import agree
from shardfn.curvature.vectors import Space, Vector, add_, draws_restored
from shardfn.forward_mode.jvp import jvp
from shardfn.optim.hyperparameters import kind
from shardfn.optim.norms import wide
from shardfn.quoting import short
from shardfn.shards.random import int_seed
from shardfn.transforms.autodiff import differentiating, grad, name_of
from shardfn.transforms.fitting import program_ranks
from shardfn.transforms.shortage import RandomNumbers, versions

Function = Callable[..., Any]


class Operator:
    """A symmetric linear map on trees of shards, which `@` applies.

    Vectors are trees like the gradient of the parameters; a tree like the parameters will do. All ranks apply it
    together. `a * A`, `A / a`, `A + B` and `A - B` are operators too, and `Operator(lambda v: v, params)` is the
    identity. Factors are the same on all ranks, which compare them.

    Args:
        apply: `v -> A v`, with a tree like the gradient of `params`.
        params: the parameters.
        name: for messages.

    Raises:
        ValueError: no parameter has a gradient.
        TypeError: a parameter is complex.
        NotImplementedError: parameters are kept on the host or on disk.

    Example:
        ``H = hvp(loss, params, batches); curvature = sf.optim.vdot(v, H @ v) / sf.optim.vdot(v, v)``
    """

    def __init__(self, apply: Callable[[Any], Any], params: Any, name: str = "the operator") -> None:
        self.space, self.params, self.name = Space(params, name), params, name
        self._apply, self._seen = apply, False

    def __matmul__(self, v: Any) -> Any:
        """The product with a vector: a tree like the gradient, in float32 or wider."""
        return self.space.written(self.matvec(self.space.read(v)))

    def matvec(self, vector: Vector) -> Vector:
        """Returns the product with a vector that is a list of tensors, as elsewhere in this package."""
        # The checker follows one product: others are the same.
        with paused() if self._seen else contextlib.nullcontext():
            product = self.space.read(self._apply(self.space.written(vector)))
        self._seen = True
        # It may be the vector itself, and callers overwrite it.
        return [x.to(wide(z), copy=True) for x, z in zip(product, self.space.local_params, strict=True)]

    def __mul__(self, factor: float) -> Operator:
        if not isinstance(factor, Real) and not (isinstance(factor, Tensor) and factor.ndim == 0):
            return NotImplemented
        scalar = self.space.factor(float(factor))
        space = self.space

        def scaled(v: Any) -> Any:
            return space.written([x * scalar for x in self.matvec(space.read(v))])

        return Operator(scaled, self.params, self.name)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Operator:
        return self * (1 / divisor)

    def __add__(self, other: Operator) -> Operator:
        if not isinstance(other, Operator):
            return NotImplemented

        def added(v: Any) -> Any:
            x, y = (a.matvec(self.space.read(v)) for a in (self, other))
            return self.space.written([a + b for a, b in zip(x, y, strict=True)])

        return Operator(added, self.params, f"{self.name} + {other.name}")

    def __sub__(self, other: Operator) -> Operator:
        return self + -1 * other if isinstance(other, Operator) else NotImplemented


def must_be_operator(name: str, A: Any, **settings: Any) -> None:
    """Raises TypeError unless A is an operator, and ValueError on every rank if settings differ."""
    if not isinstance(A, Operator):
        raise TypeError(
            f"{name}: A must be an operator, got {kind(A)}. Make one by hvp, ggn, fisher or ekfac, or "
            f"Operator(f, params) of a function v -> A v"
        )
    if settings:
        A.space.agree(name, **settings)


def count_of(queries: Any, space: Space, name: str) -> int:
    """Returns the number of queries; raises unless they are a list, equally long on all ranks."""
    is_list = isinstance(queries, Sequence) and not isinstance(queries, str)
    space.agree(name, queries=len(queries) if is_list else kind(queries))
    if not is_list:
        raise TypeError(f"{name}: queries must be a list of trees like the gradient, got {kind(queries)}. Pass [q]")
    return len(queries)


def hvp(f: Function, params: Any, batches: Iterable[Any] | None = None) -> Operator:
    """The Hessian of a loss, whose products are Hessian-vector products; nothing is approximated.

    It is that of the sum of `f(params, *batch)` over the batches. Each product takes about as much memory as two
    gradients, and as much time as two or three. The gradient itself is neither computed in full nor reduced.

    Args:
        f: `(params, *batch) -> loss`, or `(params, batch)` if a batch is no tuple or list; `(params)` without batches.
            It is reduced over the ranks with other rows, so that it is the same on all.
        params: the parameters, at which the Hessian is taken. They must not be overwritten while it is in use.
        batches: this rank's batches, as many on each rank. They are read again for each product, in order: a list, say.

    Returns:
        An `Operator`. Each product draws the same random numbers, so that dropout stays the same.

    Raises:
        TypeError: batches that cannot be read twice, such as a generator; by a product, batches that have not as many
            arguments as the function takes, such as `(x, y)` in place of `[(x, y)]`.
        ValueError: by a product, a loss that differs between ranks.
        As `Operator`, and in products as `sf.jvp` and `sf.grad`.

    Sources: Pearlmutter, Fast exact multiplication by the Hessian (1994).

    Example:
        ``w = hvp(loss, params, [(x, y)]) @ v``
    """

    def product(values: Vector, v: Vector, space: Space, batch: tuple[Any, ...]) -> Any:
        def gradient(values: Vector) -> Any:
            loss, g = differentiating(lambda p: f(p, *batch), unread=True)(space.variables.tree(values))
            return g, loss.detach()

        _, product, loss = jvp(gradient, (values,), (v,), has_aux=True)
        space.same(loss)
        return product

    return _sum_operator(product, params, batches, f"hvp of {name_of(f)}", [f])


def ggn(model: Function, loss: Function, params: Any, batches: Iterable[Any] | None = None) -> Operator:
    r"""The generalized Gauss-Newton matrix :math:`\sum J^\top H_L J` of a loss of a model's outputs.

    It is positive semidefinite where the loss is convex in the outputs, and the Hessian where the model is linear. A
    product takes about the memory of a gradient, and the time of two.

    Args:
        model: `(params, *batch) -> outputs`, a tensor or a pytree of tensors: this rank's, for its own rows.
        loss: `(outputs, *batch) -> loss`, as in `f` of `hvp`: reduced over the ranks with other rows.
        params: as for `hvp`.
        batches: as for `hvp`.

    Returns:
        An `Operator`.

    Raises:
        As `hvp`.

    Sources: Schraudolph, Fast curvature matrix-vector products for second-order gradient descent (2002).

    Example:
        ``G = ggn(lambda p, x, y: model(p, x), lambda z, x, y: sf.psum(mse(z, y), "data"), params, batches)``
    """

    def curved(z: Any, dz: Any, batch: tuple[Any, ...], space: Space) -> Any:
        space.same(loss(z, *batch))
        return jvp(grad(lambda z: loss(z, *batch)), (z,), (dz,))[1]

    return _through((model, loss), curved, params, batches, f"ggn of {name_of(model)}")


def fisher(
    model: Function,
    likelihood: Function,
    params: Any,
    batches: Iterable[Any] | None = None,
    *,
    labels: Literal["expected", "drawn"] | int = "expected",
) -> Operator:
    r"""The Fisher matrix :math:`\sum_n J_n^\top \mathrm{E}[\nabla \log p \, \nabla \log p^\top] J_n` of a model.

    The sum is over all rows of all ranks: divide the operator by their number for a mean.

    Args:
        model: `(params, *batch) -> outputs`, as for `ggn`.
        likelihood: `(outputs, *batch) -> torch.distributions.Distribution` of the labels, one for each row or, in
            its batch shape, each label. Labels in the batch are not used.
        params: as for `hvp`.
        batches: as for `hvp`.
        labels: `"expected"`: the expectation over labels, exactly, as the Hessian of the Kullback-Leibler divergence;
            `"drawn"`, or a number of draws: the mean over labels that are drawn from the model, by torch's generator,
            the same in each product. Ranks with other rows should have other seeds, and those with the same rows the
            same.

    Returns:
        An `Operator`. For a softmax and for a normal distribution of fixed variance the expected one is also the
        generalized Gauss-Newton matrix of the negative log-likelihood.

    Raises:
        NotImplementedError: torch knows no divergence of two such distributions, or cannot draw from one.
        As `hvp`.

    Sources: Martens, New insights and perspectives on the natural gradient method (2020), sections 5 and 11.

    Example:
        ``A = fisher(model, lambda z, x, y: torch.distributions.Categorical(logits=z), params, batches) / rows``
    """
    name = f"fisher of {name_of(model)}"
    Space(params, name).agree("fisher", labels=labels)
    draws = {"expected": 0, "drawn": 1}.get(labels) if isinstance(labels, str) else int_seed(labels)
    if draws is None or isinstance(labels, bool) or (draws < 1 and labels != "expected"):
        raise ValueError(f"fisher: labels must be 'expected', 'drawn', or a number of draws above 0, got {labels!r}")

    def expected(z: Any, dz: Any, batch: tuple[Any, ...], space: Space) -> Any:
        fixed = likelihood(z, *batch)
        _refuse_kinks(fixed)

        def divergence(z: Any) -> Tensor:
            return torch.distributions.kl_divergence(fixed, likelihood(z, *batch)).sum()

        return jvp(grad(divergence), (z,), (dz,))[1]

    def sampled(z: Any, dz: Any, batch: tuple[Any, ...], space: Space) -> Any:
        total = None
        for _ in range(draws or 0):
            label = likelihood(z, *batch).sample()
            slopes = jvp(lambda z, label=label: likelihood(z, *batch).log_prob(label), (z,), (dz,))[1] / draws
            part = grad(lambda z, label=label, t=slopes: (likelihood(z, *batch).log_prob(label) * t).sum())(z)
            total = part if total is None else optree.tree_map(torch.add, total, part)
        return total

    return _through((model, likelihood), sampled if draws else expected, params, batches, name)


def _refuse_kinks(distribution: Any) -> None:
    """Raises an error for a distribution without a smooth divergence from itself."""
    if not isinstance(distribution, torch.distributions.Distribution):
        raise TypeError(
            f"fisher: the likelihood returned {type(distribution).__name__}. Return a torch.distributions object"
        )
    inner: Any = distribution
    while isinstance(inner, torch.distributions.Independent):
        inner = inner.base_dist
    kinds = torch.distributions.Laplace, torch.distributions.Uniform, torch.distributions.Pareto
    with contextlib.suppress(NotImplementedError):
        if not isinstance(inner, kinds):
            torch.distributions.kl_divergence(distribution, distribution)
            return
    raise NotImplementedError(
        f"fisher: torch has no divergence of two distributions of type {type(inner).__name__} that is smooth: take "
        f"labels='drawn', if its log_prob has a derivative"
    )


def empirical_fisher(losses: Function, params: Any, batches: Iterable[Any] | None = None) -> Operator:
    r"""The sum :math:`\sum_n g_n g_n^\top` over all rows of the gradients of their losses, at the given labels.

    Often called the empirical Fisher matrix, and no approximation of the Fisher matrix (Kunstner et al., 2019).

    Args:
        losses: `(params, *batch) -> [rows]`: the loss of each of this rank's rows, not reduced.
        params: as for `hvp`.
        batches: as for `hvp`.

    Returns:
        An `Operator`. A product takes about the memory of a gradient, and the time of two.

    Raises:
        As `hvp`.

    Example:
        ``A = empirical_fisher(lambda p, x, y: F.cross_entropy(model(p, x), y, reduction="none"), params, batches)``
    """

    def same(z: Any, dz: Any, batch: tuple[Any, ...], space: Space) -> Any:
        if not isinstance(z, Tensor) or z.ndim != 1:
            description = f"a tensor of shape {tuple(z.shape)}" if isinstance(z, Tensor) else type(z).__name__
            raise ValueError(f"{space.name}: losses must return one loss a row, [rows], got {description}")
        return dz

    return _through((losses,), same, params, batches, f"empirical_fisher of {name_of(losses)}")


def _through(
    functions: Sequence[Function], curved: Function, params: Any, batches: Iterable[Any] | None, name: str
) -> Operator:
    r"""The operator :math:`\sum J^\top C J` of `functions[0]`; `curved(z, dz, batch, space)` is :math:`C dz`."""
    model = functions[0]

    def product(values: Vector, v: Vector, space: Space, batch: tuple[Any, ...]) -> Any:
        def outputs(values: Vector) -> Any:
            return model(space.variables.tree(values), *batch)

        random_before = RandomNumbers(values)
        z, dz = jvp(outputs, (values,), (v,))
        if all(dy is None for dy in _leaves_with_none(dz)):
            raise TypeError(f"{name}: the model returns no floating-point tensor")
        u, random_after = curved(z, dz, batch, space), RandomNumbers(values)
        random_before.restore()  # the transpose is that of the same function

        def paired(p: Any) -> Tensor:  # whose gradient is the transpose of the model at u
            pairs = zip(_leaves_with_none(model(p, *batch)), _leaves_with_none(u), strict=True)
            return torch.stack([(a * b.conj()).real.sum() for a, b in pairs if b is not None]).sum()

        product = grad(paired)(space.variables.tree(values))
        random_after.restore()
        return product

    return _sum_operator(product, params, batches, name, functions)


def _leaves_with_none(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, none_is_leaf=True)


def _sum_operator(
    product: Function, params: Any, batches: Iterable[Any] | None, name: str, functions: Sequence[Function]
) -> Operator:
    """The operator that sums products over batches, each time with the same random numbers."""
    check_batches(batches, params, name)
    space = Space(params, name)
    values = [x.detach() for x in space.variables.values]
    random_state, unchanged = RandomNumbers(values), versions(values)

    def apply(tree: Any) -> Any:
        if versions(values) != unchanged:
            raise RuntimeError(f"{name}: the parameters were overwritten since, as by a step: make a new operator")
        v, total = space.tangents(space.read(tree)), list[Tensor]()
        with draws_restored(values):
            random_state.restore()
            for batch in each_of(batches, name, *functions):
                part = space.read(product(values, v, space, batch))
                if total:
                    add_(total, part)
                else:  # not before, as a product needs the memory
                    total = [x.to(wide(z), copy=True) for x, z in zip(part, space.local_params, strict=True)]
        return space.written(total)

    return Operator(apply, params, name)


def check_batches(batches: Iterable[Any] | None, params: Any, name: str) -> None:
    """Raises TypeError or ValueError unless batches are a collection, equally many on each rank."""
    count, error = 0, None
    if batches is None:
        pass
    elif isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Sized) or hasattr(batches, "__next__"):
        error = TypeError(
            f"{name}: batches are a list of batches, or another collection with a length that can be read again for "
            f"each product, and this is {type(batches).__name__}: pass a list, [batch] for one"
        )
    else:
        count = len(batches)
    advice = "A product is a sum over all of them: give each rank as many batches, some of them smaller if need be"
    line = f"batches: {'none' if batches is None else count}"
    agree([line], program_ranks(params), name, own_error=error, subject=("the numbers of batches", advice))


def each_of(
    batches: Iterable[Any] | None, name: str, *functions: Function, before: int = 1
) -> Iterator[tuple[Any, ...]]:
    """Yields each batch's arguments, and checks that the functions accept them.

    `before` is the number of arguments in front of them, such as the parameters.

    Raises:
        ValueError: there is no batch.
        TypeError: by their signatures the functions take another number of arguments.
    """
    count = 0
    for count, batch in enumerate([()] if batches is None else batches, 1):
        arguments = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        for f in functions:
            must_take(f, [None] * before + [*arguments], name, "" if batches is None else f"in batch {count - 1}")
        yield arguments
    if not count:
        raise ValueError(f"{name}: there are no batches")


_LIST = "Batches are a list, and each is a tuple of the arguments that follow: [(x, y)] for one batch, not (x, y)"


def must_take(f: Function, arguments: Sequence[Any], name: str, location: str = "", fix: str = _LIST) -> None:
    """Raises TypeError if a function's signature does not accept these arguments."""
    try:
        signature = inspect.signature(f, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        parameters = signature.parameters.values()
        names = ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)
        raise TypeError(
            f"{name}: {name_of(f)}({short(names)}) gets {len(arguments)} arguments{location and f' {location}'}: "
            f"{error}. {fix}"
        ) from None
