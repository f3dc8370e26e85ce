"""A run's folder: what is damaged is never passed over, what others put there stays, and it has one run at a time."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn.checkpoint.folders import path_status
from shardfn.checkpoint.manifest import MANIFEST
from shardfn.run import folder as run_folder
from shardfn.testing import World
from tests.refusals import told
from tests.run.toy import OPTIMIZER, Rows, begin, mesh_here, step_of, whole

ROOT = Path(__file__).resolve().parents[2]


def trained(folder: Path, steps: int, **options: Any) -> tuple[Any, list[torch.Tensor]]:
    mesh = mesh_here()
    given: dict[str, Any] = {"save_every": 2, "report": []} | options
    state, run = sf.run.loop(step_of(mesh), begin(mesh), Rows(mesh), steps=steps, save=folder, **given)
    return run, whole(state)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def turned(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def gone(path: Path) -> Path:
    shutil.rmtree(path)
    return path


def freed(path: Path) -> Path:
    path.unlink()
    return path


def file_of(newest: Path) -> Path:
    return newest / "__0_0.distcp"


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "no manifest": lambda newest: (newest / MANIFEST).unlink(),
    "cut manifest": lambda newest: cut(newest / MANIFEST),
    "zero manifest": lambda newest: zeros(newest / MANIFEST),
    "turned manifest": lambda newest: turned(newest / MANIFEST),
    "empty manifest": lambda newest: (newest / MANIFEST).write_bytes(b""),
    "another's manifest": lambda newest: shutil.copy(newest.parent / "step-00000002" / MANIFEST, newest / MANIFEST),
    "cut file": lambda newest: cut(file_of(newest)),
    "longer file": lambda newest: file_of(newest).open("ab").write(b"more"),
    "no file": lambda newest: file_of(newest).unlink(),
    "zero file": lambda newest: zeros(file_of(newest)),
    "turned file": lambda newest: turned(file_of(newest)),
    "another's file": lambda newest: shutil.copy(file_of(newest.parent / "step-00000002"), file_of(newest)),
    "no files": lambda newest: gone(newest).mkdir(),
    "a file in its place": lambda newest: gone(newest).write_text(""),
    "a link to nothing": lambda newest: gone(newest).symlink_to("nothing"),
    "a folder in the manifest's place": lambda newest: freed(newest / MANIFEST).mkdir(),
    "a link to itself": lambda newest: freed(newest / MANIFEST).symlink_to(MANIFEST),
    "another step's": lambda newest: shutil.copytree(newest.parent / "step-00000002", gone(newest)),
}


def listed(folder: Path) -> dict[str, int]:
    found = (path for path in sorted(folder.rglob("*")) if path.name != run_folder.LOCK)
    return {str(path.relative_to(folder)): path.lstat().st_size for path in found}


def damaged(root: Path) -> list[tuple[str, list[str], bool, int, bool, list[str]]]:
    """For each damage: what the run says, and where it goes on when it is told to."""
    found = []
    trained(root / "made", 4)
    _, wanted = trained(root / "wanted", 6)
    for number, (name, damage) in enumerate(DAMAGE.items()):
        folder = root / str(number)
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.copytree(root / "made", folder)
            damage(folder / "step-00000004")
        _met()
        before = listed(folder)
        said = told(partial(trained, folder, 6, keep_last=1))
        _met()
        same = listed(folder) == before
        _met()
        run, got = trained(folder, 6, resume="previous")
        there = [path.name for path in folder.iterdir() if path.name.endswith(".damaged")]
        found.append((name, [said], same, run.start, all(map(torch.equal, got, wanted)), there))
    return found


def _met() -> None:
    if dist.is_initialized():
        dist.barrier()


@pytest.mark.parametrize("world", [1, 2], indirect=True)
def test_a_damaged_checkpoint_is_an_error_on_every_rank_and_never_a_beginning(world: World, tmp_path: Path) -> None:
    for found in world.run(damaged, tmp_path):
        assert [name for name, *_ in found] == [*DAMAGE]
        for name, (said,), same, start, equal, aside in found:
            assert said.startswith("CheckpointError: "), name
            assert "step-00000004" in said, name
            assert (same, start, equal) == (True, 2, True), name
            assert aside == [".step-00000004.damaged"], name


def test_what_somebody_puts_into_a_checkpoint_is_no_damage(tmp_path: Path) -> None:
    trained(tmp_path, 4)
    (tmp_path / "step-00000004" / "README").write_text("the one for the talk")
    run, _ = trained(tmp_path, 6, resume="previous")
    assert run.start == 4


def without_any(root: Path) -> list[Any]:
    trained(root / "run", 0 + 1)
    if dist.get_rank() == 0:
        for path in (root / "run").iterdir():
            zeros(path / MANIFEST)
    _met()
    before = listed(root / "run")
    said = [told(partial(trained, root / "run", 2, resume=how)) for how in (True, "previous")]
    return [said, listed(root / "run") == before]


@pytest.mark.world(2)
def test_a_run_none_of_whose_checkpoints_is_whole_does_not_begin_anew(world: World, tmp_path: Path) -> None:
    for said, same in world.run(without_any, tmp_path):
        assert all("no checkpoint is whole (step-" in one and "Nothing was deleted" in one for one in said)
        assert same


def unreadable(root: Path, what: str) -> list[Any]:
    """Rank 0's disk fails in some calls."""
    trained(root, 4)
    _met()
    before, found = listed(root), []
    for code in (errno.ESTALE, errno.EIO, errno.EACCES):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 0:
                failing(patch, root, what, code)
            said = told(lambda: trained(root, 6, keep_last=1))
            latest = told(lambda: sf.checkpoint.latest(root))
        _met()
        found.append((os.strerror(code) in said, "CheckpointError: " in said, latest, listed(root) == before))
        _met()
    return [found, trained(root, 6)[0].start]


