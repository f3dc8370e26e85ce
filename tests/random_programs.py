"""Random programs of stages: generated as data, run sharded and on one process, and compared up to rounding.

A program is a model (parameters, functions for stages, and statements that call them), its sharding, and a sequence of
actions on the same parameters. Some are planned too, and the collectives of the plan compared with those of the run.
`python -m tests.random_programs --minutes 60` searches for programs whose results differ from those of one process, and
prints each of them as JSON, which `--replay` runs again from a file.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import json
import math
import os
import re
import sys
import tempfile
import time
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import shardfn as sf
import shardfn.optim as so
from shardfn.compiled import regions
from shardfn.mesh import waiting
from shardfn.mesh.groups import cpu_group
from shardfn.shards import layout
from shardfn.shards import placement as placements
from shardfn.testing import World, WorldError, WorldTimeout, world
from tests.lossless import WIRES

D = 3
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}


# --- a program ---


@dataclass(frozen=True)
class Leaf:
    """A parameter."""

    shape: tuple[int, ...] = (D, D)
    dtype: str = "float64"
    frozen: bool = False


@dataclass(frozen=True)
class Tree:
    """The parameters of one stage."""

    leaves: tuple[Leaf, ...] = (Leaf(),)
    form: str = "dict"


@dataclass(frozen=True)
class Op:
    """One line of a stage's function: a new register from registers `a`, `b` and parameters `p`, `q`."""

    kind: str = "matmul"
    a: int = 0
    b: int = 0
    p: int = 0
    q: int = 0
    wrap: str = ""


@dataclass(frozen=True)
class Out:
    """One output of a stage's function: made of its register `a`, counted from the last."""

    kind: str = "register"
    a: int = 0


@dataclass(frozen=True)
class Stage:
    """A stage's function and its options."""

    ops: tuple[Op, ...] = (Op(),)
    outs: tuple[Out, ...] = (Out(),)
    form: str = "tuple"
    remat: str = "no"
    reshard: str = "default"
    prefetch: int = 1
    low: bool = False
    wire: str = "no"


@dataclass(frozen=True)
class Line:
    """One line of the model: usually a call of stage `f` on parameters `p` (and `q`) and registers `a`, `b`."""

    kind: str = "call"
    f: int = 0
    p: int = 0
    q: int = 0
    a: int = 0
    b: int = 0
    around: str = ""


@dataclass(frozen=True)
class Action:
    """One action on the model.

    Attributes:
        rows: rows of data on each rank.
        uses: the registers that the loss reads, as bits counted from the last register.
        ragged: whether the ranks' losses read different registers.
        psum: whether the loss is summed over the ranks.
        inputs: whether the inputs require a gradient.
        n: a number whose meaning depends on the kind.
    """

    kind: str = "value_and_grad"
    rows: int = 2
    seed: int = 0
    uses: int = 1
    ragged: bool = False
    psum: bool = False
    inputs: bool = False
    n: int = 0


@dataclass(frozen=True)
class Home:
    """A mesh and a strategy on it."""

    mesh: tuple[tuple[str, int], ...] = (("shard", 2),)
    strategy: str = "full_shard"
    swapped: bool = False


@dataclass(frozen=True)
class Program:
    """A model, the sharding of its parameters, and actions on it."""

    home: Home = Home()
    other: Home = Home()
    trees: tuple[Tree, ...] = (Tree(),)
    stages: tuple[Stage, ...] = (Stage(),)
    lines: tuple[Line, ...] = (Line(),)
    actions: tuple[Action, ...] = (Action(),)
    ordered: bool = False
    fine: bool = False
    gather: str = ""
    scatter: str = ""
    optimizer: str = "sgd"
    donate: bool = True

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.home.mesh)


def written(program: Program) -> str:
    """The program as JSON, without default values."""
    return json.dumps(_sparse(program))


