"""What a function under `shard_map` is called with, what it may be, and how it composes."""

from __future__ import annotations

import functools
import math
import re
from collections import namedtuple
from typing import Any

import numpy as np
import optree
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import shardfn as sf
from shardfn import P
from shardfn.mesh import watchdog
from shardfn.mesh.scope import current_mesh
from shardfn.testing import strategies as draws
from shardfn.testing import world
from tests.reference import worst

Pair = namedtuple("Pair", ["first", "second"])


def mesh_of(**sizes: int) -> Any:
    return sf.make_mesh(device="cpu", **(sizes or {"a": -1}))


def on_mesh(f: Any, in_specs: Any, *args: Any, out_specs: Any = ..., sizes: Any = None, **kwargs: Any) -> Any:
    return sf.shard_map(f, mesh=mesh_of(**(sizes or {})), in_specs=in_specs, out_specs=out_specs)(*args, **kwargs)


def show(*args: Any, **kwargs: Any) -> Any:
    """What a function met, without tensors."""
    return optree.tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, Tensor) else leaf, (args, kwargs))


def f_default(x: Any, y: Any = 5, *, z: Any = 7) -> Any:
    return show(x, y, z)


def f_star(x: Any, *rest: Any, z: Any = 7, **more: Any) -> Any:
    return show(x, rest, z, more)


def f_positional(x: Any, y: Any = 5, /) -> Any:
    return show(x, y)


class Model:
    def __call__(self, x: Any, y: Any = 5) -> Any:
        return show(x, y)

    def method(self, x: Any, y: Any = 5) -> Any:
        return show(x, y)


T, U = torch.tensor([2.0, 2.0]), torch.tensor([3.0])


@pytest.mark.parametrize(
    ("f", "specs", "args", "kwargs"),
    [
        (f_default, P("a"), (T,), {}),
        (f_default, ..., (T, 3), {"z": None}),
        (f_default, (P("a"),), (T,), {}),
        (f_default, (P("a"), P()), (T,), {}),
        (f_default, (P("a"), P(), P()), (T,), {}),
        (f_default, (P("a"), P("a")), (T, U), {}),
        (f_default, (P("a"), P("a"), P()), (T,), {"z": U}),
        (f_default, (P("a"), P("a")), (), {"y": U, "x": T}),
        (f_default, [P("a"), P("a")], (T,), {"y": U}),
        (f_default, {"x": P("a")}, (T,), {}),
        (f_default, {"z": P("a"), "x": P(), "y": ...}, (T,), {"z": U}),
        (f_default, {"z": P("a"), "x": P()}, (), {"z": U, "x": T}),
        (f_star, (P("a"), P(), ...), (T, 3, U), {}),
        (f_star, (P("a"), P(), ..., P("a")), (T, 3, U), {"z": T}),
        (f_star, {"x": P("a"), "rest": P()}, (T, 3, U), {}),
        (f_star, {"x": P("a"), "rest": P(), "z": P(), "w": P("a")}, (T, 3), {"w": U, "z": 1}),
        (f_star, ..., (T,), {"w": U, "v": None}),
        (f_star, {"x": P(), "w": P("a"), "v": P()}, (T,), {"w": U, "v": None}),
        (f_star, (P("a"),), (T,), {}),
        (f_positional, (P("a"), P()), (T, 3), {}),
        (f_positional, {"x": P("a")}, (T,), {}),
        (lambda: show(), (), (), {}),
        (lambda: show(), P(), (), {}),
        (lambda x: show(x), ({"w": P("a"), "b": [P(), ...]},), ({"w": T, "b": [1, {"k": U}]},), {}),
        (lambda x: show(x), ({"w": P("a")},), ({"w": (T, {"v": U}, None, [])},), {}),
        (lambda x: show(x), {"x": {"w": P("a")}}, ({"w": T},), {}),
        (lambda x: show(x), (Pair(P("a"), P()),), (Pair(T, "word"),), {}),
        (lambda x: show(x), (sf.by_path([("w", P("a")), (".*", P())]),), ({"w": T, "v": U},), {}),
        (lambda x: show(x), (None,), (None,), {}),
        (Model(), (P("a"), P()), (T,), {"y": 3}),
        (Model().method, (P("a"), P()), (T, 3), {}),
        (functools.partial(f_default, y=1), {"x": P("a")}, (T,), {}),
    ],
)
def test_arguments_arrive_as_they_were_passed(f: Any, specs: Any, args: Any, kwargs: Any) -> None:
    def body() -> Any:
        mapped = sf.shard_map(f, mesh=mesh_of(), in_specs=specs, out_specs=...)
        return [mapped(*args, **kwargs) for _ in range(2)]  # checked once, and then not again

    assert world(2).run(body) == [[f(*args, **kwargs)] * 2] * 2


def test_a_decorator_keeps_the_name_and_the_documentation() -> None:
    def body() -> Any:
        @sf.shard_map(mesh=mesh_of(), in_specs=P("a"), out_specs=P())
        def total(x: Tensor) -> Tensor:
            """Over all ranks."""
            return sf.psum(x.sum(), "a")

        return total.__name__, total.__doc__, total(torch.ones(3)).item(), total(x=torch.ones(2)).item()

    assert world(2).run(body) == [("total", "Over all ranks.", 6.0, 4.0)] * 2


@pytest.mark.parametrize("static", [3, "word", 2.5, True, None, len, torch.float32, slice(1, 2), (1, ("x", None))])
def test_what_is_no_tensor_passes_as_it_is(static: Any) -> None:
    def body() -> Any:
        return on_mesh(lambda x, s: (x, s), (P("a"), P()), torch.ones(2), static)[1]

    assert world(2).run(body) == [static] * 2