def failing(patch: pytest.MonkeyPatch, root: Path, what: str, code: int) -> None:
    module = {"listdir": os, "stat": Path, "read_bytes": Path}[what]
    real = getattr(module, what)

    def fails(path: Any, *rest: Any, **more: Any) -> Any:
        if str(path).startswith(str(root)) and run_folder.LOCK not in str(path):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *rest, **more)

    patch.setattr(module, what, fails)


@pytest.mark.parametrize("what", ["listdir", "stat", "read_bytes"])
@pytest.mark.world(2)
def test_a_disk_that_does_not_answer_has_not_said_that_there_is_nothing(
    world: World, what: str, tmp_path: Path
) -> None:
    for rank, (found, start) in enumerate(world.run(unreadable, tmp_path, what)):
        assert start == 4
        for strerror, error, latest, same in found:
            assert (strerror, error, same) == (True, True, True)
            assert latest.startswith("CheckpointError: " if rank == 0 else "it was done")


OUTSIDE = ["/etc/hostname", "../step-00000002/__0_0.distcp", "link"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_reads_no_file_from_elsewhere(name: str, tmp_path: Path) -> None:
    trained(tmp_path, 4)
    newest = tmp_path / "step-00000004"
    (newest / "link").symlink_to("../step-00000002/__0_0.distcp")
    body = json.loads((newest / MANIFEST).read_bytes())
    body.pop("crc32")
    body["files"][name] = body["files"]["__0_0.distcp"]
    text = json.dumps(body, indent=0, separators=(",", ":"))[:-2].encode() + b',\n"crc32":'
    (newest / MANIFEST).write_bytes(text + b"%d}\n" % zlib.crc32(text))
    for said in (told(lambda: trained(tmp_path, 6)), told(lambda: sf.checkpoint.load(newest, {}))):
        assert "outside of its folder" in said
        assert name in said


def test_what_the_run_has_not_made_stays(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trained(folder, 4)
    elsewhere = tmp_path / "elsewhere"
    (folder / "step-00000002").rename(elsewhere)
    (folder / "step-00000002").symlink_to(elsewhere)
    shutil.copytree(folder / "step-00000004", folder / "best")
    sf.checkpoint.save(folder / "step-00000003", {"mine": 1})
    sf.checkpoint.save(folder / "of mine", {"mine": 1})
    (folder / "figures").mkdir()
    (folder / ".letter.writing").mkdir()
    (folder / ".letter.writing" / "draft").write_text("dear")
    shutil.copytree(folder / "step-00000004", folder / "step-00000001")  # of step 4, whatever it is called
    dead = folder / ".step-00000009.writing"
    shutil.copytree(folder / "step-00000004", dead)
    before = listed(elsewhere)
    run, _ = trained(folder, 10, keep_last=1)
    names = sorted(path.name for path in folder.iterdir())
    assert run.start == 4
    own = [".letter.writing", "best", "figures", "of mine", "step-00000001", "step-00000002", "step-00000003"]
    assert names == [*own, "step-00000010"]
    assert (folder / ".letter.writing" / "draft").exists()
    assert listed(elsewhere) == before


def test_a_program_may_go_to_another_folder_in_the_meantime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trained(Path("run"), 4, report=lambda step, _: os.chdir(tmp_path / "elsewhere"))
    pending = sf.checkpoint.save_async("one", {"at": 1})
    monkeypatch.chdir(tmp_path)
    pending.wait()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [f"step-0000000{n}" for n in (0, 2, 4)]
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["one"]


@pytest.mark.parametrize("to", ["nothing", "run"])
def test_a_link_to_nothing_is_no_folder(to: str, tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / to)
    assert f"is a link to {tmp_path / to}, which is not there" in told(lambda: trained(tmp_path / "run", 2))


def test_a_lock_that_goes_while_it_is_read_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run ends between two looks at its file."""
    path = tmp_path / run_folder.LOCK
    path.write_text("{}")
    real = Path.read_bytes

    def late(one: Path) -> bytes:
        if one == path:
            one.unlink()
        return real(one)

    monkeypatch.setattr(run_folder, "_try_lock", lambda file, path: False)
    monkeypatch.setattr(Path, "read_bytes", late)
    lock = run_folder.Lock(tmp_path)
    monkeypatch.setattr(run_folder, "HERE", 0.1)
    assert "belongs to another run" in told(lock.acquire)


def test_a_checkpoint_is_not_written_over_a_link(tmp_path: Path) -> None:
    sf.checkpoint.save(tmp_path / "one", {"at": 1})
    (tmp_path / "two").symlink_to(tmp_path / "one")
    said = told(lambda: sf.checkpoint.save(tmp_path / "two", {"at": 2}, overwrite=True))
    assert "or is a link: pass another path" in said
    assert sf.checkpoint.load(tmp_path / "one", {"at": 0}) == {"at": 1}


def test_what_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EBUSY, "the device is busy")

    monkeypatch.setattr(shutil, "rmtree", failing)
    with caplog.at_level(logging.WARNING, "shardfn"):
        run, _ = trained(tmp_path, 6, keep_last=1)
    assert run.ended == "finished"
    assert "step-00000000 could not be deleted, and stays: [Errno 16] the device is busy" in caplog.text
    monkeypatch.undo()
    trained(tmp_path, 8, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000008"]


def best_of(root: Path, which: str) -> Any:
    mesh = mesh_here()
    values = {2: 5.0, 4: 1.0, 6: float("nan"), 8: 9.0, 10: 4.0, 12: 5.0}
    seen: list[int] = []

    def evaluate(state: Any) -> dict[str, float]:
        at = state["seen"] // 8
        seen.append(at)
        return {"x": values[at] + (dist.get_rank() if dist.is_initialized() else 0)}

    found = []
    for steps in (2, 6, 7, 12):
        _, run = sf.run.loop(
            step_of(mesh), begin(mesh), Rows(mesh), steps=steps, save=root, save_every=2, keep_last=1, report=[],
            best=("eval/x", which), evaluate=(evaluate, 2) if steps != 7 else (lambda state: {"x": 6.0}, 7),
        )  # fmt: skip
        _met()
        assert run.best is not None
        found.append((int(run.best.name[5:]), sorted(path.name[-2:] for path in root.iterdir())))
        _met()
    return found


@pytest.mark.parametrize("world", [1, 2], indirect=True)
@pytest.mark.parametrize("which", ["lowest", "highest"])
def test_the_best_checkpoint_stays_also_of_a_run_in_parts(world: World, which: str, tmp_path: Path) -> None:
    wanted = {  # 7 is evaluated when it has been saved
        "lowest": [(2, ["02"]), (4, ["04", "06"]), (4, ["04", "07"]), (4, ["04", "12"])],
        "highest": [(2, ["02"]), (2, ["02", "06"]), (7, ["02", "07"]), (8, ["08", "12"])],
    }
    for found in world.run(best_of, tmp_path, which):
        assert found == wanted[which]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"best": "los", "keep_last": 1}, "best='los', and the metrics of a step are loss, rows"),
        ({"best": "eval/x", "keep_last": 1}, "no evaluate= gives that metric"),
        ({"best": "eval/x", "keep_last": 1, "evaluate": lambda state: {"y": 1}}, "best='eval/x', and eval gives y"),
        ({"best": "loss"}, "without keep_last= all do"),
        ({"best": ("loss", "least"), "keep_last": 1}, "best must be the name of a metric to minimize"),
    ],
)
def test_a_metric_that_is_none_is_said(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in told(lambda: trained(tmp_path, 6, **options))


HOLDS = """
import sys, time
from pathlib import Path
from tests.run.test_folders import trained
from tests.run.toy import Rows
import shardfn as sf
def stay(step, metrics):
    if step == 3:
        print("here", flush=True)
        time.sleep(60)
trained(Path(sys.argv[1]), 9, report=stay)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is in the midst of a run."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "run")], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_folder_has_one_run_at_a_time_and_is_free_when_that_is_killed(
    other: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "HERE", 0.2)
    before = listed(tmp_path / "run" / "step-00000000")
    said = told(lambda: trained(tmp_path / "run", 6))
    assert said.startswith("CheckpointError: lock ")
    assert f"another run, which has not ended: process {other.pid} on " in said
    assert listed(tmp_path / "run" / "step-00000000") == before
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    monkeypatch.setattr(run_folder, "HERE", 3.0)
    assert trained(tmp_path / "run", 6)[0].start in (0, 2)
    assert not (tmp_path / "run" / run_folder.LOCK).exists()


@pytest.mark.parametrize("naming", [0.0, 0.5])  # seconds between emptying the file and writing to it
def test_a_run_whose_folder_another_one_has_taken_writes_nothing_more(tmp_path: Path, naming: float) -> None:
    """As where the file system has no locks."""
    lock, name = tmp_path / run_folder.LOCK, '{"host": "h", "pid": 7, "since": "now"}'

    def taken(step: int, metrics: Any) -> None:
        if step == 3:
            lock.write_text("")
            threading.Timer(naming, lock.write_text, [name]).start()

    said = told(lambda: trained(tmp_path, 9, report=taken))
    assert "belongs to another run now: process 7 on h, since now" in said
    left = {path.name for path in tmp_path.iterdir()} - {"step-00000002"}  # which may have been on its way
    assert left == {".lock", "step-00000000"}


def test_without_locks_a_run_is_warned_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lacking(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lacking)
    with caplog.at_level(logging.WARNING, "shardfn"):
        assert trained(tmp_path, 2)[0].ended == "finished"
    assert "No locks available: if two runs come to this folder, the earlier one will end" in caplog.text


def test_a_run_inside_of_a_run_in_one_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "HERE", 0.2)
    inside: list[str] = []
    run, _ = trained(
        tmp_path, 4, report=lambda step, _: inside.append(told(lambda: trained(tmp_path, 4))) if step == 1 else None
    )
    assert run.ended == "finished"
    assert f"process {os.getpid()} on " in inside[0]