def _sparse(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {f.name: _sparse(x) for f in fields if (x := getattr(value, f.name)) != f.default}
    return [_sparse(x) for x in value] if isinstance(value, tuple) else value


def read(text: str) -> Program:
    return _revived(Program, json.loads(text))


def _revived(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        kinds = typing.get_type_hints(kind)
        return kind(**{name: _revived(kinds[name], x) for name, x in value.items()})  # type: ignore[operator]
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        each = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_revived(one, x) for one, x in zip(each, value, strict=True))
    return value


# --- inside a stage ---


class ByAttribute(Function):
    """A product that saves a factor as an attribute, which no hook for saved tensors sees."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.x, ctx.w = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.w, (g * ctx.x).sum(0)


class BySaving(Function):
    """The same product, which saves its factor with `save_for_backward`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class Interrupted(Exception):
    """The error that a program raises on purpose."""


class Fragile(Function):
    """The identity, whose backward fails."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise Interrupted


class Body:
    """One run of a stage's function."""

    def __init__(self, model: Model, p: Any, inputs: Sequence[Tensor], tokens: Tensor) -> None:
        self.model, self.registers, self.tokens = model, list(reversed(inputs)), tokens
        self.inputs = list(inputs)
        self.leaves = [x for x in optree.tree_leaves(p) if isinstance(x, Tensor)]

    def run(self, op: Op, *registers: Tensor) -> Tensor:
        before, self.registers = self.registers, list(registers)
        try:
            return OPS[op.kind](self, op)
        finally:
            self.registers = before

    def r(self, i: int) -> Tensor:
        return last(self.registers, i)

    def leaf(self, i: int) -> Tensor:
        x, dtype = self.leaves[i % len(self.leaves)], self.inputs[0].dtype
        return x if x.dtype == dtype else x.to(dtype)

    def spread(self, i: int, n: int) -> Tensor:
        """`n` numbers of a parameter, as a view if it has that many."""
        flat = self.leaf(i).reshape(-1)
        if flat.numel() == 0:
            return flat.sum() + torch.full((n,), 0.5, dtype=flat.dtype, device=flat.device)
        return flat[:n] if flat.numel() >= n else flat[torch.arange(n) % flat.numel()]

    def v(self, i: int) -> Tensor:
        return self.spread(i, D)

    def m(self, i: int) -> Tensor:
        return self.spread(i, D * D).view(D, D)

    def s(self, i: int) -> Tensor:
        return self.spread(i, 1).view(())


def _inplace_index(f: Body, o: Op) -> Tensor:
    y = f.r(o.a) * f.v(o.p)
    y[..., 0] = f.v(o.q)[0]
    return y


def _inplace_register(f: Body, o: Op) -> Tensor:
    """An in-place operation on a value that the function has computed."""
    y = f.r(o.a)
    if any(y is x for x in f.inputs):
        y = y * f.v(o.p)
    return y.mul_(1.25)


def _hooked(y: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    if y.requires_grad:
        y.register_hook(hook)
    return y


def _hooked_parameter(f: Body, o: Op) -> Tensor:
    _hooked(f.leaves[o.p % len(f.leaves)], lambda g: 2 * g)
    return f.r(o.a) * f.v(o.p)


def _by_grad(f: Body, o: Op) -> Tensor:
    return torch.func.grad(lambda r: torch.tanh(r @ f.m(o.p)).square().sum())(f.r(o.a))


def _by_vjp(f: Body, o: Op) -> Tensor:
    y, pull = torch.func.vjp(lambda w: torch.tanh(f.r(o.a) * w), f.v(o.p))  # type: ignore[misc]
    return y + pull(y)[0]


def _by_jvp(f: Body, o: Op) -> Tensor:
    return torch.func.jvp(lambda r: torch.tanh(r * f.v(o.p)), (f.r(o.a),), (f.r(o.b),))[1]


def _by_vmap(f: Body, o: Op) -> Tensor:
    return torch.func.vmap(lambda r: torch.tanh(r @ f.m(o.p)))(f.r(o.a))


def _attention(f: Body, o: Op) -> Tensor:
    x, y = f.r(o.a), f.r(o.b)
    return torch.softmax(x @ f.m(o.p) @ y.transpose(-1, -2), -1) @ y


def _side(f: Body, o: Op) -> Tensor:
    """A value that leaves the function by a side effect."""
    y = torch.tanh(f.r(o.a) @ f.m(o.p))
    f.model.box.append(y)
    return y * f.v(o.q)


def _write(f: Body, o: Op) -> Tensor:
    with torch.no_grad():
        f.leaves[o.p % len(f.leaves)].mul_(1)
    return f.r(o.a) * f.v(o.p)


def _write_input(f: Body, o: Op) -> Tensor:
    f.inputs[0].detach().mul_(1.5)
    return f.r(o.a) * f.v(o.p)


def _parts(f: Body, o: Op) -> Tensor:
    x = f.r(o.a)
    return torch.cat([x[..., :1] * f.v(o.p)[:1], x[..., 1:]], -1)


OPS: dict[str, Callable[[Body, Op], Tensor]] = {
    "matmul": lambda f, o: torch.tanh(f.r(o.a) @ f.m(o.p)),
    "mul": lambda f, o: f.r(o.a) * f.v(o.p),
    "add": lambda f, o: f.r(o.a) + f.v(o.p),
    "sum": lambda f, o: f.r(o.a) + f.r(o.b),
    "scale": lambda f, o: f.r(o.a) * f.s(o.p),
    "linear": lambda f, o: torch.tanh(F.linear(f.r(o.a), f.m(o.p), f.v(o.q))),
    "product": lambda f, o: torch.tanh(f.r(o.a) * f.r(o.b)),
    "rms": lambda f, o: f.r(o.a) * (f.r(o.a).square().mean(-1, keepdim=True) + 1).rsqrt() * (1 + f.v(o.p)),
    "layer_norm": lambda f, o: F.layer_norm(f.r(o.a), (D,), f.v(o.p), f.v(o.q), eps=1.0),
    "attention": _attention,
    "root": lambda f, o: (f.r(o.a).square() + f.v(o.p).square() + 0.5).sqrt(),
    "bump": lambda f, o: torch.exp(-(f.r(o.a) * f.v(o.p)).square()),
    "embed": lambda f, o: f.r(o.a) + f.m(o.p)[f.tokens % D],
    "embedding": lambda f, o: f.r(o.a) + F.embedding(f.tokens % D, f.m(o.p)),
    "parts": _parts,
    "total": lambda f, o: f.r(o.a) * torch.tanh(f.leaf(o.p).sum()),
    "where": lambda f, o: torch.where(f.r(o.a) > 0, f.r(o.a) * f.v(o.p), f.v(o.q)),
    "detach": lambda f, o: f.r(o.a).detach() * f.v(o.p),
    "detach_parameter": lambda f, o: f.r(o.a) * f.v(o.p).detach(),
    "inplace_mul": lambda f, o: (f.r(o.a) * 1.0).mul_(f.v(o.p)),
    "inplace_tanh": lambda f, o: (f.r(o.a) @ f.m(o.p)).tanh_(),
    "inplace_index": _inplace_index,
    "inplace_register": _inplace_register,
    "attribute": lambda f, o: ByAttribute.apply(f.r(o.a), f.v(o.p)),
    "saving": lambda f, o: BySaving.apply(f.r(o.a), f.v(o.p)),
    "hook": lambda f, o: _hooked(f.r(o.a) * 1.5, lambda g: 3 * g),
    "hook_with_parameter": lambda f, o: _hooked(f.r(o.a) * 1.5, lambda g: g * f.v(o.p)),
    "hook_on_parameter": _hooked_parameter,
    "closed": lambda f, o: f.r(o.a) * f.model.closed.to(f.r(o.a).dtype),
    "dropout": lambda f, o: F.dropout(f.r(o.a), 0.5) * f.v(o.p),
    "func_grad": _by_grad,
    "func_vjp": _by_vjp,
    "func_jvp": _by_jvp,
    "func_vmap": _by_vmap,
    "side": _side,
    "write": _write,
    "write_input": _write_input,
    "nested": lambda f, o: f.model.nested(f.model.shards[0], f.r(o.a)) * f.v(o.p),
}
SMOOTH = list(OPS)[: list(OPS).index("inplace_mul")]  # the ops that every transform supports
FUNCS = ["func_grad", "func_vjp", "func_jvp", "func_vmap"]
ILLEGAL = ["side", "write", "write_input", "nested"]


Wrap = Callable[..., Any]  # `(f, *tensors) -> f(*tensors)`


def _checkpointed(reentrant: bool) -> Wrap:
    return lambda f, *xs: checkpoint(f, *xs, use_reentrant=reentrant)


def _inside(context: Callable[[], Any]) -> Wrap:
    def wrapped(f: Callable[..., Any], *xs: Tensor) -> Any:
        with context():
            return f(*xs)

    return wrapped


WRAPS: dict[str, Wrap] = {
    "": lambda f, *xs: f(*xs),
    "no_grad": _inside(torch.no_grad),
    "autocast_off": _inside(lambda: torch.autocast("cpu", enabled=False)),
    "checkpoint": _checkpointed(False),
    "reentrant": _checkpointed(True),
    "save_on_cpu": _inside(save_on_cpu),
    "hooks": _inside(lambda: saved_tensors_hooks(lambda x: x, lambda x: x)),
    "hooks_with_copies": _inside(lambda: saved_tensors_hooks(lambda x: x.clone(), lambda x: x)),
}

OUTS: dict[str, Callable[[Body, Out], Any]] = {
    "register": lambda f, o: f.r(o.a),
    "view": lambda f, o: f.r(o.a).view_as(f.r(o.a)),
    "transpose": lambda f, o: f.r(o.a).transpose(-1, -2),
    "half": lambda f, o: f.r(o.a)[..., :2],
    "detached": lambda f, o: f.r(o.a).detach(),
    "input": lambda f, o: f.inputs[0],
    "input_view": lambda f, o: f.inputs[0][..., 1:],
    "mask": lambda f, o: f.r(o.a) > 0,
    "index": lambda f, o: f.r(o.a).argmax(-1),
    "none": lambda f, o: None,
    "number": lambda f, o: 1.5,
    "tokens": lambda f, o: f.tokens,
    "constant": lambda f, o: torch.full((1, D), 0.5, dtype=f.r(0).dtype, device=f.r(0).device),
    "parameter": lambda f, o: f.leaves[o.a % len(f.leaves)],
    "parameter_view": lambda f, o: f.v(o.a)[None],
}


# --- the model ---


@dataclass
class Data:
    """The data of one rank."""

    x: Tensor
    tokens: Tensor
    flag: Tensor  # the same on all ranks
    number: int


def data_of(action: Action, rank: int, x: Tensor | None = None) -> Data:
    x = x_of(action, rank) if x is None else x
    number = 100 * action.seed + rank
    return Data(x, tokens_of(action.rows, number), torch.tensor(action.seed % 2), number)


def x_of(action: Action, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * action.seed + rank)
    return torch.randn(action.rows, D, generator=generator, dtype=torch.float64)


def tokens_of(rows: int, number: int) -> Tensor:
    return torch.tensor([(17 * number + 5 * k) % 11 for k in range(rows)])


class Model:
    """A program's model, whose stages are wrapped by `wrap`, and whose layers by `layers`."""

    def __init__(self, program: Program, wrap: Callable[..., Any], layers: Callable[[Any], Any]) -> None:
        self.program, self.layers = program, layers
        self.closed: Tensor = torch.linspace(0.5, 1.5, D, dtype=torch.float64)
        self.box: list[Tensor] = []
        self.shards: Any = ()
        self.runs, self.fails_at, self.fails_in = 0, -1, ""
        self.functions = [wrap(self.function(number, stage), stage) for number, stage in enumerate(program.stages)]
        self.nested: Any = wrap(lambda p, x: torch.tanh(x * optree.tree_leaves(p)[0].sum()), Stage())
        self.random = any(op.kind == "dropout" for stage in program.stages for op in stage.ops)

    def function(self, number: int, stage: Stage) -> Any:
        def f(p: Any, x: Tensor, y: Tensor, *, tokens: Tensor, k: float, none: None) -> Any:
            body = Body(self, p, [x, y], tokens)
            self.runs += 1
            for op in stage.ops:
                body.registers.append(WRAPS[op.wrap](functools.partial(body.run, op), *body.registers))
            if self.runs == self.fails_at:
                if self.fails_in == "forward":
                    raise Interrupted
                body.registers[-1] = Fragile.apply(body.r(0))
            outs = [OUTS[out.kind](body, out) for out in stage.outs]
            if stage.form == "dict":
                return {f"o{i}": out for i, out in enumerate(outs)}
            return outs[0] if stage.form == "single" and len(outs) == 1 else tuple(outs)

        f.__name__ = f"f{number}"
        return f

    def run(self, ps: Any, data: Data, uses: int) -> tuple[Tensor, Tensor]:
        """The loss, and a number from every register."""
        self.box.clear()
        self.shards = ps
        if self.random:
            torch.manual_seed(data.number)
        ps = self.layers(ps) if self.program.ordered else ps
        registers = [data.x]
        for line in self.program.lines:
            LINES[line.kind](self, line, ps, registers, data)
        read = [r for i, r in enumerate(reversed(registers)) if uses >> i & 1] or registers[-1:]
        loss = torch.stack([r.square().sum() + r.sum() for r in read]).sum()
        return loss, torch.stack([r.sum() for r in registers])

    def call(self, line: Line, p: Any, registers: list[Tensor], data: Data) -> None:
        """Calls a stage; its results become registers."""
        x, y = last(registers, line.a), last(registers, line.b)
        f = self.functions[line.f % len(self.functions)]

        def called(x: Tensor, y: Tensor) -> Any:
            return taken(f(p, x, y, tokens=data.tokens, k=2.0, none=None), x)

        registers += WRAPS[line.around](called, x, y)


def last(registers: list[Tensor], i: int) -> Tensor:
    """The register `i` places before the last."""
    return registers[-1 - i % len(registers)]


def taken(outputs: Any, x: Tensor) -> tuple[Tensor, ...]:
    """The results of a stage, as registers."""
    found: list[Tensor] = []
    for leaf in optree.tree_leaves(outputs):
        if not isinstance(leaf, Tensor):
            found.append(x * leaf)
        elif not leaf.is_floating_point():
            found.append(torch.tanh(x * leaf.to(x.dtype).view(*leaf.shape[: x.ndim - 1], -1)))
        elif leaf.shape == x.shape:
            found.append(leaf)
        elif leaf.shape == x.mT.shape:
            found.append(leaf.mT)
        elif leaf.shape[-1] < D:
            found.append(F.pad(leaf, (0, D - leaf.shape[-1])))
        else:
            found.append(x * leaf)
    return tuple(found)


def _call(model: Model, line: Line, ps: Any, registers: list[Tensor], data: Data) -> None:
    model.call(line, ps[line.p % len(ps)], registers, data)


def _pair(model: Model, line: Line, ps: Any, registers: list[Tensor], data: Data) -> None:
    model.call(line, {"one": ps[line.p % len(ps)], "two": [ps[line.q % len(ps)]]}, registers, data)


def _layers(model: Model, line: Line, ps: Any, registers: list[Tensor], data: Data) -> None:
    for p in model.layers(list(ps)):
        model.call(line, p, registers, data)
        line = dataclasses.replace(line, a=0)


def _branch(model: Model, line: Line, ps: Any, registers: list[Tensor], data: Data) -> None:
    model.call(line, ps[(line.p if data.flag.item() else line.q) % len(ps)], registers, data)


def _caller_inplace(change: Callable[[Tensor], Any]) -> Any:
    def inplace(model: Model, line: Line, ps: Any, registers: list[Tensor], data: Data) -> None:
        x = last(registers, line.a)
        if x is not registers[0]:
            change(x)

    return inplace


def _caller(compute: Callable[[Tensor, Tensor], Tensor]) -> Any:
    def line_of(model: Model, line: Line, ps: Any, registers: list[Tensor], data: Data) -> None:
        registers.append(compute(last(registers, line.a), last(registers, line.b)))

    return line_of


def _first_row(x: Tensor) -> None:
    x[0] += 1


def _from_box(model: Model, line: Line, ps: Any, registers: list[Tensor], data: Data) -> None:
    registers.append(registers[-1] + model.box[-1] if model.box else registers[-1] * 1.5)


LINES: dict[str, Callable[[Model, Line, Any, list[Tensor], Data], None]] = {
    "call": _call,
    "pair": _pair,
    "layers": _layers,
    "branch": _branch,
    "add": _caller(lambda x, y: x + y),
    "product": _caller(lambda x, y: torch.tanh(x * y)),
    "detach": _caller(lambda x, y: x.detach() * y),
    "inplace": _caller_inplace(lambda x: x.mul_(1.25)),
    "inplace_row": _caller_inplace(_first_row),
    "box": _from_box,
}


# --- the parameters and their sharding ---


def trees_of(program: Program) -> list[Any]:
    """The whole parameters."""
    return [_tree(tree, number) for number, tree in enumerate(program.trees)]


def _tree(tree: Tree, number: int) -> Any:
    generator = torch.Generator().manual_seed(77 + number)
    leaves = [_leaf(leaf, generator) for leaf in tree.leaves]
    named = {f"p{i}": leaf for i, leaf in enumerate(leaves)}
    match tree.form:
        case "list":
            return leaves
        case "single":
            return leaves[0] if len(leaves) == 1 else leaves
        case "nested":
            return {"a": [leaves[0], None], "b": {"c": tuple(leaves[1:])}, "n": None}
    return named


def _leaf(leaf: Leaf, generator: torch.Generator) -> Tensor:
    if leaf.dtype == "int64":
        return torch.randint(0, 3, leaf.shape, generator=generator)
    values = torch.randn(leaf.shape, generator=generator, dtype=torch.float64) * 0.7
    return values.to(DTYPES[leaf.dtype])


def leaves_of(program: Program) -> list[Leaf]:
    """The leaves of all trees, in order."""
    return [leaf for tree in program.trees for leaf in tree.leaves]


def trains(leaf: Leaf) -> bool:
    return leaf.dtype != "int64" and not leaf.frozen


def names_of(tree: Any) -> list[str]:
    accessors = optree.tree_accessors(tree)
    return [".".join(str(getattr(entry, "field", entry.entry)) for entry in accessor) for accessor in accessors]


def placement(home: Home) -> sf.Placement:
    names = tuple(name for name, _ in home.mesh)
    if home.strategy in ("ddp", "zero1", "shard_grad_op", "full_shard", "mics"):
        return getattr(placements, home.strategy)(names[::-1] if home.swapped else names)
    shard, replica = (names[0], names[1]) if home.swapped else (names[1], names[0])
    return getattr(placements, home.strategy)(shard=shard, replica=replica)


def _keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


REMAT: dict[str, Any] = {
    "no": False,
    "yes": True,
    "offload": "offload",
    "ops": [torch.ops.aten.mm.default, torch.ops.aten.mul.Tensor],
    "policy": _keeps_products,
}
RESHARD = {"default": None, "yes": True, "no": False}


def staged(f: Any, stage: Stage) -> Any:
    more: dict[str, Any] = {"remat": REMAT[stage.remat], "reshard": RESHARD[stage.reshard], "prefetch": stage.prefetch}
    more |= WIRES[stage.wire]
    if stage.low:
        more |= {"gather_dtype": torch.float32, "input_dtype": torch.float32, "output_dtype": torch.float64}
    return sf.stage(f, **more)


def plainly(apart: bool) -> Callable[[Any, Stage], Any]:
    """A wrapper that replaces `sf.stage` for whole parameters.

    With `apart`, inputs and outputs are copied, but for an output that is an input.
    """

    def wrap(f: Any, stage: Stage) -> Any:
        def to(dtype: torch.dtype) -> Callable[[Any], Any]:
            def cast(x: Any) -> Any:
                if not isinstance(x, Tensor):
                    return x
                return x.to(dtype) if stage.low and x.is_floating_point() else x

            return cast

        def own(x: Any) -> Any:
            return x.clone() if apart and isinstance(x, Tensor) else x

        def called(p: Any, *args: Any, **kwargs: Any) -> Any:
            p = optree.tree_map(lambda x: to(torch.float32)(x.view_as(x)), p)
            given = [to(torch.float32)(own(x)) for x in args]
            out = f(p, *given, **kwargs)
            copies = {id(y): own(y) for y in optree.tree_leaves(out)}  # a tensor that is returned twice stays one
            copies |= {id(x): before for x, before in zip(given, args, strict=True)}
            return optree.tree_map(lambda y: to(torch.float64)(copies[id(y)]), out)

        return called

    return wrap


# --- actions, sharded and on one process ---

Found = dict[str, Any]  # lists of tensors by name


def uses_of(action: Action, rank: int) -> int:
    ragged = action.ragged and action.kind in ("value_and_grad", "accumulate", "optimize")  # else an error
    return action.uses >> (rank if ragged else 0)


def psums(action: Action) -> bool:
    return action.psum and action.kind == "value_and_grad"


def steps_of(action: Action) -> list[Action]:
    """An action's steps, one for each of its batches."""
    many = {"accumulate": 1 + action.n % 3, "two": 2}.get(action.kind, 1)
    return [dataclasses.replace(action, seed=action.seed + 7 * k) for k in range(many)]


def direction(program: Program, seed: int) -> list[Any]:
    """Random numbers in the shapes of the parameters."""
    generator = torch.Generator().manual_seed(31 + seed)
    return optree.tree_map(
        lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype) if x.is_floating_point() else x,
        trees_of(program),
    )


def sines(tree: Any) -> Tensor:
    # A rounding of a large number in 16 bits would be a good part of a period.
    each = [(x / 64 if x.dtype.itemsize == 2 else x).sin().sum().double() for x in optree.tree_leaves(tree)]
    return torch.stack(each or [torch.zeros((), dtype=torch.float64)]).sum()


DEFERS: list[Any] = ["replicas", "all", "nothing"]
MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]
CHANGES = ("optimize", "inplace", "replace", "reload")
FURTHER = ("hvp", "grad_grad", "func_grad_grad", "double", "jvp", "vmap", "per_sample")


