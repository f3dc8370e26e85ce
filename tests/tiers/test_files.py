"""Files in aligned stretches: what is read is what was written, and what cannot be is an error."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import multiprocessing
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardfn.tiers import tensors
from shardfn.tiers.tensors import ALIGNMENT, File
from tests.tiers.setting import refusing_direct


@pytest.fixture(params=["direct", "no direct", "in memory"])
def file(request: Any, tmp_path: Path) -> Iterator[File]:
    """On an ordinary file system, on one without direct transfers, and on one in memory."""
    if request.param == "no direct":
        with refusing_direct():
            made = File(str(tmp_path), "params")
        assert made.direct < 0
        yield made
    elif request.param == "in memory":
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("no file system in memory here")
        yield File("/dev/shm", "params")
    else:
        yield File(str(tmp_path), "params")


def aligned(n: int) -> memoryview:
    return memoryview(mmap.mmap(-1, -(-n // ALIGNMENT) * ALIGNMENT))[:n]


def noise(n: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(n)


@pytest.mark.parametrize(
    ("start", "n"), [(0, 8192), (0, 100), (4096, 5000), (7, 9), (100, 20000), (4095, 2), (8191, 1)]
)
def test_what_is_written_anywhere_is_read(file: File, start: int, n: int) -> None:
    stretch, new = file.allocate(32768)
    assert new
    before, all_of_it = noise(stretch.nbytes), aligned(stretch.nbytes)
    all_of_it[:] = before
    file.write(stretch.offset, all_of_it)
    given = noise(n, 1)
    source = aligned(n + start % ALIGNMENT)[start % ALIGNMENT :]
    source[:] = given
    file.write(stretch.offset + start, source)
    into = aligned(stretch.nbytes)
    file.read(stretch.offset, into)
    assert bytes(into) == before[:start] + given + before[start + n :]


def test_the_page_cache_keeps_nothing_of_what_goes_past_it(tmp_path: Path) -> None:
    file = File(str(tmp_path), "params")
    if file.direct < 0:
        pytest.skip("no direct transfers on this file system")
    stretch, _ = file.allocate(1 << 20)
    file.write(stretch.offset, aligned(1 << 20))
    file.read(stretch.offset, aligned(1 << 20))
    assert resident(stretch) == 0


def resident(stretch: tensors.FileRange) -> int:
    """Pages of a stretch that are in memory."""
    seen = (ctypes.c_ubyte * (stretch.nbytes // ALIGNMENT))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(stretch.address), ctypes.c_size_t(stretch.nbytes), seen) == 0
    return sum(x & 1 for x in seen)


@contextlib.contextmanager
def short(name: str) -> Iterator[None]:
    """The system moves fewer bytes than it is asked to."""
    real = getattr(os, name)

    def moved(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        n = len(buffers[0])
        return int(real(descriptor, [buffers[0][: max(n // 2 if n > 1 else n, 1)]], offset))

    with mock.patch.object(os, name, moved):
        yield


def test_short_reads_and_writes_go_on(file: File) -> None:
    stretch, _ = file.allocate(65536)
    source, into = aligned(65536), aligned(65536)
    source[:] = noise(65536)
    with short("pwritev"):
        file.write(stretch.offset, source)
    with short("preadv"):
        file.read(stretch.offset, into)
    assert bytes(into) == bytes(source)


@pytest.mark.parametrize(("call", "verb"), [("preadv", "reading"), ("pwritev", "writing")])
def test_an_error_of_the_system_says_what_and_where(file: File, call: str, verb: str) -> None:
    stretch, _ = file.allocate(8192)
    with (
        mock.patch.object(os, call, side_effect=OSError(errno.EIO, "Input/output error")),
        pytest.raises(OSError, match=f"{verb} 0.0 MB of params in '.*' failed: Input/output error"),
    ):
        getattr(file, verb.removesuffix("ing").replace("writ", "write"))(stretch.offset, aligned(8192))


@pytest.mark.parametrize("length", [0, 4096, 20480, 65536])
def test_a_file_that_is_cut_off_is_found_out(file: File, length: int) -> None:
    """Also where a later write makes it as long as before: what is missing would be read as zeros."""
    first, _ = file.allocate(16384)
    second, _ = file.allocate(49152)
    file.write(first.offset, aligned(16384))
    os.truncate(f"/proc/self/fd/{file.plain}", length)
    for verb in ("read", "write"):
        for stretch in (first, second):
            with pytest.raises(OSError, match="truncated it"):
                getattr(file, verb)(stretch.offset, aligned(stretch.nbytes))
    with pytest.raises(OSError, match="truncated it"):
        file.allocate(4096 * 99)


def test_a_file_that_is_cut_off_while_a_write_begins_is_found_out(file: File) -> None:
    """The write makes it longer again, but not as long as it was."""
    stretch, _ = file.allocate(16384)
    real = os.pwritev

    def cutting(*given: Any) -> int:
        os.ftruncate(file.plain, 0)
        return real(*given)

    with mock.patch.object(os, "pwritev", cutting):
        file.write(stretch.offset, aligned(16384))
    with pytest.raises(OSError, match="truncated it"):
        file.read(stretch.offset, aligned(16384))


def test_a_disk_without_room_says_how_much_there_is_and_gives_back_what_it_took(file: File) -> None:
    file.allocate(8192)
    blocks = os.fstat(file.plain).st_blocks
    real = os.posix_fallocate

    def half(descriptor: int, offset: int, nbytes: int) -> None:
        real(descriptor, offset, nbytes // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        mock.patch.object(os, "posix_fallocate", half),
        pytest.raises(
            OSError,
            match=r"making room for 41.9 MB of params in '.*' failed: No space left on device; [0-9.,]+ MB are free",
        ) as caught,
    ):
        file.allocate(40 << 20)
    assert caught.value.errno == errno.ENOSPC
    assert os.fstat(file.plain).st_blocks <= blocks
    stretch, new = file.allocate(4096)
    assert new
    into = aligned(4096)
    file.read(stretch.offset, into)
    assert not any(into)


def test_stretches_are_used_again(file: File) -> None:
    for _ in range(500):
        stretches = [file.allocate(n)[0] for n in (4096, 5000, 12288)]
        for one in stretches:
            file.give_back(one)
    assert file.nbytes == 4096 + 8192 + 12288


def test_a_file_leaves_neither_descriptors_nor_addresses_behind(tmp_path: Path) -> None:
    def made() -> None:
        file = File(str(tmp_path), "params")
        kept = [file.allocate(8192)[0] for _ in range(3)]
        file.give_back(kept[0])

    def held() -> tuple[int, int]:
        gc.collect()
        tensors.sweep()
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), sum(str(tmp_path) in line for line in maps.splitlines())

    before = held()
    for _ in range(20):
        made()
    assert held() == before
    assert before[1] == 0
    assert os.listdir(tmp_path) == []


def test_threads_get_stretches_of_their_own(file: File) -> None:
    found: list[Any] = []

    def many() -> None:
        found.extend(file.allocate(4096)[0] for _ in range(50))

    threads = [threading.Thread(target=many) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.offset for one in found}) == len({one.address for one in found}) == 300


def test_a_fork_reads_but_does_not_change(tmp_path: Path) -> None:
    file = File(str(tmp_path), "params")
    stretch, _ = file.allocate(4096)
    source = aligned(4096)
    source[:] = noise(4096)
    file.write(stretch.offset, source)

    def child(told: Any) -> None:
        into = aligned(4096)
        file.read(stretch.offset, into)
        try:
            file.allocate(8192)
        except RuntimeError as error:
            told.send((bytes(into), str(error)))

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(there,))
    process.start()
    assert here.poll(20)
    read, error = here.recv()
    process.join(20)
    assert read == bytes(source)
    assert "is a fork of" in error


def test_a_folder_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(OSError, match=r"no file for state can be made in '.*taken': File exists; name a folder"):
        File(str(tmp_path / "taken"), "state")