def test_a_lock_that_somebody_has_deleted_is_taken_again(tmp_path: Path) -> None:
    run, _ = trained(tmp_path, 6, report=lambda step, _: (tmp_path / run_folder.LOCK).unlink(missing_ok=True))
    assert run.ended == "finished"


@pytest.mark.parametrize("call", range(6))
def test_a_lock_may_be_deleted_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    lock, calls = run_folder.Lock(tmp_path), itertools.count()
    lock.acquire()

    def deleting(path: Path) -> os.stat_result | None:
        status = path_status(path)
        if next(calls) == call:
            path.unlink()
        return status

    monkeypatch.setattr(run_folder, "path_status", deleting)
    for _ in range(8):
        lock.check()
    assert next(calls) > call
    lock.release()


def with_rate(root: Path, rate: float, steps: int) -> int:
    mesh = mesh_here()
    state = begin(mesh) | {"moments": sf.optim.adamw(rate).init(begin(mesh)["params"])}
    return sf.run.loop(step_of(mesh), state, Rows(mesh), steps=steps, save=root, report=[])[1].start


def test_a_number_of_the_optimizer_that_the_program_has_changed_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert OPTIMIZER is not None
    with_rate(tmp_path, 1e-2, 2)
    with caplog.at_level(logging.WARNING, "shardfn"):
        assert with_rate(tmp_path, 1e-2, 3) == 2
        assert not caplog.records
        assert with_rate(tmp_path, 1e-3, 4) == 3
    assert "state.moments.numbers.lr = 0.01, which goes on, and the program has 0.001" in caplog.text
