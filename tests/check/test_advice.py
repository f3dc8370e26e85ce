"""Advice taken word for word, in all its findings and until nothing more is said, makes a program right."""

from __future__ import annotations

import ast
import functools
import runpy
import types
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.testing import world
from tests.models import distance

MESH = {"data": 2, "model": 2}
COLUMNS, ROWS = P(None, "model"), P("model")
MLP = """
def loss_fn(sf, params, x, y):
    h = x @ params["embed"]
    for p in params["blocks"]:
        z = F.gelu(h @ p["up"] + p["inner"])
        h = h + sf.psum(z @ p["down"], "model") + p["outer"]
    logits = h @ params["head"]
    return sf.pmean((logits - y).square().mean(), "data")
"""
NORMS = """
def loss_fn(sf, params, x, y):
    h = x @ params["embed"]
    for p in params["blocks"]:
        normed = F.rms_norm(h, (8,)) * p["outer"]
        gate = F.silu(normed @ p["gate"])
        out = (gate * (normed @ p["up"])) @ p["down"]
        h = h + sf.psum(out, "model")
    logits = F.layer_norm(h, (8,)) @ params["head"]
    total = sf.psum((logits - y).square().sum(), "data")
    return total / sf.psum(y.numel(), "data")
"""
HEADS = """
def loss_fn(sf, params, x, y):
    h = torch.tanh(x @ params["embed"])
    for p in params["blocks"]:
        q = (h @ p["up"]).unflatten(-1, (-1, 4))
        k = (h @ p["gate"]).unflatten(-1, (-1, 4))
        mixed = torch.tanh(q * k).flatten(1)
        h = h + sf.psum(mixed @ p["down"], "model")
    scale = params["blocks"][0]["outer"].mean().exp()
    logits = h @ params["head"] * scale
    return sf.psum((logits - y).square().sum(), "data") / 24
"""
PROGRAMS = {"mlp": MLP, "norms": NORMS, "heads": HEADS}
BLOCK = {"up": (8, 16), "gate": (8, 16), "inner": (16,), "down": (16, 8), "outer": (8,)}
SPECS = {"up": COLUMNS, "gate": COLUMNS, "inner": ROWS, "down": ROWS, "outer": P()}


def whole() -> tuple[Any, ...]:
    """Parameters and a batch."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    blocks = [{name: draw(*shape) / 3 for name, shape in BLOCK.items()} for _ in range(2)]
    return {"embed": draw(8, 8), "blocks": blocks, "head": draw(8, 3)}, draw(8, 8), draw(8, 3)


SPEC = {"embed": P(), "blocks": [SPECS] * 2, "head": P()}
ALONE = types.SimpleNamespace(psum=lambda x, axis: x, pmean=lambda x, axis: x, pvary=lambda x, axis: x)


def written(source: str, file: Path) -> Path:
    """A program in a file, where the checker finds its lines."""
    file.write_text(f"import torch\nimport torch.nn.functional as F\n{source}")
    return file


def loss_of(file: Path) -> Any:
    return runpy.run_path(str(file))["loss_fn"]


def gradient(file: Path, inside: bool) -> tuple[Any, Any]:
    """Each rank's gradient, differentiated inside of the mapped function or outside, and what is said."""
    mesh = sf.make_mesh(device="cpu", **MESH)
    loss_fn = functools.partial(loss_of(file), sf)
    specs = (SPEC, P("data"), P("data"))
    mine = sf.shard_map(lambda *a: a, mesh=mesh, in_specs=specs, out_specs=specs, inputs="global")(*whole())
    try:
        if inside:
            return sf.shard_map(sf.grad(loss_fn), mesh=mesh, in_specs=specs, out_specs=SPEC)(*mine), ()
        return sf.grad(sf.shard_map(loss_fn, mesh=mesh, in_specs=specs, out_specs=P()))(*mine), ()
    except sf.check.VaryingError as error:
        return None, error.findings