def test_a_changed_static_argument_is_met_on_the_next_call() -> None:
    def body() -> Any:
        mapped = sf.shard_map(lambda x, k: x * k, mesh=mesh_of(), in_specs=(P("a"), P()), out_specs=...)
        return [mapped(torch.ones(1), k).item() for k in (2, 3, 4.5)]

    assert world(2).run(body) == [[2.0, 3.0, 4.5]] * 2


@st.composite
def cut_arrays(draw: st.DrawFn) -> tuple[dict[str, int], list[tuple[P, tuple[int, ...]]]]:
    sizes = draw(draws.mesh_sizes(world=4, max_axes=3))
    specs = [
        draw(draws.specs(ndim, tuple(sizes))) for ndim in draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    ]
    return sizes, [(spec, draw(draws.global_shapes(spec, sizes, ndim=max(len(spec), 1)))) for spec in specs]


def numpy_piece(whole: np.ndarray, spec: P, sizes: dict[str, int], rank: int) -> np.ndarray:
    """By blocks: a row-major reshape of each cut dimension into its axes, then this rank's place along them."""
    at = dict(zip(sizes, np.unravel_index(rank, tuple(sizes.values())), strict=True))
    for dim, names in enumerate(spec.by_dim()):
        blocks = whole.reshape(*whole.shape[:dim], *(sizes[n] for n in names), -1, *whole.shape[dim + 1 :]) if names \
            and whole.size else None  # fmt: skip
        if blocks is None:
            parts = math.prod(sizes[n] for n in names)
            whole = np.take(whole, range(whole.shape[dim] // parts), axis=dim)
            continue
        for name in names:
            blocks = np.take(blocks, at[name], axis=dim)
        whole = blocks
    return whole


@settings(max_examples=60, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(drawn=cut_arrays())
def test_global_inputs_are_cut_as_numpy_cuts_them(drawn: Any) -> None:
    sizes, cuts = drawn
    arrays = [torch.arange(math.prod(shape)).reshape(shape) for _, shape in cuts]

    def body() -> Any:
        specs = ([spec for spec, _ in cuts],)
        take = sf.shard_map(lambda x: x, mesh=mesh_of(**sizes), in_specs=specs, out_specs=..., inputs="global")
        return [take(arrays) for _ in range(2)][1]

    for rank, pieces in enumerate(world(4).run(body)):
        for piece, array, (spec, _) in zip(pieces, arrays, cuts, strict=True):
            want = numpy_piece(array.numpy(), spec, sizes, rank)
            assert piece.shape == want.shape
            assert piece.numpy().tolist() == want.tolist()


def test_a_mesh_in_scope_serves_a_shard_map_inside() -> None:
    def body() -> Any:
        def inner(x: Tensor) -> Tensor:
            return sf.psum(x, "b")

        def outer(x: Tensor) -> Any:
            nested = sf.shard_map(inner, in_specs=P(("a", "b")), out_specs=...)
            return nested(x).item(), sf.psum(x, "a").item()

        return on_mesh(outer, P(("a", "b")), torch.tensor([1.0 + dist.get_rank()]), sizes={"a": 2, "b": 2})

    assert world(4).run(body) == [(3.0, 4.0), (3.0, 6.0), (7.0, 4.0), (7.0, 6.0)]


def test_specs_inside_that_leave_out_an_axis_of_the_outer_function_are_to_name_it() -> None:
    def body(specs: Any, out: Any) -> Any:
        def inner(x: Tensor) -> Tensor:
            return sf.psum(x.sum(), "b")

        def outer(x: Tensor) -> Tensor:
            return sf.psum(sf.shard_map(inner, in_specs=specs, out_specs=out)(x), "a")

        mesh, x = mesh_of(a=2, b=2), torch.tensor([1.0 + dist.get_rank()])
        try:
            return sf.shard_map(outer, mesh=mesh, in_specs=P(("a", "b")), out_specs=P())(x).item()
        except sf.check.VaryingError as error:
            return str(error), [finding.fix for finding in error.findings]

    text, fixes = world(4).run(body, P("b"), P())[0]
    assert fixes == ["a spec that names 'a', or `...`"] * 2
    assert "Write: shardfn." not in text
    for specs in (P(("a", "b")), ...):
        assert world(4).run(body, specs, ...) == [10.0] * 4


def test_another_mesh_inside_means_other_axes_until_it_ends() -> None:
    def body() -> Any:
        flat = mesh_of(all=4)

        def outer() -> Any:
            inner = sf.shard_map(lambda: sf.axis_size("all"), mesh=flat, in_specs=(), out_specs=...)
            sizes = [sf.axis_size("a"), inner(), sf.axis_size("a")]
            with pytest.raises(ValueError, match=r"unknown axis 'all'.*a=2, b=2"):
                sf.axis_size("all")
            return sizes

        return on_mesh(outer, (), sizes={"a": 2, "b": 2})

    assert world(4).run(body) == [[2, 4, 2]] * 4


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_the_scope_ends_with_the_function_also_by_an_exception(kind: Any) -> None:
    def body() -> Any:
        mesh = mesh_of(a=2, b=2)

        def bad() -> None:
            raise KeyError("on purpose")

        def outer() -> Any:
            with pytest.raises(KeyError):
                sf.shard_map(bad, mesh=mesh_of(c=4), in_specs=(), out_specs=...)()
            return sf.axis_size("a"), current_mesh() == mesh

        found = sf.shard_map(outer, mesh=mesh, in_specs=(), out_specs=...)()
        for failing in (bad, lambda: sf.psum(torch.ones(2), "nothing")):
            with pytest.raises((KeyError, ValueError)):
                sf.shard_map(failing, mesh=mesh, in_specs=(), out_specs=...)()
            with pytest.raises(ValueError, match="spec"):
                sf.shard_map(lambda: 3, mesh=mesh, in_specs=(), out_specs=(P(), P()))()
        dist.barrier()
        assert current_mesh() is None
        with pytest.raises(NameError):
            sf.axis_size("a")
        dist.barrier()
        return found

    assert world(4, kind).run(body) == [(2, True)] * 4


class Carrier:
    """A node of one tensor that says itself how it is cut."""

    def __init__(self, local: Any, spec: P) -> None:
        self.local, self.spec = local, spec


GLOBALLY: Any = vars(optree.registry)["__GLOBAL_NAMESPACE"]
optree.register_pytree_node(
    Carrier, lambda c: ((c.local,), c.spec), lambda spec, kids: Carrier(next(iter(kids)), spec), namespace=GLOBALLY
)


class TestValuesThatCarryTheirSpec:
    @pytest.mark.parametrize("spec", [..., P("a"), P("a", None), P(("a",))], ids=str)
    def test_the_same_spec_or_an_ellipsis_is_accepted(self, spec: Any) -> None:
        def body() -> Any:
            got = on_mesh(lambda p: p["w"], {"p": {"w": spec}}, {"w": Carrier(torch.ones(2, 2), P("a"))})
            return type(got).__name__, got.local.sum().item(), got.spec == P("a")

        assert world(2).run(body) == [("Carrier", 4.0, True)] * 2

    def test_another_spec_is_refused_on_every_rank(self) -> None:
        for spec in (P(), P(None, "a")):
            errors = world(2, "threads").errors(
                on_mesh, lambda p: p, {"p": {"w": spec}}, {"w": Carrier(torch.ones(2, 2), P("a"))}
            )
            for error in errors:
                assert type(error) is ValueError
                words = ["p['w']", "placed as P('a')", str(spec), "declare P('a'), or `...`"]
                assert [word for word in words if word not in str(error)] == []

    def test_a_spec_that_changed_is_checked_again(self) -> None:
        def body() -> None:
            mapped = sf.shard_map(lambda w: w.local, mesh=mesh_of(), in_specs=P("a"), out_specs=...)
            mapped(Carrier(torch.ones(2), P("a")))
            mapped(Carrier(torch.ones(2), P()))

        assert [type(error) for error in world(2, "threads").errors(body)] == [ValueError] * 2

    def test_a_result_may_carry_its_spec(self) -> None:
        def body() -> Any:
            return on_mesh(lambda: Carrier(torch.ones(2), P("a")), (), out_specs=P("a")).local.tolist()

        assert world(2).run(body) == [[1.0, 1.0]] * 2

    def test_its_tensor_is_differentiated(self) -> None:
        def body() -> Any:
            def loss(w: Carrier) -> Tensor:
                return sf.psum((w.local**2).sum(), "a")

            gradient = on_mesh(sf.grad(loss), P("a"), Carrier(torch.tensor([1.0, 2.0]), P("a")))
            return gradient.local.tolist(), gradient.spec == P("a")

        assert world(2).run(body) == [([2.0, 4.0], True)] * 2


class TestDTensors:
    @pytest.mark.parametrize(
        ("placements", "spec"),
        [
            ([Shard(0), Replicate()], P("a")),
            ([Shard(0), Replicate()], ...),
            ([Shard(1), Shard(0)], P("b", "a")),
            ([Replicate(), Shard(1)], P(None, "b")),
            ([Shard(0), Shard(0)], P(("a", "b"))),
            ([Replicate(), Replicate()], P()),
            ([Replicate(), Shard(-1)], P(None, "b")),
        ],
        ids=str,
    )
    def test_a_matching_placement_is_unwrapped(self, placements: Any, spec: Any) -> None:
        whole = torch.arange(32.0).view(4, 8)

        def body() -> Any:
            mesh = mesh_of(a=2, b=2)
            value = distribute_tensor(whole, mesh, placements)
            found = sf.shard_map(lambda p: p["w"], mesh=mesh, in_specs=({"w": spec},), out_specs=...)({"w": value})
            assert not isinstance(found, DTensor)
            cut = P(*(tuple(n for n, p in zip("ab", placements, strict=True) if p in (Shard(d), Shard(d - 2)))
                      for d in range(2)))  # fmt: skip
            take = sf.shard_map(lambda x: x, mesh=mesh, in_specs=cut, out_specs=..., inputs="global")
            return found.equal(take(whole)), found.equal(value.to_local())

        assert world(4).run(body) == [(True, True)] * 4

    @pytest.mark.parametrize("inputs", ["local", "global"])
    def test_its_gradient_comes_back_as_a_dtensor(self, inputs: Any) -> None:
        def body() -> Any:
            mesh = mesh_of(a=2)
            value = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).requires_grad_()
            f = sf.shard_map(
                lambda x: sf.psum((x**2).sum(), "a"), mesh=mesh, in_specs=P("a"), out_specs=P(), inputs=inputs
            )
            loss = f(value)
            loss.backward()
            assert isinstance(value.grad, DTensor)
            return loss.item(), value.grad.full_tensor().tolist()

        assert world(2).run(body) == [(14.0, [0.0, 2.0, 4.0, 6.0])] * 2

    @pytest.mark.parametrize(
        ("make", "spec", "words"),
        [
            (lambda m: distribute_tensor(torch.ones(4), m, [Shard(0)]), P(), ["x", "P('a')", "P()", "`...`"]),
            (lambda m: distribute_tensor(torch.ones(4), m, [Replicate()]), P("a"), ["x", "placed as P(", "P('a')"]),
            (lambda m: distribute_tensor(torch.ones(2, 2), m, [Shard(1)]), P("a"), ["P(None, 'a')", "P('a')"]),
            (lambda m: DTensor.from_local(torch.ones(4), m, [Partial()]), ..., ["partial sums over 'a'"]),
            (lambda m: distribute_tensor(torch.ones(5), m, [Shard(0)]), P("a"), ["(5,)", "5 does not divide by 2"]),
            (lambda m: distribute_tensor(torch.ones(4), mesh_of(b=2), [Shard(0)]), ..., ["DTensor on", "same mesh"]),
        ],
        ids=["cut", "whole", "dim", "partial", "uneven", "mesh"],
    )
    def test_another_placement_is_refused_on_every_rank(self, make: Any, spec: Any, words: list[str]) -> None:
        def body() -> Any:
            mesh = mesh_of()
            return sf.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=...)(make(mesh))

        for error in world(2, "threads").errors(body):
            assert type(error) is ValueError
            assert [word for word in words if word not in str(error)] == []

    def test_a_plain_tensor_after_a_dtensor_and_the_other_way_round(self) -> None:
        def body() -> Any:
            mesh = mesh_of()
            mapped = sf.shard_map(lambda x: type(x).__name__, mesh=mesh, in_specs=P("a"), out_specs=...)
            value = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
            return [mapped(x) for x in (value, torch.ones(2), value, torch.ones(4), value)]

        assert world(2).run(body) == [["Tensor"] * 5] * 2


class TestRanksThatDiffer:
    """All ranks hear of it, in the same words, within seconds: alone, one would raise and the others hang."""

    @pytest.mark.parametrize(
        ("shapes", "batch"),
        [([(2, 3), (1, 3)], True), ([(2, 3), (2, 4)], False), ([(2, 3), (2,)], False), ([(2, 3), (2, 3)], False)],
    )
    def test_a_last_batch_is_spoken_of_where_numbers_of_rows_alone_differ(self, shapes: Any, batch: bool) -> None:
        def body() -> Any:
            rank = dist.get_rank()
            more = {"z": torch.ones(2)} if rank and shapes[0] == shapes[1] else {}
            return on_mesh(lambda x: x, P("a"), {"x": torch.ones(*shapes[rank]), **more})

        for error in world(2, "threads").with_deadline(20).errors(body):
            assert "the arguments differ between ranks" in str(error)
            assert ("If this is a last batch with fewer rows, drop it" in str(error)) == batch

    @pytest.mark.parametrize(
        ("calls", "specs", "words"),
        [
            (lambda r: (torch.ones(2 + r),), P("a"), ["rank 0 has x: torch.float32 (2,)", "rank 1", "(3,)"]),
            (lambda r: (torch.ones(2, r + 1),), P("a"), ["(2, 1)", "(2, 2)"]),
            (lambda r: (torch.ones(2, dtype=[torch.float32, torch.float64][r]),), P("a"), ["float32", "float64"]),
            (lambda r: (torch.ones(2, dtype=[torch.float32, torch.float64][r]),), ..., ["float32", "float64"]),
            (lambda r: ({"vw"[r]: torch.ones(2)},), P("a"), ["rank 0 has x['v']", "rank 1 has x['w']"]),
            (lambda r: ([torch.ones(2)] * (1 + r),), P("a"), ["rank 1 has x[1]"]),
            (lambda r: ((torch.ones(2), torch.ones(2) if r else 3),), P(), ["x[1]: int", "x[1]: torch.float32"]),
            (lambda r: (torch.ones(2) if r else None,), ..., ["rank 1 has x: torch.float32"]),
        ],
    )
    def test_other_arguments_are_named_on_every_rank(self, calls: Any, specs: Any, words: list[str]) -> None:
        def body() -> Any:
            return on_mesh(lambda x, y=None: x, specs, *calls(dist.get_rank()))

        errors = world(2, "threads").with_deadline(20).errors(body)
        assert [type(error) for error in errors] == [ValueError] * 2
        assert str(errors[0]) == str(errors[1])
        assert [word for word in words if word not in str(errors[0])] == []

    @pytest.mark.parametrize(
        ("calls", "specs", "words"),
        [
            (lambda r: ({"vw"[r]: torch.ones(2)},), ({"w": P("a")},), ["prefix", "'v'", "'w'"]),
            (lambda r: (torch.ones(*[2] * (1 + r)),), P("a", None), ["x has shape (2,)", "P('a', None)"]),
            (lambda r: (torch.ones(2) if r else 3,), P("a"), ["x is 3", "int", "P('a')"]),
            (lambda r: (torch.ones(2),) * (2 - r), (P("a"),), ["in_specs has 1 for 2 arguments"]),
        ],
    )
    def test_what_one_rank_cannot_accept_all_ranks_hear_of(self, calls: Any, specs: Any, words: list[str]) -> None:
        def body() -> Any:
            return on_mesh(lambda x, y=None: x, specs, *calls(dist.get_rank()))

        own, others = world(2, "threads").with_deadline(20).errors(body)
        assert isinstance(own, (TypeError, ValueError))
        assert type(others) is ValueError
        assert "rank 0 failed: " in str(others)
        assert [word for word in words if word not in str(own) or word not in str(others)] == []

    @pytest.mark.parametrize("args", [(), (3,), (torch.ones(2),)], ids=["none", "static", "tensor"])
    def test_another_function_is_named_on_every_rank(self, args: Any) -> None:
        def train(*args: Any) -> int:
            return 1

        def evaluate(*args: Any) -> int:
            return 2

        def body() -> Any:
            return on_mesh(evaluate if dist.get_rank() else train, P(), *args)

        errors = world(2).with_deadline(20).errors(body)
        assert [type(error) for error in errors] == [ValueError] * 2
        assert all("train" in str(error) and "evaluate" in str(error) for error in errors)

    def test_only_one_of_four_ranks_differs(self) -> None:
        def body() -> Any:
            return on_mesh(lambda x: x, P("a"), torch.ones(2 + (dist.get_rank() == 2)))

        for error in world(4, "threads").with_deadline(20).errors(body):
            assert type(error) is ValueError
            assert "rank 2 has x: torch.float32 (3,)" in str(error)

    def test_under_an_ellipsis_shapes_may_differ(self) -> None:
        def body() -> Any:
            return on_mesh(lambda x: sf.psum(x.sum(), "a").item(), ..., torch.ones(2 + dist.get_rank()))

        assert world(2).with_deadline(20).run(body) == [5.0] * 2

    @pytest.mark.parametrize("collective", ["psum", "all_gather", "reduce_scatter"])
    def test_a_last_batch_that_is_short_on_one_rank_is_an_error_and_mixes_nothing(self, collective: str) -> None:
        def body() -> Any:
            watchdog.PATIENCE, watchdog.TICK = 0.3, 0.1
            step = sf.shard_map(
                lambda x: getattr(sf, collective)(torch.ones(4), "a"), mesh=mesh_of(), in_specs=P("a"), out_specs=...
            )
            step(torch.ones(4, 2))
            return step(torch.ones(3 if dist.get_rank() else 4, 2))

        errors = world(2).with_deadline(30).errors(body)
        assert [type(error) for error in errors] == [RuntimeError, RuntimeError]
        assert all("waits in vain" in str(error) or "waited in vain" in str(error) for error in errors)
        assert "x: torch.float32 (3, 2)" in str(errors[1])
        assert "drop it (drop_last=True) or pad it" in str(errors[1])


class TestOutside:
    """A mapped function is a function: transforms apply to it."""

    @staticmethod
    def mapped() -> Any:
        return sf.shard_map(lambda x: sf.psum(torch.sin(x).sum(), "a"), mesh=mesh_of(), in_specs=P("a"), out_specs=P())

    def mine(self) -> Tensor:
        return torch.tensor([1.0, 2.0], dtype=torch.float64) + dist.get_rank()

    @pytest.mark.parametrize("engine", [grad, sf.grad, lambda f: lambda x: vmap(grad(f))(x[None])[0]])
    def test_its_gradient(self, engine: Any) -> None:
        def body() -> float:
            x = self.mine()
            return (engine(self.mapped())(x) - torch.cos(x)).abs().max().item()

        assert worst(world(2).run(body)) <= 1e-12

    def test_autograd_with_and_without_a_first_call(self) -> None:
        def body() -> float:
            f, x = self.mapped(), self.mine().requires_grad_()
            return worst((torch.autograd.grad(f(x), x)[0] - torch.cos(x)).abs().max().item() for _ in range(2))

        assert worst(world(2).run(body)) <= 1e-12

    def test_jvp_and_vmap(self) -> None:
        def body() -> float:
            x = self.mine()
            tangent = jvp(self.mapped(), (x,), (torch.ones_like(x),))[1]
            both = torch.stack([x, x + dist.get_world_size()])
            total = sum(torch.cos(torch.tensor([1.0, 2.0]).double() + rank).sum() for rank in range(2))
            values = vmap(self.mapped())(both)
            want = [sum(torch.sin(torch.tensor([1.0, 2.0]).double() + r + k).sum() for r in range(2)) for k in (0, 2)]
            return worst(abs(one - two).item() for one, two in [(tangent, total), *zip(values, want, strict=True)])

        assert worst(world(2).run(body)) <= 1e-12

    def test_inside_too(self) -> None:
        def body() -> float:
            x = self.mine()

            def step(x: Tensor) -> Tensor:
                return vmap(grad(lambda x: sf.psum(torch.sin(x).sum(), "a")))(x[None])[0]

            return (on_mesh(step, P("a"), x) - torch.cos(x)).abs().max().item()

        assert worst(world(2).run(body)) <= 1e-12

    def test_checks_are_made_under_a_transform_too(self) -> None:
        def body() -> Any:
            f = sf.shard_map(lambda x: x.sum(), mesh=mesh_of(), in_specs=P("a", None), out_specs=P())
            return grad(f)(torch.ones(2))

        for error in world(2, "threads").errors(body):
            assert type(error) is ValueError
            assert "P('a', None)" in str(error)

    def test_whole_values_that_differ_are_told_apart_from_pieces_of_other_shapes(self) -> None:
        def body() -> Any:
            f = sf.shard_map(lambda x: x, mesh=mesh_of(), in_specs=P("a"), out_specs=P("a"), inputs="global")
            return f(torch.full((4,), dist.get_rank(), dtype=torch.float64))

        for error in world(2, "threads").errors(body):
            assert type(error) is ValueError
            assert "rank 1 has x: torch.float64 (2,), numbers with checksum" in str(error)
            assert 'With inputs="global" every rank passes the same whole values' in str(error)
            assert "pad" not in str(error)

    def test_ranks_are_compared_after_a_call_under_a_transform(self) -> None:
        def body() -> Any:
            f = sf.shard_map(lambda x: sf.psum(x.sum(), "a"), mesh=mesh_of(), in_specs=P("a"), out_specs=P())
            x = torch.ones(2 + dist.get_rank())
            grad(f)(x)
            return f(x)

        for error in world(2, "threads").with_deadline(20).errors(body):
            assert type(error) is ValueError
            assert "differ between ranks" in str(error)

    def test_recomputation_in_a_later_backward_still_knows_the_axes(self) -> None:
        from torch.utils.checkpoint import checkpoint

        def body() -> float:
            x = self.mine().requires_grad_()

            def loss(x: Tensor) -> Tensor:
                return sf.psum(torch.sin(x).sum(), "a")

            y = on_mesh(lambda x: checkpoint(loss, x, use_reentrant=False), P("a"), x)
            y.backward()
            return (x.grad - torch.cos(x)).abs().max().item()  # type: ignore[operator]

        assert worst(world(2).run(body)) <= 1e-12


class TestCompiled:
    def test_a_mapped_function_is_one_graph(self) -> None:
        def body() -> Any:
            torch._dynamo.reset()
            f = TestOutside.mapped()
            fast = torch.compile(f, fullgraph=True, backend="aot_eager")
            x = (torch.tensor([1.0, 2.0], dtype=torch.float64) + dist.get_rank()).requires_grad_()
            value = fast(x)
            return (value - f(x)).abs().item(), (torch.autograd.grad(value, x)[0] - torch.cos(x)).abs().max().item()

        assert worst(worst(pair) for pair in world(2).run(body)) <= 1e-12

    def test_a_loss_inside_is_one_graph(self) -> None:
        def body() -> float:
            torch._dynamo.reset()
            x = torch.tensor([1.0, 2.0], dtype=torch.float64) + dist.get_rank()
            loss = torch.compile(lambda x: sf.psum(torch.sin(x).sum(), "a"), fullgraph=True, backend="aot_eager")
            mapped = sf.shard_map(sf.grad(loss), mesh=mesh_of(), in_specs=P("a"), out_specs=P("a"))
            return max((mapped(x) - torch.cos(x)).abs().max().item() for _ in range(2))

        assert worst(world(2).run(body)) <= 1e-12

    @pytest.mark.parametrize("warm", [False, True])
    def test_a_compiled_function_follows_the_mesh_in_scope(self, warm: bool) -> None:
        """The same axis name means other ranks on another mesh: a graph must not keep the first one's group."""

        def body() -> list[float]:
            torch._dynamo.reset()
            f = torch.compile(lambda x: sf.psum(x, "a"), fullgraph=True, backend="aot_eager")
            found = []
            meshes = [mesh_of(a=2, b=2), mesh_of(a=4), mesh_of(b=2, a=2)]
            for mesh in [*meshes, *meshes]:
                under = functools.partial(sf.shard_map, mesh=mesh, in_specs=..., out_specs=...)
                if warm:
                    under(lambda: sf.psum(torch.ones(1), "a"))()
                found.append(under(lambda x: f(x))(torch.tensor(1.0 + dist.get_rank())).item())
            return found

        rows, columns = [3.0, 3.0, 7.0, 7.0], [4.0, 6.0, 4.0, 6.0]
        assert world(4).run(body) == [[columns[rank], 10.0, rows[rank]] * 2 for rank in range(4)]


def test_a_mesh_that_took_the_place_of_another_is_checked_again() -> None:
    """Also when it lies where the other lay in memory, as a mesh made in a loop does."""

    def body() -> list[str]:
        found = []
        inner = sf.shard_map(lambda x: x, in_specs=P("a"), out_specs=...)

        def run(mesh: Any) -> None:
            try:
                sf.shard_map(lambda: inner(torch.ones(2)), mesh=mesh, in_specs=(), out_specs=...)()
                found.append("accepted")
            except ValueError as error:
                found.append("unknown axis" if "unknown axis 'a'" in str(error) else str(error))

        run(mesh_of(a=2))
        for i in range(5):
            run(mesh_of(**{f"other{i}": 2}))
        return found

    assert world(2).run(body) == [["accepted"] + ["unknown axis"] * 5] * 2


def test_only_local_and_global_inputs_exist() -> None:
    wrong: Any = "whole"
    with pytest.raises(ValueError, match='inputs must be "local" or "global", got \'whole\''):
        sf.shard_map(lambda x: x, in_specs=P(), out_specs=P(), inputs=wrong)
    with pytest.raises(TypeError, match="check must be True or False, got 'whole'"):
        sf.shard_map(lambda x: x, in_specs=P(), out_specs=P(), check=wrong)


class Placed:
    """A value that optree does not know, which says by itself how it is cut."""

    def __init__(self, spec: P) -> None:
        self.spec = spec


def test_a_value_that_comes_back_with_another_spec_is_checked_again() -> None:
    def body() -> Any:
        mapped = sf.shard_map(lambda x: None, mesh=mesh_of(), in_specs=P("a"), out_specs=...)
        mapped(Placed(P("a")))
        mapped(Placed(P()))

    for error in world(2).errors(body):
        assert isinstance(error, ValueError)
        assert "x is placed as P(), but its spec is P('a')" in str(error)


def test_ranks_whose_values_say_different_specs_hear_of_it() -> None:
    def body() -> Any:
        mapped = sf.shard_map(lambda x: None, mesh=mesh_of(), in_specs=..., out_specs=...)
        mapped(Placed(P("a") if dist.get_rank() else P()))

    for error in world(2).errors(body):
        assert isinstance(error, ValueError)
        assert "rank 1 has x: Placed placed as P('a')" in str(error)


def whole_loss(x: Tensor, c: Tensor, missing: int) -> Tensor:
    """What `TestDerivativesOfWholeArguments` computes, on one process."""
    return (torch.sin(x) * c).sum() + (x**3).sum() * missing * (missing + 1) / 2


def cut_loss(spec: P, sizes: dict[str, int]) -> Any:
    missing = tuple(name for name in sizes if name not in spec.axes)

    def loss(x: Tensor, c: Tensor) -> Tensor:
        every = sf.psum((torch.sin(x) * c).sum(), spec.axes)  # the same along the axes that do not cut it
        return every + sf.psum((sf.pvary(x, missing) ** 3).sum() * (1 + sf.axis_index(missing)), (*spec.axes, *missing))

    return loss


def by_backward(f: Any) -> Any:
    def pulled(x: Tensor, c: Tensor) -> Any:
        leaves = x.clone().requires_grad_(), c.clone().requires_grad_()
        f(*leaves).backward()
        return [leaf.grad for leaf in leaves]

    return pulled


def twice(f: Any) -> Any:
    def pulled(x: Tensor, c: Tensor) -> Any:
        leaf = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(leaf, c), leaf, create_graph=True)
        return torch.autograd.grad(torch.sin(g).sum(), leaf)

    return pulled


