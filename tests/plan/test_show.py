"""Who holds what, as it is told, is who holds what."""

from __future__ import annotations

import html
import io
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.colors
import matplotlib.image
import optree
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardfn as sf
import shardfn.optim as so
from shardfn import P, interop, quant
from shardfn.mesh.scope import scope
from shardfn.plan import holdings, printed, showing
from shardfn.testing import World, world
from tests.models import STRATEGIES
from tests.refusals import refused

FOUR = {"replica": 2, "shard": 2}


def whole(device: str = "cpu", blocks: int = 3) -> dict[str, Any]:
    """Of odd sizes, scalars, none at all, and of two dtypes in a stage."""
    with torch.device(device):

        def block() -> dict[str, Tensor]:
            return {"w": torch.arange(42.0).view(6, 7), "half": torch.ones(5, 3).bfloat16(), "b": torch.ones(())}

        return {
            "embed": torch.arange(128.0).view(32, 4),
            "blocks": [block() for _ in range(blocks)],
            "head": {"norm": torch.ones(7), "none": torch.ones(0, 4), "out": torch.arange(160.0).view(16, 10)},
        }  # fmt: skip


class Untouched(TorchDispatchMode):
    """No operation may run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran")


# --- what is told is so ---


def elements(told: str, whole: Tensor) -> Tensor:
    """The elements that some words name."""
    box = re.search(r"\[.*\]", told)
    part = eval(f"whole{box[0]}", {"whole": whole}) if box else whole
    run = re.match(r"elements ([\d,]+):([\d,]+)", told)
    if run is None:
        return part.flatten()
    return part.flatten()[int(run[1].replace(",", "")) : int(run[2].replace(",", ""))]


def wrongly_told(mesh: Any, specs: Any, ways: dict[str, Any]) -> list[str]:
    """The parameters of which this rank holds something else than is told, and the sums that are wrong."""
    wrong, tree, rank = [], whole(), mesh.get_rank()
    by_name = dict(zip(optree_paths(tree), optree.tree_leaves(tree), strict=True))
    for way, strategy in ways.items():
        params = sf.shard(tree, mesh, strategy, specs=specs)
        flats = list(optree.tree_leaves(params, is_leaf=lambda x: type(x) is sf.shards.FlatShard))
        for flat in flats:
            held, known = sf.shards.local_parameters(flat), holdings.owners(flat.layout)
            for number, entry in enumerate(flat.layout.entries):
                told = showing.held_by(flat.layout, number, known[entry.path])
                own = [words for who, _, words in (one.partition(": ") for one in told) if rank in numbers(who)]
                if entry.numel and [elements(words, by_name[entry.path]).tolist() for words in own] != [
                    part.tolist() for part in ([held[entry.path]] if entry.path in held else [])
                ]:
                    wrong.append(f"{way}: {entry.path}: {told}")
        if sf.show(params).nbytes(rank) != sum(flat.values.nbytes for flat in flats):
            wrong.append(f"{way}: the sum")
    return wrong


def numbers(who: str) -> list[int]:
    if who == "every rank":
        return [0, 1, 2, 3]
    return [rank for run in who.split() for rank in range(int(run.split("-")[0]), int(run.split("-")[-1]) + 1)]


def optree_paths(tree: Any) -> list[str]:
    return [".".join(map(str, path)) for path in optree.tree_paths(tree)]


def test_each_rank_holds_what_is_told_of_it() -> None:
    def body() -> list[str]:
        mesh = sf.make_mesh(device="cpu", **FOUR)
        piped = sf.make_mesh(device="cpu", tensor=2, shard=2)
        cut = sf.by_path([(r"head\.out", P(None, "tensor")), (r"embed|blocks.*w", P("tensor")), (".*", P())])
        at = {"at a place": lambda path, _: sf.full_shard("shard").only_on(tensor=int(path.startswith("head")))}
        return [
            *wrongly_told(mesh, P(), STRATEGIES),
            *wrongly_told(piped, cut, {"tensor": sf.full_shard("shard"), "whole": sf.ddp("shard")}),
            *wrongly_told(piped, P(), at),
        ]

    assert world(4, "threads").run(body) == [[]] * 4


def test_one_rank_is_enough_and_nothing_is_computed() -> None:
    def body() -> str:
        mesh = sf.make_mesh(device="cpu", **FOUR)
        params = sf.shard(whole(), mesh, sf.hybrid_shard(shard="shard", replica="replica"))
        state = so.adamw(0.1).init(params)
        if mesh.get_rank() == 2:
            with Untouched(), sf.collectives.ledger() as log:
                shown = sf.show({"params": params, "state": state})
                assert str(shown)
                assert shown._repr_html_()
            assert not log.records
        return ""

    world(4, "threads").run(body)


def test_positions_hold_what_is_told_of_them() -> None:
    def body(mesh: Any) -> int:
        tree, compared = {"w": torch.arange(640.0).view(40, 16), "b": torch.arange(7.0)}, 0
        layout = sf.shard({"top": tree}, mesh, sf.hybrid_shard(shard="shard", replica="replica"))["top"].layout
        for number, entry in enumerate(layout.entries):
            values = tree[entry.path.removeprefix("top.")]
            for words in showing.held_by(layout, number, None):
                where, _, told = words.partition(": ")
                rank = int(where.removeprefix("shard ")) + 4  # of the second replica
                parts = [one for one in layout.ranges(rank) if one.path == entry.path]
                assert [values.flatten()[one.start : one.stop].tolist() for one in parts] == [
                    elements(told, values).tolist()
                ]
                compared += 1
        return compared

    assert pretended(body, replica=4, shard=4) == 5


# --- what it looks like ---


def pretended(body: Callable[[Any], Any], **sizes: int) -> Any:
    """What a body returns for a mesh of any size, of which only rank 0 is there."""
    with World(math.prod(sizes.values()), kind="fake") as world:
        return world.run(lambda: body(sf.make_mesh(device="cpu", **sizes)))[0]


def test_a_page() -> None:
    def body(mesh: Any) -> str:
        ways = {"embed": sf.full_shard(("replica", "shard")), "head": sf.ddp(("replica", "shard"))}
        node = sf.strategies.hybrid_shard_zero2(shard="shard", replica="replica")
        params = sf.shard(whole(), mesh, lambda path, _: ways.get(path.split(".")[0], node), frozen="embed")
        return sf.show(params).text(100)

    assert pretended(body, replica=2, shard=2) == PAGE


def test_stages_that_differ_are_told_apart() -> None:
    def body(mesh: Any) -> list[str]:
        params = sf.shard(whole(blocks=4), mesh, sf.full_shard("shard"), frozen=r"blocks\.2\.w")
        return [line for line in sf.show(params).text(200).splitlines() if line.startswith("blocks")]

    found = [re.sub(r"\(.*", "", line.partition(":")[0]).strip() for line in pretended(body, shard=2)]
    assert found == ["blocks.0 … blocks.1"] * 2 + ["blocks.2"] * 3 + ["blocks.3"] * 2


def test_large_meshes_are_told_by_their_axes() -> None:
    def body(mesh: Any) -> list[str]:
        params = sf.shard({"w": torch.ones(40, 64)}, mesh, sf.hybrid_shard(shard="shard", replica="replica"))
        return sf.show(params).text(100).splitlines()

    lines = pretended(body, replica=64, shard=4)
    assert lines[0] == "mesh replica=64, shard=4: 256 ranks"
    assert [line.split() for line in lines[9:11]] == [["…"], ["replica", "63", "252", "253", "254", "255"]]
    assert "shard 0: [0:16]   shard 1: [16:32]" in lines[-5]
    assert "1/4 over shard, the same over replica" in " ".join(lines)
    assert lines[-2:] == ["each rank: 4.096 kB", "the whole: 10.24 kB, 2,560 numbers in 1 parameter"]


def test_ranks_that_hold_different_things_are_summed_apart() -> None:
    def body(mesh: Any) -> tuple[list[str], list[int]]:
        place = sf.full_shard("shard")
        params = sf.shard(whole(), mesh, lambda path, _: place.only_on(pipe=int(path.startswith("blocks"))))
        shown = sf.show(params)
        return str(shown).splitlines()[-3:], [shown.nbytes(rank) for rank in (0, 31, 32, 63)]

    lines, held = pretended(body, pipe=2, shard=32)
    assert lines[0].startswith("the 32 ranks at pipe=0: ")
    assert lines[1].startswith("the 32 ranks at pipe=1: ")
    assert held[0] == held[1] != held[2] == held[3]


def test_what_is_said_of_a_stage() -> None:
    def body(mesh: Any) -> dict[str, str]:
        both = ("replica", "shard")
        strategies = {
            "step": sf.full_shard(both).with_reshard("step"),
            "copy": sf.strategies.hpz(shard="shard", replica="replica"),
            "bits": sf.strategies.zeropp(shard="shard", replica="replica"),
            "further": sf.strategies.hfsdp(shard="shard", replica="replica"),
        }
        said = {}
        for name, strategy in strategies.items():
            params = sf.shard({"w": torch.ones(640, 64)}, mesh, strategy)
            said[name] = sf.show(params).text(400).splitlines()[6]
        small = optree.tree_map(lambda x: x.bfloat16(), sf.shard({"w": torch.ones(640)}, mesh, sf.ddp(both)))
        said["cast"] = sf.show(small).text(400).splitlines()[6]
        base = sf.shard({"w": quant.pack(torch.ones(64, 64), quant.nf4())}, mesh, sf.full_shard("shard"))
        said["packed"] = " ".join(sf.show(base).text(400).splitlines()[6:10])
        once = sf.shard({"w": torch.ones(640)}, mesh, sf.ddp(both))
        said["tied"] = sf.show({"in": once["w"], "out": once["w"]}).text(400)
        said["empty"] = sf.show({"mask": optree.tree_map(lambda x: None, once), "w": torch.ones(3)}).text(400)
        return said

    said = pretended(body, replica=2, shard=2)
    assert "the gathered copy kept for the step" in said["step"]
    assert "backward gathers from a copy over shard" in said["copy"]
    assert "gathered in int8" in said["bits"]
    assert "gradients travel in int4" in said["bits"]
    assert "1/2 over shard, the same over replica, gradients and state 1/4 over shard x replica" in said["further"]
    assert said["cast"] == "w: float32, now bfloat16, trained, whole on every rank, 1.408 kB a rank"
    assert "[64, 64] nf4" in said["packed"]
    assert "bytes 0:" in said["packed"]
    assert "the same tensor as in" in said["tied"]
    assert "each rank: 2.816 kB" in said["tied"]
    assert "mask.w: float32, trained, whole on every rank, no numbers" in said["empty"]
    assert "each rank: 12 B\n" in said["empty"]


def test_plain_tensors() -> None:
    tied = torch.ones(2, 3)
    tree = {"layers": [{"w": torch.ones(4, 4)}, {"w": torch.ones(4, 4)}], "a": tied, "b": tied, "step": 3}
    assert sf.show(tree).text(100).splitlines() == [
        "no mesh: what this process has",
        "",
        "at the top: plain tensors, 24 B",
        "  a  [2, 3]  float32, 24 B",
        "  b  [2, 3]  float32, the same as a",
        "",
        "layers.0 … layers.1 (2 alike): a plain tensor, 64 B",
        "  w  [4, 4]  float32, 64 B",
        "",
        "this process: 152 B",
        "the whole: 152 B, 38 numbers in 3 parameters",
    ]


def test_plain_tensors_on_a_mesh() -> None:
    def body(mesh: Any) -> None:
        given = str(sf.show(torch.ones(4), mesh))
        assert given.startswith("mesh shard=4: 4 ranks")
        assert "each rank: 16 B" in given
        with scope(mesh):
            assert str(sf.show(torch.ones(4))) == given
        params = sf.shard({"w": torch.ones(16)}, mesh, sf.full_shard("shard"))
        both = sf.show([params, torch.ones(3)]).text(100)  # the terminal may be narrower
        assert "the same on every rank unless it was made otherwise" in both
        assert "DTensor, S(0)" in str(sf.show(distribute_tensor(torch.ones(8), mesh, [Shard(0)])))

    pretended(body, shard=4)


def test_the_state_of_an_optimizer_and_the_tree_of_a_module() -> None:
    def body(mesh: Any) -> None:
        params = sf.shard(whole(), mesh, sf.full_shard("shard"))
        state = so.masked(so.muon(0.1), lambda path, shape: len(shape) == 2, so.adamw(0.1)).init(params)
        assert "this rank's, of blocks.0" in str(sf.show(state))
        f = interop.functional(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
        assert "the whole: 104 B, 26 numbers in 4 parameters" in str(sf.show(f.tree))
        assert "26 numbers in 4 parameters" in str(sf.show(sf.shard(f.tree, mesh, sf.full_shard("shard"))))

    pretended(body, shard=2)


def test_several_meshes_are_shown_one_by_one() -> None:
    def body(mesh: Any) -> None:
        other = sf.make_mesh(device="cpu", **FOUR)
        tree = {
            "a": sf.shard(torch.ones(64), mesh, sf.full_shard("shard")),
            "b": sf.shard(torch.ones(64), other, sf.full_shard("shard")),
            "c": torch.ones(3),
        }
        text = str(sf.show(tree))
        heads = [line for line in text.splitlines() if "mesh" in line]
        assert heads == ["mesh shard=4: 4 ranks", "mesh replica=2, shard=2: 4 ranks", "no mesh: what this process has"]
        assert refused(lambda: sf.show(tree, mesh), ValueError) == (
            "show: mesh=(shard=4), but b is on a mesh (replica=2, shard=2): leave mesh= out to show each mesh "
            "with its parameters"
        )
        assert sf.show(tree).nbytes(0) == 128 + 192 + 12
        assert sf.show(tree).figure().get_axes()

    pretended(body, shard=4)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "show: there is nothing to show, neither flat shards nor tensors: the tree has no leaves"),
        ([3, "x"], "show: there is nothing to show, neither flat shards nor tensors: the tree has int, str"),
        ({"w": torch.ones}, "show: there is nothing to show, but 1 makers, whose tensors are not there yet: pass what"),
        (nn.Linear(2, 2), "show: the tree must hold parameters, got a module. Pass shardfn.interop.functional(module)"),
    ],
)
def test_what_cannot_be_shown(tree: Any, said: str) -> None:
    assert refused(lambda: sf.show(tree), (ValueError, TypeError)).startswith(said)


def test_a_rank_that_is_nowhere() -> None:
    assert refused(lambda: sf.show(torch.ones(3)).nbytes(7), ValueError) == "show: rank 7 is on none of the meshes"


# --- terminals, notebooks, pictures ---


def test_colors_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = sf.show(torch.ones(3))
    assert repr(shown) == str(shown)
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1m" in repr(shown)
    assert re.sub(r"\x1b\[[\d;]*m", "", repr(shown)) == str(shown)
    assert "\x1b" not in str(shown)
    monkeypatch.setenv("NO_COLOR", "1")
    assert repr(shown) == str(shown)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(mesh: Any) -> list[int]:
        params = sf.shard(whole(), mesh, sf.hybrid_shard(shard="shard", replica="replica"))
        return [max(map(len, sf.show(params).text(width).splitlines())) for width in (80, 120, 200)]

    found = pretended(body, **FOUR)
    assert all(most <= width for most, width in zip(found, (80, 120, 200), strict=True))
    monkeypatch.setenv("COLUMNS", "70")
    tree = {f"parameter{i}": torch.ones(1) for i in range(3)}
    assert str(sf.show(tree)) == sf.show(tree).text(70)


def test_a_notebook_gets_the_text_in_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = sf.show({"<w>": torch.ones(3)})
    assert re.sub(r"</?(pre|span)[^>]*>", "", shown._repr_html_()).strip() == html.escape(shown.text(120))
    monkeypatch.setattr(printed, "find_spec", lambda name: None)
    assert shown._repr_html_() == f"<pre>{html.escape(shown.text(120))}</pre>"
    assert refused(shown.figure, ModuleNotFoundError).endswith("pip install '.[examples]'")


def test_a_picture_is_the_page_in_the_colors_of_the_ranks(tmp_path: Path) -> None:
    def body(mesh: Any) -> tuple[str, dict[int, str], set[str]]:
        ways, node = {"head": sf.ddp(("replica", "shard"))}, sf.hybrid_shard(shard="shard", replica="replica")
        params = sf.shard(whole(), mesh, lambda path, _: ways.get(path.split(".")[0], node), frozen="embed")
        shown = sf.show({"params": params, "plain": torch.ones(3)})
        for kind in ("png", "svg"):
            shown.save(tmp_path / f"params.{kind}")
        assert "ends in" not in refused(lambda: shown.save(tmp_path / "params"), ValueError)
        (axes,) = shown.figure().axes
        rows: dict[int, str] = {}
        for text in axes.texts:
            x, y = text.get_position()
            rows[int(y)] = rows.get(int(y), "").ljust(int(x)) + text.get_text()
        return shown.text(120), rows, {matplotlib.colors.to_hex(box.get_facecolor()) for box in axes.patches}

    text, rows, grounds = pretended(body, **FOUR)
    assert {"params.embed", "params.blocks.0", "params.head", "plain", "frozen"} <= {*re.split(r"[\s,:]+", text)}
    assert rows == {y: line for y, line in enumerate(text.splitlines()) if line}
    assert len(grounds) == 4
    assert matplotlib.image.imread(tmp_path / "params.png").ndim == 3
    assert "<svg" in (tmp_path / "params.svg").read_text()


def test_a_picture_of_thousands_of_ranks_is_a_picture() -> None:
    def body(mesh: Any) -> int:
        ways = {"embed": sf.full_shard(("replica", "shard")), "head": sf.ddp(("replica", "shard"))}
        node = sf.hybrid_shard(shard="shard", replica="replica")
        params = sf.shard(whole(blocks=30), mesh, lambda path, _: ways.get(path.split(".")[0], node))
        meta = optree.tree_map(lambda x: x.to("meta"), params)
        (axes,) = sf.show(meta).figure().axes
        return len(axes.texts)

    assert 100 < pretended(body, replica=32, shard=32) < 1000


PAGE = """\
mesh replica=2, shard=2: 4 ranks
             shard
              0   1
  replica 0   0   1
  replica 1   2   3

blocks.0 … blocks.2 (3 alike): bfloat16, trained, 1/2 over shard, the same over replica, the
    gathered copy kept for backward, 128 B a rank of 30 B
                │0 2                 │1 3                 │
  half  [5, 3]  ━━━━━                                        0 2: all
blocks.0 … blocks.2 (3 alike): float32, trained, 1/2 over shard, the same over replica, the gathered
    copy kept for backward, 256 B a rank of 172 B
             │0 2                 │1 3                  │
  b  []      ━                                             0 2: all
  w  [6, 7]       ━━━━━━━━━━━━━━━                          0 2: all

embed: float32, frozen, 1/4 over replica x shard, 192 B a rank of 512 B
                     │0       │1        │2        │3        │
  (itself)  [32, 4]  ━━━━━━━━━━━━━━━━━━━━━━━━━━                0: [0:12]   1: [12:24]   2: [24:32]

head: float32, trained, whole on every rank, 768 B a rank
                  │every rank                              │
  none  [0, 4]    ·                                           every rank: all
  norm  [7]       ━━                                          every rank: all
  out   [16, 10]     ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━      every rank: all

each rank: 2.112 kB (1.92 kB trained, 192 B frozen)
the whole: 1.786 kB, 469 numbers in 13 parameters"""
