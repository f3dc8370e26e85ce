"""The command line: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.utils._python_dispatch import TorchDispatchMode

import shardfn as sf
from shardfn import P, checkpoint
from shardfn.checkpoint import disk, reading, tools
from shardfn.checkpoint.folders import source_of
from shardfn.checkpoint.manifest import MANIFEST, METADATA, Chunk, read_manifest, write_manifest
from shardfn.cli import main
from shardfn.shards.boxes import Box, box_runs, boxes, full_box
from shardfn.testing import world
from tests.models import mesh_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
SPECS = [(r".*table", P(None, "tensor")), (r".*", P())]


def params() -> Any:
    g = torch.Generator().manual_seed(0)
    return {
        "table": torch.randn(400, 96, generator=g),  # more than what is never cut
        "layers": [{"w": torch.randn(16, 24, generator=g), "b": torch.randn(7, generator=g)} for _ in range(2)],
        "half": torch.randn(5, 6, 7, generator=g).bfloat16(),
        "empty": torch.zeros(0, 3),
        "flags": torch.rand(11, generator=g) < 0.5,
    }


def state(ranks: int, value: float = 0.0) -> Any:
    """The same on any number of ranks, apart from what is each rank's own."""
    mesh = mesh_of(shard=ranks // 2 if ranks > 1 else 1, tensor=2 if ranks > 1 else 1)
    placed = sf.shard(params(), mesh, sf.full_shard("shard"), specs=sf.by_path(SPECS))
    return {
        "model": placed,
        "whole": {"scalar": torch.tensor(3.5), "long": torch.arange(30_000)},
        "numbers": {"step": 7, "loss": float("inf"), "name": "x", "z": 1j, "yes": True, "value": value},
        "own": checkpoint.ByRank(torch.full((3,), float(mesh.get_rank()))),
    }


def write(path: str, value: float = 0.0) -> None:
    ranks = torch.distributed.get_world_size()
    checkpoint.save(path, state(ranks, value))


def comes_back(path: str) -> bool:
    ranks = torch.distributed.get_world_size()
    wanted = state(ranks)
    found = checkpoint.load(
        path, optree.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, wanted)
    )
    leaves = zip(optree.tree_leaves(wanted), optree.tree_leaves(found), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in leaves)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """Checkpoints of 1, 2 and 4 ranks, and one of torch's own."""
    root = tmp_path_factory.mktemp("made")
    paths: dict[Any, Path] = {ranks: root / f"by{ranks}" for ranks in (1, 2, 4)}
    for ranks, path in paths.items():
        world(ranks).run(write, str(path))
    paths["torch"] = root / "torchs"
    with pytest.warns(UserWarning, match="disabled"):
        state_dict_saver.save(torchs(), checkpoint_id=paths["torch"])
    return paths


def torchs() -> Any:
    numbers = {"step": 7, "betas": (0.9, 0.95)}
    return {"model": params(), "turned": torch.arange(600.0).view(20, 30).t(), "numbers": numbers}


@pytest.fixture(params=[1, 2, 4])
def path(request: pytest.FixtureRequest, made: dict[Any, Path], tmp_path: Path) -> Path:
    """A copy of one."""
    return Path(shutil.copytree(made[request.param], tmp_path / "one"))


def told(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, Any]:
    """The status of a command that prints JSON, and this."""
    status = main(["checkpoint", *map(str, words), "--json"])
    return status, json.loads(capsys.readouterr().out)


def damage(capsys: pytest.CaptureFixture[str], path: Path) -> list[dict[str, Any]]:
    """What `verify` finds wrong."""
    status, (found,) = told(capsys, "verify", path)
    assert status == 1
    return list(found["damage"])