class Sharded:
    """A program on this rank."""

    def __init__(self, program: Program, folder: str, device: str | None = "cpu") -> None:
        self.program, self.folder, self.device = program, folder, device
        self.model = Model(program, staged, sf.layers)
        self.settle(program.home, trees_of(program))
        self.state: Any = None

    def settle(self, home: Home, trees: Any) -> None:
        self.mesh = sf.make_mesh(**dict(home.mesh), device=self.device)
        self.rank, self.axes = self.mesh.get_rank(), tuple(name for name, _ in home.mesh)
        self.placement = placement(home)
        self.params = self.shard(trees)

    def shard(self, trees: Any) -> Any:
        names = zip(names_of(trees), leaves_of(self.program), strict=True)
        frozen = [re.escape(name) for name, leaf in names if leaf.frozen]
        return sf.shard(trees, self.mesh, self.placement, frozen=frozen)

    def optimizer(self) -> Any:
        made: Any = {"sgd": lambda **more: so.sgd(0.05, momentum=0.9, **more)}.get(
            self.program.optimizer, lambda **more: so.adamw(0.05, eps=0.1, weight_decay=0.1, **more)
        )
        return made(donate=self.program.donate)

    def act(self, action: Action) -> Found:
        with contextlib.ExitStack() as stack:
            chosen = {"all_gather": self.program.gather, "reduce_scatter": self.program.scatter}
            stack.enter_context(sf.collectives.transports(self.mesh, **{op: how for op, how in chosen.items() if how}))
            return getattr(self, action.kind)(action)

    def loss(self, action: Action, ps: Any, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        value, aux = self.model.run(ps, data_of(action, self.rank, x), uses_of(action, self.rank))
        return (sf.psum(value, self.axes) if psums(action) else value), aux

    def x(self, action: Action) -> Tensor:
        return x_of(action, self.rank)

    # first derivatives

    def forward(self, action: Action) -> Found:
        with MODES[action.n % 3]():
            value, aux = self.loss(action, self.params)
            return {"value": [value.clone()], "aux": [aux.clone()]}

    def value_and_grad(self, action: Action) -> Found:
        def run(ps: Any, x: Tensor) -> Any:
            f = sf.value_and_grad(lambda ps, x: self.loss(action, ps, x), (0, 1), has_aux=True)
            if not action.inputs:
                f = sf.value_and_grad(lambda ps: self.loss(action, ps), has_aux=True)
                (value, aux), gradient = f(ps)
                return value, aux, gradient, None
            (value, aux), (gradient, gx) = f(ps, x)
            return value, aux, gradient, gx

        value, aux, gradient, gx = self.in_scope(action, run)(self.params, self.x(action))
        return {"value": [value], "aux": [aux], **self.whole(gradient), **({} if gx is None else {"inputs": [gx]})}

    def in_scope(self, action: Action, run: Any) -> Any:
        if not psums(action):
            return run
        data = sf.P(self.axes)
        outs = (sf.P(), ..., ..., data if action.inputs else ...)
        return sf.shard_map(run, mesh=self.mesh, in_specs=(..., data), out_specs=outs)

    def leaves(self) -> Any:
        def leaf(p: sf.shards.FlatShard) -> sf.shards.FlatShard:
            return sf.shards.FlatShard(p.values.detach().clone().requires_grad_(p.layout.trainable), p.layout)

        return optree.tree_map(leaf, self.params, is_leaf=lambda p: isinstance(p, sf.shards.FlatShard))

    def backward(self, action: Action, times: int = 1) -> Found:
        ps, x = self.leaves(), self.x(action).requires_grad_(action.inputs)
        self.model.closed.grad = None
        value, aux = self.loss(action, ps, x)
        for k in range(times if value.requires_grad else 0):
            value.backward(retain_graph=k < times - 1)
        return {"value": [value.detach()], "aux": [aux.detach()], **self.left(ps), **self.of_inputs(action, [x])}

    def retain(self, action: Action) -> Found:
        return self.backward(action, times=2)

    def two(self, action: Action) -> Found:
        """Two forward passes, then their backward passes, in either order."""
        ps = self.leaves()
        self.model.closed.grad = None
        xs = [self.x(one).requires_grad_(action.inputs) for one in steps_of(action)]
        losses = [self.loss(one, ps, x) for one, x in zip(steps_of(action), xs, strict=True)]
        for value, _ in losses if action.n % 2 else reversed(losses):
            if value.requires_grad:
                value.backward()
        found = {"value": [value.detach() for value, _ in losses], "aux": [aux.detach() for _, aux in losses]}
        return {**found, **self.left(ps), **self.of_inputs(action, xs)}

    def left(self, ps: Any) -> Found:
        nodes = optree.tree_leaves(ps, is_leaf=lambda p: isinstance(p, sf.shards.FlatShard))
        gradient = [sf.shards.FlatShard(zero_or(p.values), p.layout) for p in nodes if p.layout.trainable]
        closed = self.model.closed
        return {**self.whole(gradient), **({"closed": [zero_or(closed)]} if closed.requires_grad else {})}

    def of_inputs(self, action: Action, xs: list[Tensor]) -> Found:
        return {"inputs": [zero_or(x) for x in xs]} if action.inputs else {}

    def trained(self) -> list[sf.shards.FlatShard]:
        nodes = optree.tree_leaves(self.params, is_leaf=lambda p: isinstance(p, sf.shards.FlatShard))
        return [node for node in nodes if node.layout.trainable]

    def with_trained(self, found: Sequence[Any]) -> Any:
        """The parameters, with the trained ones replaced by `found`."""
        rest = iter(found)
        return optree.tree_map(
            lambda p: next(rest) if p.layout.trainable else p,
            self.params,
            is_leaf=lambda p: isinstance(p, sf.shards.FlatShard),
        )

    def scalar(self, action: Action) -> Callable[[Any], Tensor]:
        """The loss as a function of the trained parameters only, for torch.func."""
        return lambda trained: self.loss(action, self.with_trained(trained))[0]

    def func_grad(self, action: Action) -> Found:
        if not action.inputs:
            gradient, value = torch.func.grad_and_value(self.scalar(action))(self.trained())
            return {"value": [value], **self.whole(gradient)}
        take = torch.func.grad_and_value(lambda ps, x: self.loss(action, self.with_trained(ps), x)[0], argnums=(0, 1))
        (gradient, gx), value = take(self.trained(), self.x(action))
        return {"value": [value], **self.whole(gradient), "inputs": [gx]}

    def func_vjp(self, action: Action) -> Found:
        value, pull = torch.func.vjp(self.scalar(action), self.trained())  # type: ignore[misc]
        return {"value": [value], **self.whole(pull(torch.ones_like(value))[0])}

    def accumulate(self, action: Action) -> Found:
        f = sf.accumulate(
            lambda ps, one: self.loss(one, ps), [(one,) for one in steps_of(action)], has_aux=True,
            defer=DEFERS[action.n // 3 % 3],
        )  # fmt: skip
        (value, aux), gradient = f(self.params)
        return {"value": [value], "aux": list(aux), **self.whole(gradient)}

    def interrupted(self, action: Action) -> Found:
        """Raises an exception while a stage runs, in forward or in backward."""
        model = self.model
        model.fails_at, model.fails_in = model.runs + 1 + action.n % 5, "forward" if action.n % 2 else "backward"
        try:
            return self.act(engine_of(action))
        except Interrupted:
            return {}
        finally:
            model.fails_at = -1

    # changes

    def optimize(self, action: Action) -> Found:
        optimizer = self.optimizer()
        if self.state is None:
            self.state = optimizer.init(self.params)
        value, gradient = sf.value_and_grad(lambda ps: self.loss(action, ps)[0])(self.params)
        self.params, self.state = optimizer.step(self.params, gradient, self.state)
        return {"value": [value], **self.now()}

    def compiled(self, action: Action) -> Found:
        """How far three steps of a compiled program are from those of the step as it is, relative to the largest."""

        data, uses = data_of(action, self.rank), uses_of(action, self.rank)

        def loss(ps: Any) -> Tensor:
            value, _ = self.model.run(ps, data, uses)
            return sf.psum(value, self.axes) if psums(action) else value

        def step(params: Any, state: Any) -> Any:
            value, gradient = sf.value_and_grad(loss)(params)
            params, state = self.optimizer().step(params, gradient, state)
            return params, state, value

        ends: list[list[Tensor]] = []
        with mock.patch.object(regions.Region, "function", lambda region: lambda xs: region.graph(*xs)):
            for run in (step, sf.compile(step, mesh=self.mesh)):
                params = optree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, self.params)
                state, values = self.optimizer().init(params), []
                for _ in range(3):
                    torch.manual_seed(action.seed)
                    params, state, value = run(params, state)
                    values.append(value)
                leaves = optree.tree_leaves((params, state, values))
                ends.append([torch.as_tensor(x) for x in leaves if isinstance(x, (Tensor, int, float))])
        pairs = [(x.double(), y.double()) for x, y in zip(*ends, strict=True) if x.numel()]
        off = [((x - y).abs().max() / (1 + x.abs().max())) for x, y in pairs]
        return {"off": [torch.stack(off).max()]}

    def inplace(self, action: Action) -> Found:
        with torch.no_grad():
            for p in self.trained():
                p.values.mul_(0.75)
        return self.now()

    def replace(self, action: Action) -> Found:
        def new(p: sf.shards.FlatShard) -> sf.shards.FlatShard:
            return sf.shards.FlatShard(p.values * 1.25, p.layout) if p.layout.trainable else p

        self.params = optree.tree_map(new, self.params, is_leaf=lambda p: isinstance(p, sf.shards.FlatShard))
        return self.now()

    def reload(self, action: Action) -> Found:
        """Saves parameters and state, and loads them on another mesh."""
        path = Path(self.folder) / f"at-{action.seed}-{action.n}"
        sf.checkpoint.save(path, {"params": self.params, "state": self.state}, overwrite=True)
        self.settle(self.program.other, optree.tree_map(torch.zeros_like, trees_of(self.program)))
        state = None if self.state is None else self.optimizer().init(self.params)
        found = sf.checkpoint.load(path, {"params": self.params, "state": state})
        self.params, self.state = found["params"], found["state"]
        return self.now()

    def collect(self, action: Action) -> Found:
        gc.collect()
        return {}

    def closes(self, action: Action) -> Found:
        """From here on, the tensor that stages close over requires a gradient, or no longer does."""
        self.model.closed.requires_grad_(not self.model.closed.requires_grad)
        return {}

    def now(self) -> Found:
        return {"params": [x.clone() for x in optree.tree_leaves(sf.unshard(self.params))]}

    # compositions of transforms

    def direction(self, action: Action) -> list[sf.shards.FlatShard]:
        """A direction for the trained parameters."""
        tree = self.shard(direction(self.program, action.seed))
        nodes = optree.tree_leaves(tree, is_leaf=lambda p: isinstance(p, sf.shards.FlatShard))
        return [node for node in nodes if node.layout.trainable]

    def hvp(self, action: Action) -> Found:
        take = torch.func.grad if action.n % 2 else sf.grad
        g, h = torch.func.jvp(take(self.scalar(action)), (self.trained(),), (self.direction(action),))  # type: ignore[misc]
        return {**self.whole(g), **self.whole(h, "second")}

    def grad_grad(self, action: Action, take: Any = sf.grad) -> Found:
        return self.whole(take(lambda p: sines(take(self.scalar(action))(p)))(self.trained()), "second")

    def func_grad_grad(self, action: Action) -> Found:
        return self.grad_grad(action, torch.func.grad)

    def double(self, action: Action) -> Found:
        ps = [sf.shards.FlatShard(p.values.detach().clone().requires_grad_(), p.layout) for p in self.trained()]
        tensors = [p.values for p in ps]
        first = again(self.scalar(action)(ps), tensors, create_graph=True)
        second = again(sines(list(first)), tensors)
        return self.whole(optree.tree_unflatten(optree.tree_structure(ps), second), "second")

    def jvp(self, action: Action) -> Found:
        value, tangent = torch.func.jvp(self.scalar(action), (self.trained(),), (self.direction(action),))  # type: ignore[misc]
        return {"value": [value], "tangent": [tangent]}

    def vmap(self, action: Action) -> Found:
        xs = torch.stack([self.x(action), self.x(action) * 0.5, -self.x(action)])
        return {"values": [torch.func.vmap(lambda x: self.loss(action, self.params, x)[0])(xs)]}

    def per_sample(self, action: Action) -> Found:
        xs = torch.stack([self.x(action), self.x(action) * 0.5, -self.x(action)])
        take = torch.func.grad if action.n % 2 else sf.grad
        f = take(lambda ps, x: self.loss(action, self.with_trained(ps), x)[0])
        return self.whole(torch.func.vmap(f, in_dims=(None, 0))(self.trained(), xs), stacked=3)

    def whole(self, gradient: Any, name: str = "gradient", stacked: int = 0) -> Found:
        """Whole gradients, from gradients of the trained parameters or of all parameters."""
        given = optree.tree_leaves(gradient, is_leaf=lambda p: isinstance(p, sf.shards.FlatShard))
        if len(given) == len(self.trained()):
            rest = iter(given)
        else:
            nodes = optree.tree_leaves(self.params, is_leaf=lambda p: isinstance(p, sf.shards.FlatShard))
            assert all((g.values is None) != p.layout.trainable for g, p in zip(given, nodes, strict=True))
            rest = iter([g for g in given if g.values is not None])

        def there(p: sf.shards.FlatShard) -> sf.shards.FlatShard:
            if p.layout.trainable:
                return next(rest)
            return sf.shards.FlatShard(torch.stack([p.values] * stacked) if stacked else p.values, p.layout)

        full = optree.tree_map(there, self.params, is_leaf=lambda p: isinstance(p, sf.shards.FlatShard))

        def unshard(tree: Any) -> tuple[Tensor, ...]:
            return tuple(optree.tree_leaves(sf.unshard(tree)))

        tensors = torch.func.vmap(unshard)(full) if stacked else unshard(full)
        pairs = zip(tensors, leaves_of(self.program), strict=True)
        return {name: [x.detach().clone() if trains(leaf) else None for x, leaf in pairs]}


class Plain:
    """The same program on whole parameters, for all ranks, with plain autograd."""

    def __init__(self, program: Program) -> None:
        self.program, self.n = program, program.ranks
        self.params = trees_of(program)
        self.closed = [Model(program, plainly(False), list).closed for _ in range(self.n)]
        self.steps: Any = None
        self.home = program.home

    def act(self, action: Action, apart: bool) -> tuple[list[Found], Callable[[], None]]:
        """The expected results of each rank, and a function that makes the action's changes."""
        self.models = [Model(self.program, plainly(apart), list) for _ in range(self.n)]
        for model, closed in zip(self.models, self.closed, strict=True):
            model.closed, closed.grad = closed, None
        if action.kind in CHANGES:
            return self.change(action)
        if action.kind == "closes":
            return [{}] * self.n, self.starts_or_stops
        if action.kind == "collect":
            return [{}] * self.n, lambda: None
        if action.kind == "compiled":
            self.change(dataclasses.replace(action, kind="optimize"))  # which may raise
            return [{"off": [torch.zeros((), dtype=torch.float64)]}] * self.n, lambda: None
        if action.kind in FURTHER:
            return getattr(self, action.kind)(action), lambda: None
        return self.first_order(action), lambda: None

    def starts_or_stops(self) -> None:
        for closed in self.closed:
            closed.requires_grad_(not closed.requires_grad)

    def leaves(self) -> tuple[Any, list[Tensor]]:
        ps = optree.tree_map(lambda x: x.detach().clone(), self.params)
        tensors = optree.tree_leaves(ps)
        for x, leaf in zip(tensors, leaves_of(self.program), strict=True):
            x.requires_grad_(trains(leaf))
        return ps, tensors

    def moving(self, tensors: list[Tensor]) -> list[Tensor]:
        return [x for x, leaf in zip(tensors, leaves_of(self.program), strict=True) if trains(leaf)]

    def spread(self, found: Sequence[Tensor]) -> list[Any]:
        """The gradients by leaf; None for leaves without one."""
        rest = iter(found)
        return [next(rest) if trains(leaf) else None for leaf in leaves_of(self.program)]

    def loss(self, action: Action, ps: Any, rank: int, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.models[rank].run(ps, data_of(action, rank, x), uses_of(action, rank))

    def first_order(self, action: Action) -> list[Found]:
        ps, tensors = self.leaves()
        if action.kind == "interrupted":
            action = engine_of(action)
        inputs = action.inputs and action.kind in ("value_and_grad", "backward", "retain", "two", "func_grad")
        batches, times = steps_of(action), 2 if action.kind == "retain" else 1
        xs = [[x_of(one, k).requires_grad_(inputs) for one in batches] for k in range(self.n)]
        runs = [[self.loss(one, ps, k, x) for one, x in zip(batches, xs[k], strict=True)] for k in range(self.n)]
        joint = torch.stack([value for each in runs for value, _ in each]).sum()
        if joint.requires_grad and action.kind != "forward":
            joint.backward()
        gradient = self.spread([zero_or(x) * times for x in self.moving(tensors)])
        found = []
        for k in range(self.n):
            values = [value.detach() for value, _ in runs[k]]
            if psums(action):
                values = [
                    torch.stack([runs[j][i][0].detach() for j in range(self.n)]).sum() for i in range(len(batches))
                ]
            if action.kind == "accumulate":
                values = [torch.stack(values).sum()]
            one: Found = {"value": values, "aux": [aux.detach() for _, aux in runs[k]], "gradient": gradient}
            if inputs:
                one["inputs"] = [zero_or(x) * times for x in xs[k]]
            if self.closed[k].requires_grad:
                one["closed"] = [zero_or(self.closed[k]) * times]
            found.append(one)
        return found

    def change(self, action: Action) -> tuple[list[Found], Callable[[], None]]:
        ps, tensors = self.leaves()
        moving = self.moving(tensors)
        if action.kind == "optimize":
            values = [self.loss(action, ps, k)[0] for k in range(self.n)]
            if (joint := torch.stack(values).sum()).requires_grad:
                joint.backward()
            for x in moving:
                x.grad = zero_or(x)
            steps = self.optimized(moving)
            each: list[Found] = [{"value": [value.detach()]} for value in values]
        else:
            with torch.no_grad():
                for x in moving:
                    x.mul_({"inplace": 0.75, "replace": 1.25}.get(action.kind, 1.0))
            each, steps = [{}] * self.n, self.steps

        def commit() -> None:
            self.params, self.steps = optree.tree_map(torch.detach, ps), steps

        return [{**one, "params": [x.detach().clone() for x in tensors]} for one in each], commit

    def optimized(self, moving: list[Tensor]) -> Any:
        """Takes a step of torch's optimizer; returns its state."""
        make: Any = {"sgd": lambda xs: torch.optim.SGD(xs, 0.05, momentum=0.9)}.get(
            self.program.optimizer, lambda xs: torch.optim.AdamW(xs, 0.05, eps=0.1, weight_decay=0.1)
        )
        if not moving:
            return None
        optimizer = make(moving)
        if self.steps is not None:
            optimizer.load_state_dict(self.steps)
        optimizer.step()
        return optimizer.state_dict()

    def joint(self, action: Action, ps: Any) -> Tensor:
        return torch.stack([self.loss(action, ps, k)[0] for k in range(self.n)]).sum()

    def hvp(self, action: Action) -> list[Found]:
        ps, tensors = self.leaves()
        moving = self.moving(tensors)
        first = again(self.joint(action, ps), moving, create_graph=True)
        v = self.moving(optree.tree_leaves(direction(self.program, action.seed)))
        second = again(torch.stack([(g * d).sum() for g, d in zip(first, v, strict=True)]).sum(), moving)
        return [{"gradient": self.spread([g.detach() for g in first]), "second": self.spread(second)}] * self.n

    def grad_grad(self, action: Action) -> list[Found]:
        ps, tensors = self.leaves()
        moving = self.moving(tensors)
        first = again(self.joint(action, ps), moving, create_graph=True)
        return [{"second": self.spread(again(sines(list(first)), moving))}] * self.n

    double = func_grad_grad = grad_grad

    def jvp(self, action: Action) -> list[Found]:
        v = self.moving(optree.tree_leaves(direction(self.program, action.seed)))
        found = []
        for k in range(self.n):
            ps, tensors = self.leaves()
            value = self.loss(action, ps, k)[0]
            first = again(value, self.moving(tensors))
            tangent = torch.stack([(g * d).sum() for g, d in zip(first, v, strict=True)]).sum()
            found.append({"value": [value.detach()], "tangent": [tangent]})
        return found

    def vmap(self, action: Action) -> list[Found]:
        each = [torch.stack(self.values(action, factor, self.leaves()[0])).detach() for factor in FACTORS]
        return [{"values": [torch.stack([values[k] for values in each])]} for k in range(self.n)]

    def per_sample(self, action: Action) -> list[Found]:
        each = [self.spread(gradient) for gradient in self.gradients(action)]
        stacks = [None if column[0] is None else torch.stack(column) for column in zip(*each, strict=True)]
        return [{"gradient": stacks}] * self.n

    def gradients(self, action: Action) -> Iterator[Any]:
        for factor in FACTORS:
            ps, tensors = self.leaves()
            yield again(torch.stack(self.values(action, factor, ps)).sum(), self.moving(tensors))

    def values(self, action: Action, factor: float, ps: Any) -> list[Tensor]:
        return [self.loss(action, ps, k, x_of(action, k) * factor)[0] for k in range(self.n)]


FACTORS = (1.0, 0.5, -1.0)  # factors of the samples
INTERRUPTED = ["value_and_grad", "backward", "func_grad", "accumulate", "forward"]


def engine_of(action: Action) -> Action:
    """The action that is interrupted."""
    return dataclasses.replace(action, kind=INTERRUPTED[action.n // 2 % 5], n=action.n // 10)


def again(total: Tensor, tensors: Sequence[Tensor], **more: Any) -> Sequence[Tensor]:
    """A differentiable gradient; zeros if there is nothing to differentiate."""
    if not total.requires_grad or not tensors:
        return [torch.zeros_like(x) for x in tensors]
    return torch.autograd.grad(total, tensors, materialize_grads=True, **more)


def zero_or(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad.clone()


# --- the comparison ---

PLAN_EACH = 2  # of the programs of a search, each such one is planned
BROKEN = 1000.0  # more than the number of ranks


@dataclass(frozen=True)
class Answer:
    """A rank's results of an action, or its error."""

    found: Found | None
    error: str = ""
    trace: str = ""


def perform(program: Program, folder: str) -> list[Answer]:
    """Performs all actions on this rank, up to the first in which some ranks fail and others do not."""
    before, layout.COARSE = layout.COARSE, 0 if program.fine else layout.COARSE
    try:
        machine, answers = Sharded(program, folder), []
        group = cpu_group(list(range(dist.get_world_size())), "programs")  # a group for this function's messages only
        for action in program.actions:
            answers.append(_answered(machine, action))
            if answers[-1].error:  # write it to a file, in case the others wait for this rank
                told = [len(answers) - 1, answers[-1].error, answers[-1].trace]
                Path(folder, f"error-{machine.rank}").write_text(json.dumps(told))
            broken = " in vain for " in answers[-1].error  # then this world's groups are broken too
            count = torch.tensor([BROKEN if broken else float(answers[-1].found is None)])
            with waiting.on("all_reduce", group.group_name, "an action's end"):
                dist.all_reduce(count, group=group)
            if count.item() >= BROKEN:
                raise RuntimeError(f"ranks waited for each other in vain: {answers[-1].error}")
            if count.item() not in (0, dist.get_world_size()):
                break
        return answers
    finally:
        layout.COARSE = before


def _answered(machine: Sharded, action: Action) -> Answer:
    try:
        return Answer(machine.act(action))
    except Exception as error:
        return Answer(None, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)[-12:]))


@dataclass
class Verdict:
    """The result of a program.

    Attributes:
        finding: what is wrong; empty if nothing is.
        refusals: the kinds of expected errors that were raised.
        kinds: the kinds of actions that were compared.
    """

    finding: str = ""
    trace: str = ""
    refusals: list[str] = dataclasses.field(default_factory=list)
    kinds: list[str] = dataclasses.field(default_factory=list)


def judged_twice(program: Program, where: World, folder: str) -> Verdict:
    """Runs a program and, if nothing is wrong and nothing was refused, plans it too."""
    verdict = judged(program, where, folder)
    if verdict.finding or verdict.refusals:
        return verdict
    planned = judged_plan(program, where, folder)
    kinds, refusals = verdict.kinds + planned.kinds, verdict.refusals + planned.refusals
    return dataclasses.replace(planned, kinds=kinds, refusals=refusals)


def judged(program: Program, where: World, folder: str) -> Verdict:
    """Runs a program on the ranks of a world, and compares it with one process."""
    for old in Path(folder).glob("error-*"):
        old.unlink()
    try:
        every = where.run(perform, program, folder)
    except (WorldTimeout, WorldError) as error:
        return _stopped(program, error, folder)
    verdict, plain = Verdict(), Plain(program)
    for number, action in enumerate(program.actions[: len(every[0])]):
        answers = [each[number] for each in every]
        verdict.kinds.append(action.kind)
        verdict.finding = _judged_one(program, plain, number, answers, verdict)
        if verdict.finding:
            verdict.finding = f"action {number} ({action.kind}): {verdict.finding}"
            verdict.trace = "\n".join(answer.trace for answer in answers if answer.trace)
            break
        if verdict.kinds[-1] == "refused":
            break
    return verdict


def _stopped(program: Program, error: WorldTimeout | WorldError, folder: str) -> Verdict:
    """The verdict if a rank did not finish an action."""
    told = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("error-*"))]
    trace = "\n".join([*(trace for _, _, trace in told), str(error)])
    first = min((number for number, _, _ in told), default=0)
    errors = {text for number, text, _ in told if number == first and " in vain for " not in text}
    if isinstance(error, WorldTimeout):
        return Verdict(f"hang {sorted(errors)}", trace)
    if any(failure.how == "died" for failure in error.failures.values()):
        return Verdict("a process died", trace)
    if not errors or not program.actions[first].ragged:
        return Verdict(f"error outside of actions: {sorted(errors)} {str(error)[:300]}", trace)
    plain, failed = Plain(program), []  # an expected error may occur only on the ranks whose losses read the value
    for number, action in enumerate(program.actions[: first + 1]):
        try:
            plain.act(action, number == first)[1]()
        except Exception as why:
            failed.append(f"{type(why).__name__}: {why}")
    kinds = {_refusal(program, program.actions[first], text, failed) for text in errors}
    found = f"action {first} ({program.actions[first].kind}): error on some ranks: {sorted(errors)}"
    return Verdict(found if "" in kinds else "", trace, sorted(kinds - {""}), [])


def _judged_one(program: Program, plain: Plain, number: int, answers: list[Answer], verdict: Verdict) -> str:
    action = program.actions[number]
    errors = {answer.error for answer in answers if answer.found is None}
    if any(answer.found == {} for answer in answers) and action.kind == "interrupted":
        verdict.refusals.append("interrupted")
        return "" if all(answer.found == {} for answer in answers) else "interrupted on some ranks only"
    if errors and any(answer.found is not None for answer in answers):
        return f"error on some ranks only: {sorted(errors)}"
    off, failed = [], []
    for apart in (False, True):
        try:
            found, commit = plain.act(action, apart)
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}")
            continue
        if errors:
            break
        off.append(_difference(program, number, [answer.found for answer in answers], found))
        if not off[-1]:
            commit()
            plain.home = program.other if action.kind == "reload" else plain.home
            return ""
    if errors:
        kinds = {_refusal(program, action, error, failed) for error in errors}
        verdict.refusals += sorted(kinds - {""})
        return f"error: {sorted(errors)}" if "" in kinds else ""
    if off and action.kind in FURTHER and has(program, "op hook", "op hook_with_parameter", "op hook_on_parameter"):
        verdict.refusals.append("torch.func has its own idea of hooks in second derivatives")
        return ""
    if not off:
        verdict.refusals.append("plain torch refuses, and shards do not")
        verdict.kinds.append("refused")
        return ""
    return off[0] if len(off) == 1 else f"{off[0]}; with memory of their own {off[1]}"