class Taken(ast.NodeTransformer):
    """Puts a call in place of its first argument."""

    def __init__(self, fix: str) -> None:
        self.call: Any = ast.parse(fix.replace("shardfn.", "sf."), mode="eval").body
        self.times = 0

    def visit(self, node: ast.AST) -> Any:
        stored = isinstance(getattr(node, "ctx", None), ast.Store)
        if not stored and ast.unparse(node) == ast.unparse(self.call.args[0]):
            self.times += 1
            return self.call
        return self.generic_visit(node)


def advised(source: str, findings: Any) -> str:
    """The program as the findings say to write it."""
    lines = source.splitlines()
    for where, fix in dict.fromkeys((f.where, f.fix) for f in findings):
        at = int(where.rsplit(":", 1)[1]) - 3  # lines that stand before the source
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        taken = Taken(fix)
        statement = taken.visit(ast.parse(lines[at].strip()))
        assert taken.times, (lines[at], fix)
        lines[at] = indent + ast.unparse(statement)
    return "\n".join(lines)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_piece_of_advice_on_two_axes_leads_to_the_right_program(name: str, inside: bool, tmp_path: Path) -> None:
    source, params = PROGRAMS[name], whole()
    loss_fn = loss_of(written(source, tmp_path / "alone.py"))
    wanted = torch.func.grad(lambda p: loss_fn(ALONE, p, *params[1:]))(params[0])
    for number in range(3):
        file = written(source, tmp_path / f"{name}{number}.py")
        ranks = world(4, "threads").run(gradient, file, inside)
        findings = ranks[0][1]
        if not findings:
            break
        assert {f.kind for f in findings} == {"gradient"}
        source = advised(source, findings)
    assert number > 0
    assert not findings, source
    pieces = world(4, "threads").run(placed, wanted)
    for (got, _), want in zip(ranks, pieces, strict=True):
        assert distance(optree.tree_leaves(got), optree.tree_leaves(want), floor=1e-3) < 1e-12, source


def placed(grads: Any) -> Any:
    """This rank's pieces."""
    mesh = sf.make_mesh(device="cpu", **MESH)
    return sf.shard_map(lambda g: g, mesh=mesh, in_specs=(SPEC,), out_specs=SPEC, inputs="global")(grads)


def places_of_a_stage_that_is_called_twice() -> list[str]:
    """Where each finding says to write, of blocks whose product with columns lacks a `pvary`."""
    mesh, g = sf.make_mesh(data=2, model=2, device="cpu"), torch.Generator().manual_seed(0)
    whole = {"block": {name: torch.randn(BLOCK[name], generator=g) for name in ("outer", "up", "down")}}
    specs = {"block": {name: SPECS[name] for name in whole["block"]}}
    params = sf.shard({"block": {**whole["block"], "bias": torch.ones(8)}}, mesh, sf.full_shard("data"), specs={
        "block": {**specs["block"], "bias": P()}
    })  # fmt: skip

    @sf.stage
    def block(p: Any, x: Any) -> Any:
        h = torch.nn.functional.rms_norm(x, (8,), p["outer"])
        return x + sf.psum(torch.tanh(h @ p["up"]) @ p["down"], "model") + p["bias"]

    def loss(params: Any, x: Any) -> Any:
        return sf.psum(block(params["block"], block(params["block"], x)).square().sum(), "data")

    step = sf.shard_map(sf.grad(loss), mesh=mesh, in_specs=(..., P("data")), out_specs=...)
    with pytest.raises(sf.check.VaryingError) as caught:
        step(params, torch.randn(4, 8, generator=g.manual_seed(mesh.get_local_rank("data"))))
    return [finding.where for finding in caught.value.findings]


def test_advice_names_a_line_where_a_value_meets_what_varies_in_a_second_call() -> None:
    for places in world(4).run(places_of_a_stage_that_is_called_twice):
        assert places
        assert all(places)