def refused(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """What a command says that it cannot do."""
    capsys.readouterr()
    assert main([*map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shardfn: ")
    assert err.count("\n") == 1
    return err


# --- boxes ---


def test_runs_are_where_a_box_lies() -> None:
    generator = random.Random(0)
    for _ in range(300):
        shape = tuple(generator.randint(1, 4) for _ in range(generator.randint(0, 4)))
        offsets = tuple(generator.randrange(n) for n in shape)
        box = Box(offsets, tuple(generator.randint(1, n - at) for at, n in zip(offsets, shape, strict=True)))
        numbers = torch.arange(full_box(shape).numel).view(shape)
        length, starts = box_runs(box, shape)
        found = [i for start in starts for i in range(start, start + length)]
        assert found == numbers[box.slices_in(full_box(shape))].reshape(-1).tolist()


# --- inspect ---


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_inspect_lists_entries(made: dict[Any, Path], ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = told(capsys, "inspect", made[ranks])
    assert status == 0
    parts = len(read_manifest(made[ranks]).chunks["model.table"])
    table = next(one for one in found["entries"] if one["name"] == "model.table")
    assert table == {"name": "model.table", "dtype": "float32", "shape": [400, 96], "bytes": 153600, "parts": parts}
    assert found["whole"] is True
    assert (found["format"], found["ranks"], found["number"]) == ("shardfn", ranks, ranks.bit_length())
    assert found["numbers"]["numbers.loss"] == "inf"
    assert found["numbers"]["numbers.z"] == [0.0, 1.0]
    assert found["by_rank"] == ({} if ranks == 1 else {"own": ranks})
    assert found["bytes"] == sum(file.stat().st_size for file in made[ranks].iterdir())
    assert main(["checkpoint", "inspect", str(made[ranks]), "--entries", r"model\.layers.*|.*step"]) == 0
    shown = capsys.readouterr().out
    assert "model.layers.1.w" in shown
    assert "numbers.step" in shown
    assert "table" not in shown


def test_inspect_reads_torchs(made: dict[Any, Path], capsys: pytest.CaptureFixture[str]) -> None:
    status, found = told(capsys, "inspect", made["torch"])
    assert status == 0
    assert found["format"] == "torch"
    assert {one["name"]: one["shape"] for one in found["entries"]}["turned"] == [30, 20]
    assert found["numbers"] == {"numbers.step": 7}
    assert main(["checkpoint", "inspect", str(made["torch"])]) == 0
    assert "bfloat16" in capsys.readouterr().out


def test_inspect_lists_checkpoints(made: dict[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source, name in ((1, "a"), (2, "b"), (4, "c"), (4, ".d.writing"), (4, ".e.replaced"), ("torch", "t")):
        shutil.copytree(made[source], tmp_path / name)
    (tmp_path / ".d.writing" / MANIFEST).unlink()
    (tmp_path / "c" / "__1_0.distcp").unlink()
    (tmp_path / "other").mkdir()
    status, found = told(capsys, "inspect", tmp_path)
    assert status == 0
    listed = {Path(one["path"]).name: (one["whole"], one["latest"]) for one in found["checkpoints"]}
    assert listed == {
        "t": (True, False),
        "a": (True, False),
        "b": (True, False),
        "e": (True, True),
        "c": (False, False),
        ".d.writing": (False, False),
    }
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "latest" in line]
    assert len(lines) == 1
    assert lines[0].split()[:2] == ["e", "whole"]
    assert main(["checkpoint", "inspect", str(tmp_path / "c")]) == 0
    assert "gone or cut off" in capsys.readouterr().out


# --- verify ---


def test_verify_finds_nothing(made: dict[Any, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", *map(str, made.values())]) == 0
    shown = capsys.readouterr().out
    assert shown.count(": whole; ") == 4
    assert "only the structure" in shown
    status, found = told(capsys, "verify", made[4])
    assert (status, found[0]["whole"], found[0]["damage"]) == (0, True, [])
    assert found[0]["bytes"] == sum(file.stat().st_size for file in made[4].iterdir())


def in_order(layers: Any) -> list[Any]:
    """A list, whose numbers may have become keys."""
    return list(layers.values()) if isinstance(layers, dict) else layers


def shrink(monkeypatch: pytest.MonkeyPatch, buffer: int) -> None:
    """Reads and writes that many bytes at a time."""
    for module, name in ((tools, "BUFFER"), (reading, "STEP"), (disk, "STEP")):
        monkeypatch.setattr(module, name, buffer)
    monkeypatch.setattr(reading, "REST", 0)


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << (at % 8)
    file.write_bytes(content)


def test_verify_names_all_flipped_bits(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator, manifest = random.Random(1), read_manifest(path)
    for _ in range(15):
        flipped = []
        for _ in range(generator.randint(1, 4)):
            file = generator.choice(sorted(manifest.files))
            flipped.append((file, generator.randrange(manifest.files[file][0])))
        for place in set(flipped):
            flip(path / place[0], place[1])
        found = damage(capsys, path)
        for file, at in flipped:
            (bad,) = [one for one in found if one["file"] == file and one["start"] <= at < one["stop"]]
            parts = [(name, c) for name, some in manifest.chunks.items() for c in some if c.file == file]
            names = [name for name, c in parts if c.offset <= at < c.offset + c.length]
            assert bad["entries"] == names
        assert len(found) <= len(flipped)
        for place in set(flipped):
            flip(path / place[0], place[1])
    assert main(["checkpoint", "verify", str(path)]) == 0


def test_verify_names_what_is_cut_off(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator, manifest = random.Random(2), read_manifest(path)
    for _ in range(10):
        file = generator.choice(sorted(manifest.files))
        content = (path / file).read_bytes()
        length = generator.randrange(len(content))
        os.truncate(path / file, length)
        found = damage(capsys, path)
        (bad,) = found
        assert (bad["file"], bad["start"], bad["stop"]) == (file, length, len(content))
        parts = [(name, c) for name, some in manifest.chunks.items() for c in some if c.file == file]
        assert set(bad["entries"]) == {name for name, c in parts if c.offset + c.length > length}
        (path / file).write_bytes(content)


def test_verify_knows_its_files(made: dict[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(shutil.copytree(made[4], tmp_path / "one"))
    manifest = read_manifest(path)
    (path / "__2_0.distcp").unlink()
    (path / "more.txt").write_text("?")
    with (path / "__1_0.distcp").open("ab") as file:
        file.write(b"?")
    found = damage(capsys, path)
    assert [one["file"] for one in found] == ["__1_0.distcp", "__2_0.distcp", "more.txt"]
    assert "goes on" in found[0]["what"]
    inside = {name for name, some in manifest.chunks.items() for c in some if c.file == "__2_0.distcp"}
    assert set(found[1]["entries"]) == inside
    flip(path / MANIFEST, 500)
    assert [one["file"] for one in damage(capsys, path)] == [MANIFEST]
    assert main(["checkpoint", "verify", str(path), str(made[1])]) == 1
    assert "damaged in 1 place;" in capsys.readouterr().out


def test_verify_wants_parts_that_make_up_tensors(
    made: dict[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(made[4], tmp_path / "one"))
    manifest = read_manifest(path)
    first, second, *_ = manifest.chunks["model.table"]
    manifest.chunks["model.table"][0] = Chunk(second.box, *list(vars(first).values())[1:])
    manifest.chunks["whole.scalar"] = []
    write_manifest(path, manifest)
    found = damage(capsys, path)
    wrong = {one["entries"][0]: one["what"] for one in found if one["file"] == MANIFEST}
    assert "overlap" in wrong["model.table"]
    assert wrong["whole.scalar"] == "it has no parts"
    assert "model.table: the parts" in refused(capsys, "checkpoint", "reshard", path, tmp_path / "new", "--ranks", 2)
    assert not (tmp_path / "new").exists()


def test_verify_reads_torchs_items(made: dict[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(shutil.copytree(made["torch"], tmp_path / "one"))
    (chunk,) = source_of(path).chunks["model.table"]
    flip(path / chunk.file, chunk.offset + 5000)  # among its elements
    found = damage(capsys, path)
    assert [one["entries"] for one in found] == [["model.table"]]
    flip(path / chunk.file, chunk.offset + 5000)
    os.truncate(path / chunk.file, chunk.offset + 9000)
    found = damage(capsys, path)
    assert ["model.table"] in [one["entries"] for one in found]
    with pytest.warns(UserWarning, match="disabled"):
        state_dict_saver.save({"odd": argparse.Namespace(x=1)}, checkpoint_id=tmp_path / "odd")
    assert main(["checkpoint", "verify", str(tmp_path / "odd")]) == 0
    flip(path / METADATA, 3)
    assert main(["checkpoint", "verify", str(path)]) == 1
    assert "cannot be read" in capsys.readouterr().out


# --- consolidate ---


@pytest.mark.parametrize("source", [1, 2, 4, "torch"])
@pytest.mark.parametrize("buffer", [None, 600])
def test_consolidate_writes_safetensors(
    made: dict[Any, Path], source: Any, buffer: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    if buffer:
        shrink(monkeypatch, buffer)
    dst = tmp_path / "new" / "model.safetensors"
    words = ["checkpoint", "consolidate", str(made[source]), str(dst), "--entries", r"model\..*", "--strip", "model."]
    assert main(words) == 0
    found = safetensors.load_file(dst)
    wanted = params()
    wanted |= {f"layers.{i}.{name}": x for i, layer in enumerate(wanted.pop("layers")) for name, x in layer.items()}
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], x) and found[name].dtype == x.dtype for name, x in wanted.items())
    assert [one.name for one in dst.parent.iterdir()] == [dst.name]
    assert main(words) == 2
    assert main([*words, "--overwrite"]) == 0


@pytest.mark.parametrize("source", [1, 4, "torch"])
def test_consolidate_writes_nested_dicts(
    made: dict[Any, Path], source: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "consolidate", str(made[source]), str(tmp_path / "all.pt")]) == 0
    assert ("left out" in capsys.readouterr().out) == (source == "torch")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert [one["b"].tolist() for one in in_order(found["model"]["layers"])] == [
        one["b"].tolist() for one in params()["layers"]
    ]
    assert torch.equal(found["model"]["table"], params()["table"])
    assert found["numbers"]["step"] == 7
    words = ["--entries", r"model\.layers\.1\..*", "--strip", "model.lay"]
    assert main(["checkpoint", "consolidate", str(made[source]), str(tmp_path / "one.pt"), *words]) == 0
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(in_order(found["ers"])[-1]["b"], params()["layers"][1]["b"])


def test_consolidate_says_what_it_leaves_out(
    made: dict[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dst = tmp_path / "all.safetensors"
    assert main(["checkpoint", "consolidate", str(made[2]), str(dst)]) == 0
    assert "left out" in (shown := capsys.readouterr().out)
    assert "numbers.step" in shown


# --- reshard ---


@pytest.mark.parametrize("buffer", [None, 1000])
def test_reshard_round_trips(
    made: dict[Any, Path],
    buffer: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if buffer:
        shrink(monkeypatch, buffer)
    last = made[4]
    for step, ranks in enumerate((3, 1, 4)):
        new = tmp_path / f"{step}"
        assert main(["checkpoint", "reshard", str(last), str(new), "--ranks", str(ranks)]) == 0
        assert main(["checkpoint", "verify", str(new)]) == 0
        assert main(["checkpoint", "diff", str(made[4]), str(new)]) == 0
        assert main(["checkpoint", "diff", str(new), str(last)]) == 0
        manifest = read_manifest(new)
        assert len(list(new.glob("*.distcp"))) == ranks == manifest.about["ranks"]
        assert manifest.about["number"] == step + 1
        assert {c.file for c in manifest.chunks["model.table"]} == {f"__{rank}_0.distcp" for rank in range(ranks)}
        last = new
    assert all(world(4).run(comes_back, str(last)))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["0", "1", "2"]
    wanted = torch.empty(400, 96)
    with pytest.warns(UserWarning, match="disabled"):
        state_dict_loader.load({"model": {"table": wanted}}, checkpoint_id=last)
    assert torch.equal(wanted, params()["table"])


def test_reshard_writes_even_pieces(made: dict[Any, Path], tmp_path: Path) -> None:
    assert main(["checkpoint", "reshard", str(made[4]), str(tmp_path / "new"), "--ranks", "3"]) == 0
    found = read_manifest(tmp_path / "new").chunks["model.table"]
    each = 400 * 96 // 3
    for rank in range(3):
        mine = [c.box for c in found if c.file == f"__{rank}_0.distcp"]
        assert mine == list(boxes((400, 96), rank * each, (rank + 1) * each))


@pytest.mark.parametrize("buffer", [None, 1000])
def test_reshard_converts_torchs(
    made: dict[Any, Path],
    buffer: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if buffer:
        shrink(monkeypatch, buffer)
    assert main(["checkpoint", "reshard", str(made["torch"]), str(tmp_path / "new"), "--ranks", "2"]) == 0
    assert "left out, because it cannot hold them: numbers.betas" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(tmp_path / "new")]) == 0
    assert main(["checkpoint", "diff", str(made["torch"]), str(tmp_path / "new")]) == 0
    like = {"model": optree.tree_map(torch.zeros_like, params()), "turned": torch.zeros(30, 20), "numbers": {"step": 0}}
    found = checkpoint.load(tmp_path / "new", like)
    assert optree.tree_all(optree.tree_map(torch.equal, found["model"], params()))
    assert torch.equal(found["turned"], torchs()["turned"])
    assert found["numbers"]["step"] == 7


def test_reshard_leaves_nothing_where_it_fails(
    made: dict[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(made[4], tmp_path / "one"))
    source = source_of(path)
    (chunk,) = source.chunks["whole.long"]
    flip(path / chunk.file, chunk.offset + chunk.length // 2)
    for words in (["reshard", path, tmp_path / "new", "--ranks", 3], ["consolidate", path, tmp_path / "new.pt"]):
        assert "whole.long" in refused(capsys, "checkpoint", *words)
    assert [one.name for one in tmp_path.iterdir()] == ["one"]


# --- diff ---


@pytest.mark.parametrize(("a", "b"), [(1, 2), (2, 1), (4, 2), (1, 4)])
def test_diff_does_not_mind_other_parts(
    made: dict[Any, Path], a: int, b: int, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = told(capsys, "diff", made[a], made[b])
    own = [["own"] if ranks == 1 else [f"own.rank{rank}" for rank in range(ranks)] for ranks in (a, b)]
    assert status == 1
    assert found["only_a"] == [name for name in own[0] if name not in own[1]]
    assert found["only_b"] == [name for name in own[1] if name not in own[0]]
    assert not found["kinds"]
    assert not found["numbers"]
    assert not found["values"]


def test_diff_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nan, inf = float("nan"), float("inf")
    one: dict[str, Any] = {
        "same": torch.tensor([nan, 1.0, inf, -0.0]),
        "values": torch.tensor([1.0, 2.0, 3.0, nan]),
        "nan": torch.tensor([1.0, nan]),
        "long": torch.tensor([2**62, 2**62]),
        "byte": torch.tensor([1, 2], dtype=torch.uint8),
        "tiny": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "wide": torch.tensor([2**63 + 1, 2**63], dtype=torch.uint64),
        "z": torch.tensor([1 + 1j, complex(nan, 1)]),
        "shape": torch.zeros(2, 3),
        "dtype": torch.zeros(2),
        "mine": torch.zeros(1),
        "number": 1.0,
        "kind": 1,
        "nans": nan,
    }
    other = one | {
        "same": torch.tensor([nan, 1.0, inf, 0.0]),
        "values": torch.tensor([1.0, 2.25, 2.5, nan]),
        "nan": torch.tensor([nan, nan]),
        "long": torch.tensor([2**62 + 1, -(2**62)]),
        "byte": torch.tensor([2, 1], dtype=torch.uint8),
        "tiny": torch.tensor([1.0, 4.0]).to(torch.float8_e4m3fn),
        "wide": torch.tensor([2**63 + 2, 0], dtype=torch.uint64),
        "z": torch.tensor([1 + 2j, complex(nan, 1)]),
        "shape": torch.zeros(3, 2),
        "dtype": torch.zeros(2).double(),
        "number": 1.25,
        "kind": True,
        "yours": 3,
    }
    del other["mine"]
    checkpoint.save(tmp_path / "a", one)
    checkpoint.save(tmp_path / "b", other)
    status, found = told(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert found == {
        "same": False,
        "only_a": ["mine"],
        "only_b": ["yours"],
        "kinds": {
            "shape": ["float32 [2, 3]", "float32 [3, 2]"],
            "dtype": ["float32 [2]", "float64 [2]"],
            "kind": ["int", "bool"],
        },
        "numbers": {"number": [1.0, 1.25]},
        "values": {
            "values": [2, 4, 0.5],
            "nan": [1, 2, "nan"],
            "long": [2, 2, 2.0**63],
            "byte": [2, 2, 1.0],
            "tiny": [1, 2, 2.0],
            "wide": [2, 2, 2.0**63],
            "z": [1, 2, 1.0],
        },
    }
    status, found = told(capsys, "diff", tmp_path / "a", tmp_path / "b", "--tolerance", 0.3)
    assert found["values"]["values"] == [1, 4, 0.5]
    assert found["numbers"] == {}
    assert main(["checkpoint", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "2 of 4, by up to 0.5" in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out == "the same\n"


# --- memory ---


class Largest(TorchDispatchMode):
    """Sees the bytes of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in optree.tree_leaves(found):
            if isinstance(x, Tensor) and x.device.type != "meta":
                self.seen = max(self.seen, x.untyped_storage().nbytes())
        return found


@contextlib.contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many bytes are asked for at a time."""
    lengths: list[int] = []
    original = os.preadv

    def seen(descriptor: int, buffers: Any, offset: int) -> int:
        lengths.append(sum(len(one) for one in buffers))
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", seen)
    yield lengths


@pytest.mark.parametrize("format", ["ours", "torchs"])
def test_memory_is_that_of_the_buffer(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"a": torch.randn(1000, 300), "b": torch.randn(3, 200_000), "c": torch.arange(300_000)}
    if format == "ours":
        checkpoint.save(tmp_path / "src", tree)
    else:
        with pytest.warns(UserWarning, match="disabled"):
            state_dict_saver.save(tree, checkpoint_id=tmp_path / "src")
    assert source_of(tmp_path / "src").torchs == (format == "torchs")
    buffer = 2**16
    shrink(monkeypatch, buffer)
    monkeypatch.setattr(tools, "AT_ONCE", buffer // 16)
    src, dst = tmp_path / "src", tmp_path / "dst"
    with reads(monkeypatch) as lengths:
        for run in (
            lambda: tools.reshard(src, dst, 3),
            lambda: tools.consolidate(src, tmp_path / "all.safetensors"),
            lambda: tools.diff(src, dst),
            lambda: tools.diff(dst, src),
        ):
            lengths.clear()
            with Largest() as largest:
                found = run()
            assert 0 < largest.seen <= buffer + 2048  # what torch.save adds
            assert max(lengths) <= 2 * buffer
            assert sum(lengths) < 5 * sum(x.nbytes for x in tree.values())  # nothing is read over and over
    assert not found


# --- wrong uses ---


def test_wrong_uses_are_one_line(made: dict[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, none, root = made[1], tmp_path / "none", made[1].parent
    (tmp_path / "file").write_text("")
    (tmp_path / "is.pt").write_text("")
    assert "required" in refused(capsys)
    assert "required" in refused(capsys, "checkpoint")
    assert "invalid choice" in refused(capsys, "checkpoint", "burn", here)
    for command in (["inspect", none], ["verify", none], ["verify", here, none], ["verify", tmp_path / "file"]):
        assert "there is no folder" in refused(capsys, "checkpoint", *command)
    assert "has none in it" in refused(capsys, "checkpoint", "inspect", tmp_path)
    assert "is not a checkpoint" in refused(capsys, "checkpoint", "verify", tmp_path)
    assert "there are 3 in it" in refused(capsys, "checkpoint", "verify", root)
    assert "not a regular expression" in refused(capsys, "checkpoint", "inspect", here, "--entries", "(")
    assert "no entry" in refused(capsys, "checkpoint", "inspect", here, "--entries", "model")
    assert "ends neither" in refused(capsys, "checkpoint", "consolidate", here, tmp_path / "x.bin")
    assert "exists: pass --overwrite" in refused(capsys, "checkpoint", "consolidate", here, tmp_path / "is.pt")
    words = ["checkpoint", "consolidate", here, tmp_path / "x.pt"]
    assert "no name begins with 'no.'" in refused(capsys, *words, "--strip", "no.")
    assert "nothing is left" in refused(capsys, *words, "--strip", "numbers.step")
    words = ["checkpoint", "reshard", here, tmp_path / "x"]
    assert "--ranks" in refused(capsys, *words)
    assert "'0' is not a whole number that is 1 or more" in refused(capsys, *words, "--ranks", 0)
    assert "exists" in refused(capsys, "checkpoint", "reshard", here, made[2], "--ranks", 2)
    assert "there is no folder" in refused(capsys, "checkpoint", "diff", here, none)
    assert "not negative" in refused(capsys, "checkpoint", "diff", here, here, "--tolerance", "-1")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "is.pt"]


def test_dtypes_and_names_that_a_file_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.save(tmp_path / "one", {"z": torch.zeros(2, dtype=torch.complex128), "a": {"x": 1}, "x": 2})
    words = ["checkpoint", "consolidate", tmp_path / "one"]
    assert "z is complex128 [2]" in refused(capsys, *words, tmp_path / "x.safetensors")
    assert "'a.x' and 'x' are both 'x'" in refused(capsys, *words, tmp_path / "x.pt", "--strip", "a.").replace(
        "'x' and 'a.x'", "'a.x' and 'x'"
    )
    assert [one.name for one in tmp_path.iterdir()] == ["one"]


def test_no_rich_is_said(
    made: dict[Any, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardfn.cli.find_spec", lambda name: None)
    assert "pip install '.[cli]'" in refused(capsys, "checkpoint", "inspect", made[1])


def test_as_a_program(made: dict[Any, Path]) -> None:
    words = [sys.executable, "-m", "shardfn", "checkpoint", "diff", str(made[1]), str(made[2])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "own.rank1" in done.stdout
    assert done.stderr == ""