WAYS: dict[str, Any] = {
    "value": lambda f: f,
    "backward": by_backward,
    "double backward": twice,
    "grad": lambda f: grad(f, argnums=(0, 1)),
    "shardfn": lambda f: sf.value_and_grad(f, argnums=(0, 1)),
    "jvp": lambda f: lambda x, c: jvp(f, (x, c), (torch.cos(x), c)),
    "jacrev": lambda f: jacrev(f, argnums=(0, 1)),
    "jacfwd": lambda f: jacfwd(f, argnums=(0, 1)),
    "hessian": hessian,
    "grad of grad": lambda f: grad(lambda x, c: torch.sin(grad(f)(x, c)).sum()),
    "vmap": lambda f: lambda x, c: vmap(f, in_dims=(0, None))(torch.stack([x, 2 * x]), c),
    "vmap of grad": lambda f: lambda x, c: vmap(grad(f), in_dims=(1, None))(torch.stack([x, 2 * x], 1), c),
    "grad of vmap": lambda f: grad(lambda x, c: vmap(f, in_dims=(0, None))(torch.stack([x, 2 * x]), c).sum()),
}


class TestDerivativesOfWholeArguments:
    """Around shard_map(inputs="global") they are those of the function on one process, whole and on every rank."""

    @pytest.mark.parametrize(
        "spec", [P(), P("a"), P(None, "b"), P("a", "b"), P("b", "a"), P(("a", "b")), P(None, ("b", "a"))], ids=str
    )
    def test_every_transform_gives_the_derivative_of_one_process(self, spec: P) -> None:
        def body() -> dict[str, float]:
            sizes = {"a": 2, "b": 2}
            f = sf.shard_map(
                cut_loss(spec, sizes), mesh=mesh_of(**sizes), in_specs=spec, out_specs=P(), inputs="global"
            )
            missing = math.prod(size for name, size in sizes.items() if name not in spec.axes)
            plain = functools.partial(whole_loss, missing=missing)
            x, c = draws.tensor_of((4, 4), torch.float64, 1), draws.tensor_of((4, 4), torch.float64, 2)
            found = {}
            for name, way in WAYS.items():
                got, want = optree.tree_leaves(way(f)(x, c)), optree.tree_leaves(way(plain)(x, c))
                assert [one.shape for one in got] == [one.shape for one in want], name
                found[name] = worst(
                    (a - b).abs().max().item() / b.abs().max().item() for a, b in zip(got, want, strict=True)
                )
            return found

        for found in world(4).run(body):
            assert {name: off for name, off in found.items() if not off <= 1e-12} == {}

    def test_trees_tuples_integers_aliases_and_other_values_pass(self) -> None:
        def body() -> Any:
            x, n = torch.arange(1.0, 5.0, dtype=torch.float64), torch.arange(4)

            def loss(p: Any, n: Tensor, word: str) -> Tensor:
                assert (word, n.dtype, p["w"].shape, p["more"][0].shape) == ("word", torch.int64, (2,), (4,))
                return sf.psum((p["w"] * sf.collectives.local_slice(p["more"][0], "a") * n).sum(), "a")

            specs = {"p": {"w": P("a"), "more": P()}, "n": P("a"), "word": P()}
            f = sf.shard_map(loss, mesh=mesh_of(), in_specs=specs, out_specs=P(), inputs="global")
            value, grads = sf.value_and_grad(f)({"w": x, "more": [x]}, n, "word")  # the same tensor twice
            aliased = sf.grad(lambda x: f({"w": x, "more": [x]}, n, "word"))(x)
            return value.item(), grads["w"].tolist(), grads["more"][0].tolist(), aliased.tolist()

        assert world(2).run(body) == [(70.0, [0.0, 2.0, 6.0, 12.0], [0.0, 2.0, 6.0, 12.0], [0.0, 4.0, 12.0, 24.0])] * 2

    def test_flat_shards_beside_them_have_their_own(self) -> None:
        def body() -> Any:
            mesh = mesh_of()
            params = sf.shard({"w": torch.arange(1.0, 5.0, dtype=torch.float64)}, mesh, sf.full_shard("a"))
            layer = sf.stage(lambda p, x: (p * x).sum())
            f = sf.shard_map(
                lambda p, x: sf.psum(layer(p["w"], x), "a"),
                mesh=mesh,
                in_specs=(..., P("a")),
                out_specs=P(),
                inputs="global",
            )
            x = torch.arange(8.0, dtype=torch.float64).view(2, 4)
            dp, dx = sf.grad(f, argnums=(0, 1))(params, x)
            return sf.unshard(dp)["w"].tolist(), dx.tolist()

        assert world(2).run(body) == [([4.0, 6.0, 8.0, 10.0], [[1.0, 2.0, 3.0, 4.0]] * 2)] * 2

    def test_a_shard_map_inside_another_is_differentiated(self) -> None:
        def body() -> Any:
            inner = sf.shard_map(lambda x: sf.psum((x**2).sum(), "a"), in_specs=P("a"), out_specs=P(), inputs="global")
            outer = sf.shard_map(lambda x: inner(2 * x), mesh=mesh_of(), in_specs=P(), out_specs=P(), inputs="global")
            return grad(outer)(torch.arange(4.0)).tolist()

        assert world(2).run(body) == [[0.0, 8.0, 16.0, 24.0]] * 2

    @pytest.mark.parametrize("way", ["backward", "grad", "shardfn", "vmap of grad"])
    def test_a_missing_pvary_is_an_error_on_every_rank(self, way: str) -> None:
        bodies: dict[str, tuple[Any, str]] = {
            "a weight meets rows": (
                lambda x, c: sf.psum((x * c).sum(), "a"),
                r"x is the same on all ranks along 'a'.*pvary\(x, 'a'\).*in mul",
            ),
            "a sum of what is the same": (lambda x, c: sf.psum(x.sum(), "a"), "psum along 'a'.*2 times as large"),
            "a gathered value that is said to be the same": (
                lambda x, c: sf.all_gather(c, "a").sum() + 0 * x.sum(),
                'varies along .a..*to="invariant"',
            ),
            "rows that nobody sees": (
                lambda x, c: sf.psum((sf.pvary(x, "a") * 0).sum(), "a") + (x * (1 + sf.axis_index("a"))).sum(),
                "different derivatives.*pvary",
            ),
        }

        def body() -> dict[str, str]:
            found = {}
            for name, (f, _) in bodies.items():
                seen = name != "rows that nobody sees"
                mapped = sf.shard_map(
                    f, mesh=mesh_of(), in_specs=(P(), P("a")), out_specs=P(), inputs="global", check=seen
                )
                x, c = (
                    torch.ones(1, dtype=torch.float64),
                    torch.ones(4, dtype=torch.float64),
                )  # the same rows everywhere
                try:
                    found[name] = f"returned {WAYS[way](mapped)(x, c)}"
                except ValueError as error:
                    found[name] = str(error).replace("\n", " ")
            return found

        for found in world(2).run(body):
            assert {name: said for name, said in found.items() if not re.search(bodies[name][1], said)} == {}

    def test_numbers_that_differ_between_ranks_are_refused(self) -> None:
        def body() -> Any:
            f = sf.shard_map(lambda x: x, mesh=mesh_of(), in_specs=P("a"), out_specs=P("a"), inputs="global")
            return f(torch.ones(2) * dist.get_rank())

        for error in world(2).errors(body):
            assert type(error) is ValueError
            assert "(1,), numbers with checksum" in str(error)