def _difference(program: Program, number: int, got: Sequence[Any], want: list[Found]) -> str:
    loose = tolerance(program, number)
    for rank, (a, b) in enumerate(zip(got, want, strict=True)):
        for name in a.keys() & b.keys():
            if len(a[name]) != len(b[name]):
                return f"rank {rank}: {name} has {len(a[name])} parts, not {len(b[name])}"
            there = [(k, x, y) for k, (x, y) in enumerate(zip(a[name], b[name], strict=True)) if y is not None]
            finite = [y.abs().max().double().item() for _, _, y in there if y.numel()]
            scale = 1 + max([0.0, *finite])
            for k, x, y in there:
                if x is None or x.shape != y.shape or x.dtype != y.dtype:
                    return f"rank {rank}: {name}[{k}] is {_kind(x)}, not {_kind(y)}"
                off = (x.double() - y.double()).abs().max().item() / scale if x.numel() else 0.0
                if not off <= max(loose, EXACT.get(x.dtype, 0.0)):
                    return f"rank {rank}: {name}[{k}] is off by {off:.1e}"
    return ""


def _kind(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else str(x)


def tolerance(program: Program, number: int) -> float:
    """The tolerance for rounding: that of the lowest precision that takes part."""
    changed = any(action.kind in ("optimize", "compiled") for action in program.actions[: number + 1])
    dtypes = {leaf.dtype for leaf in leaves_of(program) if trains(leaf)}
    if any(stage.low for stage in program.stages):
        return 2e-4 if changed else 1e-5
    if program.actions[number].kind in FURTHER and "float32" in dtypes:
        return 2e-4 if changed else 1e-5  # for a first derivative that was rounded to float32
    if not changed:
        return 0.0
    return 0.1 if "bfloat16" in dtypes else 2e-4 if "float32" in dtypes else 0.0


# --- plans ---

Call = tuple[Any, ...]
PLANNED = ("value_and_grad", "backward", "func_grad", "func_vjp", "accumulate", "forward", "retain", "two", "optimize",
           "hvp", "grad_grad", "func_grad_grad", "double", "jvp", "vmap", "per_sample")  # fmt: skip


NOT_PLANNED = {
    "a plan has no numbers": "what it returns depends on numbers",
    "a device moves what a CPU keeps": "lets nobody take what autograd saves, with a remat that moves it",
}


def to_plan(program: Program) -> Program:
    """The program with those of its actions that a plan knows, on the transports that it assumes.

    A plan takes a number that the program reads for 1. So it knows no branch that such a number decides otherwise.
    """
    branches = has(program, "line branch")
    known = [
        action
        for action in program.actions
        if action.kind in PLANNED and not (branches and any(one.seed % 2 == 0 for one in steps_of(action)))
    ]
    return dataclasses.replace(program, actions=tuple(known), gather="", scatter="")


@sf.debug(memory=False)
def recorded(program: Program, folder: str) -> list[list[Call]]:
    """The collectives of each action, done for the second time."""
    machine, found = Sharded(program, folder), []
    for action in program.actions:
        machine.act(action)
        with sf.collectives.ledger() as log:
            machine.act(action)
        found.append([
            (e.op, e.axis, str(e.dtype).removeprefix("torch."), e.bytes, e.stage, e.scheduled, e.backward)
            for e in log.records
        ])  # fmt: skip
    return found


@sf.debug(memory=False)
def planned(program: Program, folder: str) -> list[list[Call] | str]:
    """The collectives of the plan of each action, or why there is none."""
    found: list[list[Call] | str] = []
    with sf.plan.mode(program.ranks):
        machine = Sharded(program, folder, None)
        for action in program.actions:
            try:
                works = sf.plan.step(machine.act, action, mesh=machine.mesh).collectives
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
                break
            found.append([
                (w.kind, w.axis, w.dtype, w.sent, w.stage, w.scheduled, w.phase in ("backward", "recompute"))
                for w in works
            ])  # fmt: skip
        del machine
    return found


def judged_plan(program: Program, where: World, folder: str) -> Verdict:
    """Compares the collectives of a program that runs with those of its plan."""
    program, verdict = to_plan(program), Verdict()
    try:
        ran = where.run(recorded, program, folder)[0]
    except (WorldTimeout, WorldError) as error:
        return Verdict(f"plan: the second time, the program fails: {str(error)[:300]}")
    [plans] = world(1, "alone").with_deadline(120).run(planned, program, folder)
    # What a CPU sends in few bits from a thread of its own is of no stage in the ledger.
    known = 4 if any(stage.wire != "no" for stage in program.stages) else 7
    # Ranks compare the arguments of a function that is new, as those of each action are.
    compared = ("all_gather", (), "int64", 16 * (program.ranks - 1), "")
    for number, (action, calls, plan) in enumerate(zip(program.actions, ran, plans, strict=False)):
        verdict.kinds.append(f"planned {action.kind}")
        if isinstance(plan, str):
            refusal = next((why for why, text in NOT_PLANNED.items() if text in plan), "")
            if refusal:
                verdict.refusals.append(refusal)
                return verdict
            verdict.finding = f"action {number} ({action.kind}): plan: {plan[:600]}"
            return verdict
        run, said = (collections.Counter(call[:known] for call in one if call[:5] != compared) for one in (calls, plan))
        if run != said:
            only = [f"{what}: {list(more.items())[:3]}" for what, more in (("run", run - said), ("plan", said - run))]
            verdict.finding = f"action {number} ({action.kind}): plan: other collectives, only in the {'; '.join(only)}"
            return verdict
    return verdict


# --- expected errors ---


def has(program: Program, *kinds: str) -> bool:
    return any(kind in features(program) for kind in kinds)


HOOKS = {
    f"{where} {kind}" for where in ("wrap", "around") for kind in WRAPS if kind not in ("", "no_grad", "autocast_off")
}
# The patterns of error messages, and the programs for which these errors are right.
REFUSALS: list[tuple[str, str, Callable[[Program, Action], bool]]] = [
    (
        "outputs that share memory are not written in place",
        "is a view and (is being modified inplace|its base or another view of its base has been modified inplace)",
        lambda p, a: has(p, "line inplace", "line inplace_row"),
    ),
    (
        "an input is changed before backward",
        "modified by an inplace operation",
        lambda p, a: has(p, "line inplace", "line inplace_row"),
    ),
    (
        "policies and what autograd alone computes",
        "encountered during backward but not found in storage",
        lambda p, a: has(p, "remat ops", "remat policy"),
    ),
    (
        "policies and writes in place",
        "during selective activation checkpoint has been mutated|In-place",
        lambda p, a: has(p, "remat ops", "remat policy"),
    ),
    (
        "returns a parameter",
        "returns a parameter, or a view of one",
        lambda p, a: has(p, "out parameter", "out parameter_view"),
    ),
    ("writes into parameters", "writes into its parameters", lambda p, a: has(p, "op write", "op write_input")),
    ("a stage in a stage", "is called inside stage", lambda p, a: has(p, "op nested")),
    (
        "closes over what needs a gradient",
        "not among its arguments|computed but did not return",
        lambda p, a: has(p, "op nested", "op side") or (has(p, "op closed") and has(p, "action closes")),
    ),
    (
        "reentrant checkpoints under torch.func",
        "must override the setup_context",
        lambda p, a: has(p, "wrap reentrant", "around reentrant"),
    ),
    (
        "hooks under torch.func",
        "don't yet support saved tensor hooks",
        lambda p, a: bool(features(p) & HOOKS) and (a.kind in FURTHER or "func" in a.kind or a.kind == "interrupted"),
    ),
    ("reentrant checkpoints", "use_reentrant=True", lambda p, a: has(p, "wrap reentrant", "around reentrant")),
]


def _refusal(program: Program, action: Action, error: str, failed: list[str]) -> str:
    """The name of the rule by which an error is right; empty if it is not."""
    for name, pattern, right in REFUSALS:
        if re.search(pattern, error) and right(program, action):
            return name
    if failed:
        return "plain torch refuses, too"
    if action.kind in FURTHER and not smooth(program):
        return "unsupported by torch.func"
    return ""


def smooth(program: Program) -> bool:
    """Whether every transform should support the program."""
    kinds = {op.kind for stage in program.stages for op in stage.ops}
    wraps = {op.wrap for stage in program.stages for op in stage.ops} | {line.around for line in program.lines}
    lines = {line.kind for line in program.lines}
    return kinds <= {*SMOOTH} and wraps <= {"", "autocast_off"} and not lines & {"inplace", "inplace_row"}


def features(program: Program) -> frozenset[str]:
    """The features of a program that the simplest program does not have."""
    found = set()
    for stage in program.stages:
        found |= {f"op {op.kind}" for op in stage.ops} | {f"wrap {op.wrap}" for op in stage.ops}
        found |= {f"out {out.kind}" for out in stage.outs}
        found |= {f"remat {stage.remat}", f"reshard {stage.reshard}", f"low {stage.low}", f"wire {stage.wire}"}
        found |= {f"prefetch {stage.prefetch}"} if stage.prefetch != 1 else set()
    found |= {f"line {line.kind}" for line in program.lines} | {f"around {line.around}" for line in program.lines}
    for action in program.actions:
        found |= {f"action {action.kind}", f"ragged {action.ragged}", f"psum {action.psum}", f"inputs {action.inputs}"}
    for leaf in leaves_of(program):
        found |= {f"dtype {leaf.dtype}", f"frozen {leaf.frozen}", f"empty {0 in leaf.shape}"}
    found |= {f"strategy {program.home.strategy}", f"ordered {program.ordered}", f"fine {program.fine}"}
    found |= {f"gather {program.gather}", f"scatter {program.scatter}"}
    return frozenset(found - USUAL)


USUAL = frozenset({
    "op matmul", "wrap ", "out register", "remat no", "reshard default", "low False", "wire no", "line call", "around ",
    "action value_and_grad", "ragged False", "psum False", "inputs False", "dtype float64", "frozen False",
    "empty False", "strategy full_shard", "ordered False", "fine False", "gather ", "scatter ",
})  # fmt: skip


# --- drawing programs ---


def often(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    """A strategy that draws `usual` most of the time."""
    return st.sampled_from([usual] * (2 + len(others)) + list(others))


SHAPES = [(D, D), (D,), (), (5,), (2, 3), (1,), (0,), (7, D), (2, 0, 3), (11,)]


def leaves(hostile: bool) -> st.SearchStrategy[Leaf]:
    return st.builds(
        Leaf,
        shape=st.sampled_from(SHAPES),
        dtype=often("float64", "float64", "float32", "int64", "bfloat16") if hostile else st.just("float64"),
        frozen=often(False, False, False, True) if hostile else st.just(False),
    )


def trees(hostile: bool) -> st.SearchStrategy[Tree]:
    return st.builds(
        Tree,
        leaves=st.lists(leaves(hostile), min_size=1, max_size=3).map(tuple),
        form=st.sampled_from(["dict", "list", "nested", "single"]),
    )


SMALL = st.integers(0, 3)


@st.composite
def ops(draw: st.DrawFn, kinds: Sequence[str], wraps: Sequence[str]) -> Op:
    kind = draw(st.sampled_from(kinds))
    wrap = "" if kind in FUNCS else draw(often(*wraps))
    return Op(kind, draw(SMALL), draw(SMALL), draw(SMALL), draw(SMALL), wrap)


def stages(kinds: Sequence[str], wraps: Sequence[str], outs: Sequence[str], low: bool) -> st.SearchStrategy[Stage]:
    return st.builds(
        Stage,
        ops=st.lists(ops(kinds, wraps), min_size=1, max_size=3).map(tuple),
        outs=st.lists(st.builds(Out, st.sampled_from(outs), SMALL), min_size=1, max_size=3).map(tuple),
        form=st.sampled_from(["tuple", "dict", "single"]),
        remat=often("no", "yes", "offload", "ops", "policy"),
        reshard=often("default", "yes", "no"),
        prefetch=often(1, 0, 2, 3),
        low=often(False, False, False, True) if low else st.just(False),
        wire=often("no", "gather", "reduce", "both"),
    )


def lines(kinds: Sequence[str], arounds: Sequence[str]) -> st.SearchStrategy[Line]:
    return st.builds(Line, st.sampled_from(kinds), SMALL, SMALL, SMALL, SMALL, SMALL, often(*arounds))


def actions(kinds: Sequence[str]) -> st.SearchStrategy[Action]:
    return st.builds(
        Action,
        kind=st.sampled_from(kinds),
        rows=st.sampled_from([2, 1, 3]),
        seed=st.integers(0, 4),
        uses=st.sampled_from([1, 3, 2, 5, 15]),
        ragged=often(False, False, True),
        psum=often(False, True),
        inputs=often(False, True),
        n=st.integers(0, 29),
    )


STRATEGIES = ["full_shard", "ddp", "zero1", "shard_grad_op", "mics"]
TWO_AXES = ["hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz"]


@st.composite
def homes(draw: st.DrawFn, ranks: int) -> Home:
    meshes: list[tuple[tuple[str, int], ...]] = [(("shard", ranks),)]
    meshes += [(("replica", ranks // k), ("shard", k)) for k in (1, 2, 4) if ranks % k == 0]
    mesh = draw(st.sampled_from(meshes))
    strategy = draw(st.sampled_from([*["full_shard"] * 3, *STRATEGIES, *(TWO_AXES * 2 if len(mesh) > 1 else [])]))
    return Home(mesh, strategy, draw(st.booleans()))


FIRST = ["value_and_grad", "backward", "func_grad", "func_vjp", "accumulate", "forward", "retain", "two"]
OTHERS = ["optimize", "compiled", "inplace", "replace", "interrupted", "collect"]


def some(draw: st.DrawFn, everything: Sequence[str], most: int) -> list[str]:
    """A few of many choices, so that a program uses the same ones often."""
    return draw(st.lists(st.sampled_from(list(everything)), min_size=1, max_size=most))


@st.composite
def programs(draw: st.DrawFn, ranks: int, kind: str = "processes") -> Program:
    """Programs for so many ranks: smooth ones, which every transform supports, hostile ones, and a few illegal ones.

    Ranks that are threads share torch's state of the process, and send no messages.
    """
    apart = kind == "processes"
    mood = draw(st.sampled_from(["smooth", "hostile", "hostile", "hostile", "illegal"]))
    hostile = mood != "smooth"
    kinds, outs = SMOOTH, list(OUTS)[: list(OUTS).index("parameter")]
    wraps, arounds = ["", "autocast_off"], [""]
    caller = [*["layers"] * 4, *["call"] * 4, "pair", "branch", "add", "product", "detach"]
    acts = [*FIRST, *OTHERS, *FURTHER]
    if hostile:
        kinds = [kind for kind in OPS if kind not in ILLEGAL and (apart or kind not in ("dropout", "func_jvp"))]
        kinds += [kind for kind in kinds if kind not in SMOOTH] * 2
        wraps = ["", *some(draw, list(WRAPS), 1)]
        arounds = ["", *some(draw, ["", "", "checkpoint", "save_on_cpu", "hooks", "no_grad", "reentrant"], 1)]
        caller += ["inplace", "inplace_row"]
        acts = [*FIRST * 3, *OTHERS * 2, "reload", "closes", "double", "hvp", "vmap"]
    if mood == "illegal":
        kinds, outs = [*kinds, *ILLEGAL * 3], list(OUTS)
        caller += ["box"]
    if not apart:
        acts = [act for act in acts if act not in ("hvp", "jvp", "compiled")]
    low = hostile and draw(often(False, False, True))
    least = draw(st.sampled_from([1, 3]))  # 3: more stages than the engine has buffers
    parameters = draw(st.lists(trees(hostile), min_size=least, max_size=5).map(tuple))
    if any(trains(leaf) and leaf.dtype == "bfloat16" for tree in parameters for leaf in tree.leaves):
        acts = [act for act in acts if act not in ("optimize", "compiled")]  # there is no reference to compare with
    functions = stages(some(draw, kinds, 3), wraps, ["register", "register", *some(draw, outs, 2)], low)
    return Program(
        home=draw(homes(ranks)),
        other=draw(homes(ranks)),
        trees=parameters,
        stages=draw(st.lists(functions, min_size=1, max_size=3).map(tuple)),
        lines=draw(st.lists(lines(caller, arounds), min_size=1, max_size=5).map(tuple)),
        actions=draw(st.lists(actions(acts), min_size=1, max_size=4).map(tuple)),
        ordered=draw(st.booleans()),
        fine=draw(often(False, True)),
        gather=draw(often("", "native", "broadcasts", *["direct"] * apart)),
        scatter=draw(often("", "native", "exchange", *["direct"] * apart)),
        optimizer=draw(st.sampled_from(["sgd", "adamw"])),
        donate=draw(st.booleans()),
    )


# --- the search ---


@dataclass
class Tally:
    """The counts of a search."""

    programs: int = 0
    known: int = 0
    actions: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    refusals: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    findings: list[tuple[frozenset[str], Program, str]] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.programs} programs, {sum(self.actions.values())} actions {dict(self.actions)}, refusals "
            f"{dict(self.refusals)}, errors {dict(self.errors)}, {self.known} like a finding left out, "
            f"{len(self.findings)} findings"
        )


def smaller(value: Any, default: Any) -> Iterator[Any]:
    """Variants of a value that are simpler in one place."""
    if value == default:
        return
    if not isinstance(value, tuple) and not dataclasses.is_dataclass(value):
        yield default
    if isinstance(value, tuple):
        for i in range(len(value) if len(value) > 1 else 0):
            yield value[:i] + value[i + 1 :]
        for i, one in enumerate(value):
            kind: Any = type(one)
            usual = kind() if dataclasses.is_dataclass(one) else one
            yield from ((*value[:i], other, *value[i + 1 :]) for other in smaller(one, usual))
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            for other in smaller(getattr(value, field.name), field.default):
                yield dataclasses.replace(value, **{field.name: other})  # type: ignore[type-var]


def made_small(program: Program, verdict: Verdict, judge: Callable[[Program], Verdict], seconds: float) -> Any:
    """Shrinks a program: the smallest one found that is wrong in the same way."""
    until, kind = time.monotonic() + seconds, _kind_of(verdict)
    changed = True
    while changed:
        changed = False
        for other in _candidates(program):
            if time.monotonic() > until:
                return program, verdict
            found = judge(other)
            if found.finding and _kind_of(found) == kind:
                program, verdict, changed = other, found, True
                break
    return program, verdict


def _candidates(program: Program) -> Iterator[Program]:
    usual: list[Any] = [
        dataclasses.replace(program, **{f.name: f.default})  # type: ignore[arg-type]
        for f in dataclasses.fields(program)
    ]
    for other in [*usual, *smaller(program, Program())]:
        if other != program and other.ranks == program.ranks:
            yield other


def _kind_of(verdict: Verdict) -> str:
    """The finding, without the numbers and names that differ from program to program."""
    return re.sub(r"[\d.e+-]+|rank|action|\([a-z_]+\)|value|aux|gradient|inputs|\[\]|'[a-z]'", "", verdict.finding)[:70]


def search(tally: Tally, ranks: int, number: int, until: float, kind: Any, folder: str, patience: float) -> None:
    """One round: tries programs until one is wrong, and shrinks it."""
    wrong: list[tuple[Program, Verdict]] = []

    def judge(program: Program, plans: bool = True) -> Verdict:
        if not plans or kind != "processes":
            return judged(program, world(ranks, kind).with_deadline(patience), folder)
        return judged_twice(program, world(ranks, kind).with_deadline(patience), folder)

    @settings(
        max_examples=300, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @seed(number)
    @given(programs(ranks, kind))
    def one(program: Program) -> None:
        if wrong or time.monotonic() > until:
            return
        if any(found <= features(program) for found, _, what in tally.findings if "error: " not in what):
            tally.known += 1
            return
        verdict = judge(program, plans=tally.programs % PLAN_EACH == 0)
        tally.programs += 1
        tally.actions.update(verdict.kinds)
        tally.refusals.update(verdict.refusals)
        if "error: " in verdict.finding and _kind_of(verdict) in tally.errors:
            tally.errors[_kind_of(verdict)] += 1
        elif verdict.finding:
            wrong.append((program, verdict))

    one()
    for program, verdict in wrong:
        if verdict.finding.startswith("action"):
            last = int(verdict.finding.split()[1]) + 1
            program = dataclasses.replace(program, actions=program.actions[:last])
        program, verdict = made_small(program, verdict, judge, 300 if verdict.finding.startswith("hang") else 120)
        tally.findings.append((features(program), program, verdict.finding))
        if "error: " in verdict.finding:
            tally.errors[_kind_of(verdict)] += 1
        print(f"FINDING {sorted(features(program))}\n  {verdict.finding[:600]}\n  {written(program)}", flush=True)


def replay(path: str, kind: Any) -> int:
    program = read(Path(path).read_text())
    with tempfile.TemporaryDirectory() as folder:
        judge = judged_twice if kind == "processes" else judged
        verdict = judge(program, world(program.ranks, kind).with_deadline(60), folder)
    print(f"{verdict.finding or 'nothing is wrong'}\n{verdict.trace}\nrefusals: {verdict.refusals}")
    return int(bool(verdict.finding))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=0, help="default: 1, 2 and 4 in turn")
    parser.add_argument("--kind", default="processes", choices=["processes", "threads"])
    parser.add_argument("--patience", type=float, default=10, help="seconds after which a program hangs")
    parser.add_argument("--known", nargs="*", default=[], help="files with programs: others like them are left out")
    parser.add_argument("--into", default="", help="folder for findings")
    parser.add_argument("--replay", default="", help="file with one program")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
    if given.replay:
        return replay(given.replay, given.kind)
    tally, until, number = Tally(), time.monotonic() + 60 * given.minutes, 10_000 * given.seed
    for path in given.known:
        program = read(Path(path).read_text())
        tally.findings.append((features(program), program, "known"))
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < until:
            number += 1
            ranks = given.ranks or [2, 4, 2, 1][number % 4]
            before = len(tally.findings)
            search(tally, ranks, number, until, given.kind, folder, given.patience)
            if len(tally.findings) > before and given.into:
                Path(given.into).mkdir(parents=True, exist_ok=True)
                target = Path(given.into) / f"{os.getpid()}-{number}.json"
                target.write_text(written(tally.findings[-1][1]))
            print(tally, flush=True)
    return int(len(tally.findings) > len(given.known))


if __name__ == "__main__":
    import torch._dynamo  # otherwise, each rank would import it

    from tests.random_programs import main as imported  # under the name by which the ranks import it

    sys.exit(imported())
