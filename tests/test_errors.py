"""What goes wrong says where, with which numbers, and what to do, on every rank."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn import P
from shardfn.testing import world

T = torch.ones(4, 6)


def mesh(**sizes: int) -> Any:
    return sf.make_mesh(device="cpu", **(sizes or {"a": 2, "b": 2}))


def mapped(f: Any, in_specs: Any, *args: Any, out_specs: Any = ..., inputs: Any = "local", **kwargs: Any) -> Any:
    return sf.shard_map(f, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, inputs=inputs)(*args, **kwargs)


def inside(f: Any) -> Any:
    return mapped(f, ())


def step(params: Any, x: Any = None, *rest: Any, rate: Any = 0.1) -> Any:
    return params


def unnamed() -> Any:
    return sf.shard_map(lambda: sf.axis_size("a"), mesh=init_device_mesh("cpu", (4,)), in_specs=(), out_specs=...)()


Row = tuple[Callable[[], Any], type[Exception], list[str]]

MESHES: dict[str, Row] = {
    "product": (lambda: mesh(a=3), ValueError, ["make_mesh(a=3)", "3 processes", "has 4", "--nproc-per-node 3", "-1"]),
    "too large": (lambda: mesh(a=2, b=4), ValueError, ["a=2, b=4", "8 processes", "world has 4", "--nproc-per-node 8"]),
    "too small": (lambda: mesh(a=2), ValueError, ["a=2", "2 processes", "world has 4"]),
    "remainder": (lambda: mesh(a=3, b=-1), ValueError, ["a=3, b=-1", "a multiple of 3", "world has 4"]),
    "two rests": (lambda: mesh(a=-1, b=-1), ValueError, ["at most one of size -1", "a=-1, b=-1"]),
    "zero": (lambda: mesh(a=0), ValueError, ["axis 'a'", "size 0", "positive"]),
    "negative": (lambda: mesh(a=4, b=-2), ValueError, ["axis 'b'", "size -2", "positive"]),
    "fraction": (lambda: mesh(a=2.0), ValueError, ["axis 'a'", "2.0", "integer"]),  # type: ignore[arg-type]
    "truth": (lambda: mesh(a=True, b=-1), ValueError, ["axis 'a'", "True", "integer"]),
    "by position": (
        lambda: sf.make_mesh((4,), ("a",)),  # type: ignore[call-arg, arg-type]
        TypeError,
        ["make_mesh", "axes have names", "make_mesh(data=2"],
    ),
    "as torch's": (lambda: mesh(mesh_shape=(4,)), ValueError, ["'mesh_shape' has size (4,)", "as in make_mesh(data=2"]),  # type: ignore[arg-type]
    "no axes": (lambda: sf.make_mesh(device="cpu"), ValueError, ["at least one axis", "make_mesh(data=-1); got none"]),
    "no names": (unnamed, ValueError, ["no axis names", "mesh_dim_names"]),
    "no mesh": (lambda: sf.shard_map(lambda: 1, in_specs=(), out_specs=...)(), NameError, ["no mesh", "make_mesh"]),
}

AXES: dict[str, Row] = {
    "unknown": (lambda: inside(lambda: sf.psum(T, "model")), ValueError, ["psum", "unknown axis 'model'", "a=2, b=2"]),
    "of several": (
        lambda: inside(lambda: sf.psum(T, ("a", "c"))),
        ValueError,
        ["psum", "unknown axis 'c'", "a=2, b=2"],
    ),
    "twice": (lambda: inside(lambda: sf.psum(T, ("a", "b", "a"))), ValueError, ["psum", "axis 'a'", "twice"]),
    "number": (lambda: inside(lambda: sf.psum(T, 0)), TypeError, ["psum", "name", "0"]),  # type: ignore[arg-type]
    "none": (lambda: inside(lambda: sf.psum(T, None)), TypeError, ["psum", "name", "None"]),  # type: ignore[arg-type]
    "list": (lambda: inside(lambda: sf.psum(T, ["a"])), TypeError, ["psum", "tuple of names", "['a']"]),  # type: ignore[arg-type]
    "numbers": (lambda: inside(lambda: sf.psum(T, (0, 1))), TypeError, ["psum", "names", "(0, 1)"]),  # type: ignore[arg-type]
    "swapped": (lambda: inside(lambda: sf.psum("a", T)), TypeError, ["psum", "axis"]),  # type: ignore[arg-type]
    "index": (lambda: inside(lambda: sf.axis_index("c")), ValueError, ["axis_index", "unknown axis 'c'", "a=2, b=2"]),
    "fold_in": (lambda: inside(lambda: sf.fold_in(0, "c")), ValueError, ["fold_in", "unknown axis 'c'", "a=2, b=2"]),
}

COLLECTIVES: dict[str, Row] = {
    "dim": (lambda: inside(lambda: sf.all_gather(T, "a", dim=2)), ValueError, ["all_gather", "dim=2", "(4, 6)", "2 d"]),
    "negative": (lambda: inside(lambda: sf.all_gather(T, "a", dim=-3)), ValueError, ["all_gather", "dim=-3", "(4, 6)"]),
    "scalar": (lambda: inside(lambda: sf.all_gather(T[0, 0], "a")), ValueError, ["all_gather", "dim=0", "()", "0 dim"]),
    "to": (lambda: inside(lambda: sf.all_gather(T, "a", to="all")), ValueError, ["all_gather", "'all'", '"invariant"']),  # type: ignore[arg-type]
    "scatter": (
        lambda: inside(lambda: sf.reduce_scatter(T, ("a", "b"), dim=1)),
        ValueError,
        [
            "reduce_scatter",
            "('a', 'b')",
            "dimension 1",
            "(4, 6)",
            "4 equal pieces",
            "6 does not divide by 4",
            "pad it to 8",
        ],
    ),
    "slice": (
        lambda: inside(lambda: sf.collectives.local_slice(T[:3], "b")),
        ValueError,
        ["local_slice", "'b'", "dimension 0", "(3, 6)", "3 does not divide by 2", "pad it to 4"],
    ),
    "exchange": (
        lambda: inside(lambda: sf.all_to_all(T[:, :5], "a", split_dim=-1, concat_dim=0)),
        ValueError,
        ["all_to_all", "dimension 1", "(4, 5)", "5 does not divide by 2", "pad it to 6"],
    ),
    "split_dim": (
        lambda: inside(lambda: sf.all_to_all(T, "a", split_dim=2, concat_dim=0)),
        ValueError,
        ["all_to_all", "split_dim=2", "(4, 6)"],
    ),
    "concat_dim": (
        lambda: inside(lambda: sf.all_to_all(T, "a", split_dim=0, concat_dim=5)),
        ValueError,
        ["all_to_all", "concat_dim=5", "(4, 6)"],
    ),
    "source": (
        lambda: inside(lambda: sf.ppermute(T, "a", [(2, 0)])),
        ValueError,
        ["ppermute", "'a'", "source 2", "from 0 to 1"],
    ),
    "target": (lambda: inside(lambda: sf.ppermute(T, "a", [(0, -1)])), ValueError, ["target -1", "from 0 to 1"]),
    "sources": (lambda: inside(lambda: sf.ppermute(T, "a", [(0, 0), (0, 1)])), ValueError, ["source 0", "twice"]),
    "targets": (lambda: inside(lambda: sf.ppermute(T, "a", [(0, 1), (1, 1)])), ValueError, ["target 1", "twice"]),
    "bool": (lambda: inside(lambda: sf.psum(T > 0, "a")), TypeError, ["psum", "torch.bool", "x.to(torch.int64)"]),
    "complex": (lambda: inside(lambda: sf.pmax(T + 1j, "a")), TypeError, ["pmax", "complex", "order"]),
    "leaf": (lambda: inside(lambda: sf.psum({"w": "x"}, "a")), TypeError, ["psum", "tensors and numbers", "str"]),
    "truth": (lambda: inside(lambda: sf.psum([True], "a")), TypeError, ["psum", "tensors and numbers", "bool"]),
}

SPECS: dict[str, Row] = {
    "axis": (
        lambda: mapped(step, P("model"), T),
        ValueError,
        ["shard_map(step)", "in_specs", "params", "P('model')", "unknown axis 'model'", "a=2, b=2"],
    ),
    "path": (
        lambda: mapped(step, ({"w": [..., P("z")]},), {"w": [T, T]}),
        ValueError,
        ["shard_map(step)", "params['w'][1]", "P('z')", "unknown axis 'z'"],
    ),
    "rank": (
        lambda: mapped(step, (P(), P("a", None, "b")), T, T),
        ValueError,
        ["shard_map(step)", "x has shape (4, 6)", "2 dimensions", "P('a', None, 'b') describes 3", "at most 2"],
    ),
    "scalar": (
        lambda: mapped(step, {"params": P("a")}, torch.tensor(1.0)),
        ValueError,
        ["params has shape ()", "P() for a scalar"],
    ),
    "no tensor": (lambda: mapped(step, (P("a"),), 3), TypeError, ["params is 3", "int", "P('a')", "use P()"]),
    "string": (lambda: mapped(step, "a", T), TypeError, ["shard_map(step)", "in_specs", "'a'", "write P('a')"]),
    "string inside": (
        lambda: mapped(step, ({"w": "a"},), {"w": T}),
        TypeError,
        ["in_specs", "params['w']", "write P('a')"],
    ),
    "none": (lambda: mapped(step, (None,), T), (TypeError, ValueError), ["in_specs", "params", "P()"]),  # type: ignore[dict-item]
    "an array": (lambda: mapped(step, (P("a"),), T.numpy()), TypeError, ["params is", "ndarray", "torch.from_numpy"]),
    "a placement": (
        lambda: mapped(step, (Shard(1),), T),
        TypeError,
        ["Shard(dim=1)", "write P(None, axis) for an axis", "dimension 1"],
    ),
    "number": (lambda: mapped(step, 3, T), TypeError, ["in_specs", "3", "not a spec"]),
    "too few": (
        lambda: mapped(step, (P("a"),), T, T),
        ValueError,
        ["shard_map(step)", "in_specs has 1 for 2 arguments", "params, x"],
    ),
    "too many": (
        lambda: mapped(step, (P(),) * 5, T),
        ValueError,
        ["in_specs has 5 for 1 argument ", "params, x, rest, rate"],
    ),
    "skipped": (lambda: mapped(step, (P(), P()), T, rate=T), ValueError, ["in_specs has 2 for ", "rate"]),
    "names": (
        lambda: mapped(step, {"params": P(), "y": P()}, T),
        ValueError,
        ["shard_map(step)", "no parameter y", "params, x, rest, rate"],
    ),
    "missing name": (lambda: mapped(step, {"params": P()}, T, T), ValueError, ["none for x", "params, x, rest, rate"]),
    "missing star": (lambda: mapped(step, {"params": P(), "x": P()}, T, T, T), ValueError, ["none for rest[0]"]),
    "keys": (
        lambda: mapped(step, ({"v": P()},), {"w": T}),
        ValueError,
        ["in_specs for params", "prefix", "'v'", "'w'"],
    ),
    "length": (lambda: mapped(step, ([P(), P()],), [T]), ValueError, ["in_specs for params", "prefix"]),
    "rule": (
        lambda: mapped(step, (sf.by_path([("v", P())]),), {"w": T}),
        ValueError,
        ["in_specs for params", "no rule for w", "match no path: v"],
    ),
    "call": (lambda: mapped(step, P(), T, speed=3), TypeError, ["shard_map(step)", "unexpected keyword argument"]),
    "no argument": (lambda: mapped(step, P()), TypeError, ["shard_map(step)", "'params'"]),
    "result axis": (
        lambda: mapped(step, P(), T, out_specs=P("z")),
        ValueError,
        ["shard_map(step)", "out_specs", "result", "unknown axis 'z'", "a=2, b=2"],
    ),
    "result rank": (
        lambda: mapped(lambda: {"loss": T.sum()}, (), out_specs={"loss": P("a")}),
        ValueError,
        ["out_specs", "result['loss'] has shape ()", "P('a')", "P() for a scalar"],
    ),
    "result tree": (
        lambda: mapped(lambda: (T, T), (), out_specs=(P(), P(), P())),
        ValueError,
        ["out_specs", "prefix of result"],
    ),
    "result string": (lambda: mapped(lambda: T, (), out_specs="a"), TypeError, ["out_specs", "write P('a')"]),
    "uneven": (
        lambda: mapped(step, {"params": {"w": P(None, ("a", "b"))}}, {"w": T}, inputs="global"),
        ValueError,
        [
            "shard_map(step)",
            "params['w']",
            "(4, 6)",
            "dimension 1",
            "a 2 x b 2",
            "6 does not divide by 4",
            "pad it to 8",
        ],
    ),
}


@pytest.mark.parametrize(
    ("table", "row"), [(t, row) for t in ("MESHES", "AXES", "COLLECTIVES", "SPECS") for row in globals()[t]]
)
def test_a_mistake_is_explained_on_every_rank(table: str, row: str) -> None:
    call, kind, words = globals()[table][row]
    errors = world(4, "threads").with_deadline(20).errors(call)
    assert len(errors) == 4
    for error in errors:
        assert isinstance(error, kind)
        assert [word for word in words if word not in str(error)] == []


def test_no_message_shows_what_is_inside() -> None:
    """A message is for the one who called: no names of private functions, no addresses, no dumps of tensors."""
    tables: list[dict[str, Row]] = [MESHES, AXES, COLLECTIVES, SPECS]
    calls = [row[0] for table in tables for row in table.values()]

    def body() -> list[str]:
        found = []
        for call in calls:
            try:
                call()
            except Exception as error:
                found.append(str(error))
        return found

    messages = world(4, "threads").run(body)[0]
    assert len(messages) == len(calls)
    for message in messages:
        assert "_shard" not in message
        assert " at 0x" not in message
        assert "tensor(" not in message
        assert len(message) < 1000


OUTSIDE: dict[str, Callable[[], Any]] = {
    "psum": lambda: sf.psum(T, "a"),
    "pmean": lambda: sf.pmean(T, "a"),
    "pmax": lambda: sf.pmax(T, "a"),
    "pmin": lambda: sf.pmin(T, "a"),
    "pvary": lambda: sf.pvary(T, "a"),
    "all_gather": lambda: sf.all_gather(T, ("a", "b")),
    "local_slice": lambda: sf.collectives.local_slice(T, "a"),
    "reduce_scatter": lambda: sf.reduce_scatter(T, "a"),
    "ppermute": lambda: sf.ppermute(T, "a", [(0, 1)]),
    "all_to_all": lambda: sf.all_to_all(T, "a", split_dim=0, concat_dim=1),
    "axis_index": lambda: sf.axis_index("a"),
    "axis_size": lambda: sf.axis_size("a"),
    "fold_in": lambda: sf.fold_in(0, "a"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_without_a_mesh_a_name_means_nothing(name: str) -> None:
    with pytest.raises(NameError) as caught:
        OUTSIDE[name]()
    assert [word for word in [name, "'a'", "no mesh in scope", "shard_map"] if word not in str(caught.value)] == []


def test_the_call_after_a_mistake_works() -> None:
    def body() -> Any:
        on = mesh()
        total = sf.shard_map(lambda x: sf.psum(x.sum(), "a").item(), mesh=on, in_specs=P("a"), out_specs=...)
        found = []
        for x in (torch.tensor(1.0), torch.ones(2), torch.tensor(1.0), torch.ones(3)):
            try:
                found.append(total(x))
            except ValueError:
                found.append("refused")
        return found

    assert world(4).run(body) == [["refused", 4.0, "refused", 6.0]] * 4


# --- flat shards where parameters are meant, and tensors that are no parameters ---


FLAT: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "item": (lambda flat: flat["w"], TypeError, "cannot be indexed"),
    "loop": (list, TypeError, "cannot be indexed"),
    "contained": (lambda flat: "w" in flat, TypeError, "cannot be indexed"),
    "length": (len, TypeError, "has no length"),
    "shape": (lambda flat: flat.shape, AttributeError, "has no .shape"),
    "parameter": (lambda flat: flat.w, AttributeError, "has no .w"),
    "to": (lambda flat: flat.to(torch.bfloat16), AttributeError, "has no .to"),
    "plus": (lambda flat: flat + 1, TypeError, "has no arithmetic"),
    "minus": (lambda flat: 1 - flat, TypeError, "has no arithmetic"),
    "negative": (lambda flat: -flat, TypeError, "has no arithmetic"),
    "times a tensor": (lambda flat: flat * T, TypeError, "has no arithmetic"),
    "product": (lambda flat: T @ flat, TypeError, "FlatShard"),
    "of torch": (lambda flat: torch.sum(flat), TypeError, "torch's sum takes no FlatShard"),
    "functional": (lambda flat: torch.nn.functional.linear(T, flat), TypeError, "torch's linear takes no FlatShard"),
    "in a list": (lambda flat: torch.cat([flat, flat]), TypeError, "torch's cat takes no FlatShard"),
}


def flat_shard() -> tuple[Any, Any]:
    on = mesh(data=1)
    params = sf.shard({"blocks": [{"w": torch.ones(4, 4)}]}, on, sf.full_shard("data"))
    return params["blocks"][0], lambda: sf.unshard(params, on)


@pytest.mark.parametrize("row", FLAT)
def test_a_flat_shard_in_place_of_parameters_says_how_to_get_them(row: str) -> None:
    act, kind, says = FLAT[row]

    def body() -> str:
        with pytest.raises(kind) as caught:
            act(flat_shard()[0])
        return str(caught.value)

    (told,) = world(1, "threads").run(body)
    assert says in told
    for word in (
        "stage 'blocks.0'",
        "shardfn.stage",
        "shardfn.unshard(params)",
        "shardfn.shards.local_parameters(flat)",
    ):
        assert word in told


def test_a_flat_shard_is_still_what_it_was() -> None:
    def body() -> None:
        flat, whole = flat_shard()
        assert flat
        assert not hasattr(flat, "shape")
        assert torch.equal(copy.deepcopy(flat).values, flat.values)
        assert torch.equal(pickle.loads(pickle.dumps(flat)).values, flat.values)
        assert whole()["blocks"][0]["w"].sum() == 16
        assert repr(flat).startswith("FlatShard(blocks.0: float32, whole")
        cast = optree.tree_map(lambda x: x.to(torch.bfloat16), flat)
        assert repr(cast).startswith("FlatShard(now bfloat16, 64 B; blocks.0: float32")

    world(1, "threads").run(body)


def sparse() -> Any:
    return {"w": torch.eye(3).to_sparse()}


def tensors() -> Any:
    return {"w": torch.eye(3)}


STRANGE: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "shard": (lambda: sf.shard(sparse(), mesh(a=1), sf.full_shard("a")), ["w is torch.sparse_coo", "to_dense()"]),
    "init": (lambda: sf.init({"w": lambda g: sparse()["w"]}, 0), ["w is torch.sparse_coo", "to_dense()"]),
    "init_sharded": (
        lambda: sf.init_sharded({"w": lambda g: sparse()["w"]}, 0, mesh(a=1), sf.full_shard("a")),
        ["w is torch.sparse_coo", "to_dense()"],
    ),
    "shard_named": (
        lambda: sf.shards.shard_named(sparse().items(), tensors(), mesh(a=1), sf.full_shard("a")),
        ["w is torch.sparse_coo", "to_dense()"],
    ),
    "no tensor by name": (
        lambda: sf.shards.shard_named([("w", 3)], tensors(), mesh(a=1), sf.full_shard("a")),  # type: ignore[list-item]
        ["'w' is of type int, not a tensor"],
    ),
    "meta": (
        lambda: sf.shard({"w": torch.ones(3, device="meta")}, mesh(a=1), sf.full_shard("a")),
        ["w is on the meta device", "fill="],
    ),
    "optimizer": (lambda: sf.optim.adamw(0.1).init(sparse()), ["w is torch.sparse_coo", "to_dense()"]),
    "gradient": (lambda: step_with(sparse()), ["w: the gradient is torch.sparse_coo", "to_dense()"]),
    "meta gradient": (
        lambda: step_with({"w": torch.ones(3, 3, device="meta")}),
        ["w: the gradient is on meta, the parameter on cpu"],
    ),
    "norms": (lambda: sf.optim.global_norm(sparse()), ["w is torch.sparse_coo", "to_dense()"]),
    "tokens": (lambda: sf.parallel.embedding(torch.ones(3), T), ["tokens are torch.float32 (3,)", "integers"]),
    "table": (lambda: sf.parallel.embedding(torch.ones(3).long(), T[0]), ["table must have shape [v, d]", "got (6,)"]),
}


def step_with(grads: Any) -> Any:
    optimizer = sf.optim.adamw(0.1)
    return optimizer.step(tensors(), grads, optimizer.init(tensors()))


@pytest.mark.parametrize("row", STRANGE)
def test_a_tensor_that_is_no_parameter_is_named(row: str) -> None:
    act, says = STRANGE[row]
    for error in world(1, "threads").errors(act):
        assert isinstance(error, (TypeError, ValueError))
        assert [word for word in says if word not in str(error)] == []


def test_an_embedding_without_an_axis_is_the_ordinary_one() -> None:
    tokens = torch.tensor([[0, 3], [2, 1]])
    assert torch.equal(sf.parallel.embedding(tokens, T), T[tokens])


@pytest.mark.parametrize("package", ["cloudpickle", "hypothesis"])
def test_a_package_that_is_missing_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("shardfn.testing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=f"needs {package}, .*pip install '.\\[testing\\]'"):
        importlib.import_module("shardfn.testing").strategies  # noqa: B018  # loaded when it is asked for


# --- what is passed in another way than it is meant ---


def net(**options: Any) -> tuple[Any, Any, Any, Any]:
    """Parameters of two stages, gradients of them, and a stage."""
    makers = {name: lambda g: {"w": torch.randn(6, 6, generator=g)} for name in ("body", "head")}
    params = sf.init_sharded(makers, 0, mesh(a=1), sf.full_shard("a"))
    layer = sf.stage(lambda p, x: x @ p["w"], **options)
    return params, optree.tree_map(torch.ones_like, params), layer, sf.optim.adamw(0.1)


def mixes(way: Any = lambda f, p: f(p), **options: Any) -> Any:
    params, _, layer, _ = net(**options)
    return way(lambda p: layer(p, T).float().sum(), params["body"])


def checkpointed(reentrant: bool) -> Any:
    params, _, layer, _ = net()
    seen = layer(params["body"], T)  # outside
    with torch.no_grad():
        target = layer(params["head"], seen)

    def loss(params: Any) -> Any:
        with torch.no_grad():
            layer(params["body"], T)  # nobody's gradient
        x = T.clone().requires_grad_()  # without one that needs a gradient torch warns
        made = checkpoint(layer, params["body"], x, use_reentrant=reentrant)
        return (made - target).square().sum()

    return sf.value_and_grad(loss)(params)[1]["body"].values.abs().sum()


def part(of: str) -> Any:
    params, grads, _, optimizer = net()
    state = optimizer.init(params)
    given = {"params": params, "grads": grads, "state": state}
    given[of] = given[of]["head"] if of != "state" else optimizer.init(params["head"])
    return optimizer.step(*given.values())


def writes(derivative: Callable[..., Any]) -> None:
    """A loss that changes a shard where it lies."""
    flat = sf.shard({"body": {"w": torch.ones(4, 6)}}, mesh(a=1), sf.full_shard("a"))
    derivative(lambda p: optree.tree_leaves(p)[0].mul_(0.9).sum())(flat)


MEANT: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "gpu": (lambda: sf.make_mesh(a=1, device="gpu"), ValueError, ["device='gpu'", 'device="cuda"']),
    "number": (lambda: sf.make_mesh(a=1, device="cpu:0"), ValueError, ["device='cpu:0'", "without a number", '"cpu"']),
    "debug all": (lambda: sf.debug("all"), TypeError, ["debug('all')", "debug(memory=True)"]),
    "debug nothing": (lambda: sf.debug(), TypeError, ["debug()", "debug(memory=True)"]),
    "layers": (lambda: sf.layers({"a": T}), TypeError, ["layers", "dict", "keys", "params.values()"]),
    "seed": (lambda: sf.init({"w": lambda g: T}, 0.5), TypeError, ["seed is an int", "0.5", "float"]),  # type: ignore[arg-type]
    "part of gradients": (lambda: part("grads"), ValueError, ["only a part", "a flat shard of head", "[body, head]"]),
    "part of parameters": (lambda: part("params"), ValueError, ["only a part", "flat shard of head", "[body, head]"]),
    "part of state": (
        lambda: part("state"),
        ValueError,
        ["mean is a flat shard of head", "a part of the other's tree"],
    ),
    "gather_dtype": (
        lambda: mixes(gather_dtype=torch.bfloat16),
        RuntimeError,
        ["'body'", "parameters of torch.bfloat16", "other arguments of torch.float32"],
    ),
    "input_dtype": (
        lambda: mixes(input_dtype=torch.bfloat16),
        RuntimeError,
        [
            "parameters of torch.float32",
            "arguments of torch.bfloat16",
            "with input_dtype=torch.bfloat16",
            "Pass the same gather_dtype",
        ],
    ),
    "dtypes in jvp": (
        lambda: mixes(lambda f, p: torch.func.jvp(f, (p,), (p,)), gather_dtype=torch.bfloat16),
        RuntimeError,
        ["parameters of torch.bfloat16", "with gather_dtype=torch.bfloat16"],
    ),
    "writes": (lambda: writes(sf.grad), RuntimeError, ["writes into a parameter", "p * 0.9 for p.mul_(0.9)"]),
    "writes in parts": (
        lambda: writes(lambda f: sf.accumulate(lambda p, _: f(p), [0, 1])),
        RuntimeError,
        ["writes into a parameter", "p * 0.9 for p.mul_(0.9)"],
    ),
}


@pytest.mark.parametrize("row", MEANT)
def test_what_is_passed_in_another_way_than_it_is_meant_says_which(row: str) -> None:
    act, kind, says = MEANT[row]
    for error in world(1, "threads").errors(act):
        assert isinstance(error, kind)
        assert [word for word in says if word not in str(error)] == [], str(error)


def test_right_dtypes_are_taken_and_another_error_stays_as_it_is() -> None:
    def body() -> None:
        mixes(gather_dtype=torch.bfloat16, input_dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes"):
            mixes(lambda f, p: sf.stage(lambda p, x: x @ p["w"], gather_dtype=torch.float64)(p, T.T))

    world(1, "threads").run(body)


def test_a_checkpoint_that_is_not_reentrant_brings_gradients() -> None:
    assert world(1, "threads").run(checkpointed, False)[0] > 0


def test_a_seed_of_any_kind_of_int_is_that_int() -> None:
    makers = {"w": lambda g: torch.rand(3, generator=g)}
    assert torch.equal(sf.init(makers, torch.tensor(3))["w"], sf.init(makers, 3)["w"])  # type: ignore[arg-type]