def on_a_mesh_of_any_order(ranks: list[list[int]]) -> list[str]:
    """What is said of right and of wrong programs on a mesh whose ranks are not in the order of their numbers."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("a", "b"))
    places = dict(zip("ab", mesh.get_coordinate() or (), strict=True))
    x, told = torch.arange(8.0), []
    for axis, other in ("ab", "ba"):
        own, others = x.chunk(2)[places[axis]].clone(), x.chunk(2)[places[other]].clone()
        sums = sf.shard_map(lambda x, axis=axis: sf.psum(x.sum(), axis), mesh=mesh, in_specs=P(axis), out_specs=P())
        assert sums(own) == 28
        whole = sf.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P(axis), out_specs=P(axis), inputs="global")
        assert whole(x).tolist() == (own * 2).tolist()
        for f, x_here, out in ((lambda x: x * 2, others, P(axis)), (lambda x: x.sum(), own, P())):
            try:
                sf.shard_map(f, mesh=mesh, in_specs=P(axis), out_specs=out)(x_here)
                told.append("nothing")
            except sf.check.VaryingError as error:
                told.append(str(error))
    w = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    flat = sf.shard({"w": w}, mesh, sf.hybrid_shard(shard="b", replica="a"))
    stage = sf.stage(lambda p, x: (p["w"] * x).sum())
    step = sf.shard_map(sf.grad(lambda p, x: sf.psum(stage(p, x), ("a", "b"))), mesh=mesh, in_specs=..., out_specs=...)
    got = sf.unshard(step(flat, torch.tensor(float(dist.get_rank()), dtype=torch.float64)))["w"]
    assert torch.equal(got, torch.full_like(w, 6.0))
    return told


@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 1], [0, 2]], [[2, 3], [1, 0]]], ids=str)
@pytest.mark.parametrize("world", [(4, "processes")], indirect=True, ids=["4"])
def test_ranks_of_a_mesh_may_have_any_order(world: Any, ranks: list[list[int]]) -> None:
    for told in world.run(on_a_mesh_of_any_order, ranks):
        assert len(told) == 4
        assert "nothing" not in told
