"""Numbers on their way to and from disk: they arrive as they were, or an error does; nobody gets memory in use."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.compat import devices
from shardfn.tiers import copying, streaming, tensors, transfers
from shardfn.tiers.offload import DiskPrefetch, GradOffload
from shardfn.tiers.tensors import ALIGNMENT, File
from shardfn.tiers.transfers import Buffers, reading, writing
from tests.tiers.setting import Held, disk, failing, late, refusing_direct

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool,
    torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.fixture(params=["direct", "no direct"])
def file(request: Any, tmp_path: Path) -> Iterator[File]:
    if request.param == "direct":
        yield File(str(tmp_path), "params")
        return
    with refusing_direct():
        made = File(str(tmp_path), "params")
    yield made


@pytest.fixture(autouse=True)
def fresh() -> Iterator[Buffers]:
    """Buffers of this test, and parts of two blocks."""
    made = Buffers()
    with mock.patch.object(transfers, "buffers", made), mock.patch.object(transfers, "AT_ONCE", 8192):
        yield made


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def read(x: Tensor) -> Tensor:
    """All of it in one transfer."""
    one = reading(x)
    assert one is not None
    try:
        one.wait()
        return one.values.clone()
    finally:
        one.give_back()


def write(x: Tensor, values: Tensor) -> None:
    one = writing(x, values)
    try:
        one.wait()
    finally:
        one.give_back()


def kept(file: File, values: Tensor) -> Tensor:
    made = tensors.empty(tuple(values.shape), values.dtype, file)
    write(made, values)
    return made


def free(file: File, nbytes: int) -> int:
    tensors.collect()
    return len(file._free.get(nbytes, ()))


def spare(some: Buffers) -> int:
    return sum(len(one.bytes) for each in some._spare.values() for one in each)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (5000,)], ids=str)
def test_any_dtype_and_shape_arrives(file: File, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = (drawn(*shape, seed=1) * 5).to(dtype)
    there = kept(file, values)
    assert there.view(-1).view(torch.uint8).equal(values.view(-1).view(torch.uint8))
    assert copying.read(there).view(-1).view(torch.uint8).equal(values.view(-1).view(torch.uint8))


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 5000), (0, 100), (1, 2), (511, 513), (512, 1024), (1700, 5000), (4999, 5000)]
)
def test_a_part_is_read_and_written_alone(file: File, start: int, stop: int) -> None:
    values = drawn(5000)
    there = kept(file, values)
    assert copying.read(there[start:stop]).equal(values[start:stop])
    copying.copy_(there[start:stop], drawn(stop - start, seed=9))
    values[start:stop] = drawn(stop - start, seed=9)
    assert there.equal(values)
    assert copying.read(there).equal(values)


@pytest.mark.parametrize("source", [
    lambda: drawn(40, 50).t(), lambda: drawn(4000)[::2].view(50, 40), lambda: drawn(2001)[1:].view(50, 40),
], ids=["turned", "every other", "odd start"])  # fmt: skip
def test_what_is_written_may_lie_in_memory_in_any_way(file: File, source: Any) -> None:
    values = source()
    assert kept(file, values).equal(values)


def test_numbers_that_are_not_what_their_bytes_say(file: File) -> None:
    values = torch.complex(drawn(30), drawn(30, seed=1))
    there = kept(file, values)
    assert copying.read(there.conj()).equal(values.conj())
    assert copying.read(there.conj().imag).equal(values.conj().imag)
    assert kept(file, values.conj()).equal(values.conj())
    assert kept(file, values.conj().imag).equal(values.conj().imag)
    assert tensors.place_of(there.conj()) is None


def test_reads_see_what_was_written_by_the_address(file: File) -> None:
    there = kept(file, drawn(5000))
    for k in range(5):
        there.mul_(2)[k] = 1.0
        assert copying.read(there).equal(there.clone())


def test_places_that_are_used_again_have_no_old_numbers(file: File) -> None:
    for n in (1000, 1023, 700):
        there = kept(file, torch.full((n,), 7.0, dtype=torch.float64))
        del there
        made = tensors.empty((n - 1,), torch.float64, file, zeros=True)
        assert not made.any()
        assert not copying.read(made).any()
        del made
    assert file.nbytes == 8192


def test_many_tensors_that_come_and_go_take_no_more_room(file: File) -> None:
    def come_and_go() -> None:
        one, other = kept(file, drawn(5000)), kept(file, drawn(300))
        streaming.add_(one, copying.read(one))
        del other

    come_and_go()
    nbytes, files, threads = file.nbytes, len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(100):
        come_and_go()
    assert file.nbytes == nbytes
    assert len(os.listdir("/proc/self/fd")) <= files  # those of others may go meanwhile
    assert threading.active_count() <= threads
    tensors.collect()
    assert not [one for one in tensors._stretches.values() if one[0].file is file]


def test_threads_read_and_write_at_once(file: File) -> None:
    theirs, wrong = [kept(file, drawn(3000, seed=k)) for k in range(6)], []

    def work(k: int) -> None:
        for turn in range(8):
            copying.copy_(theirs[k][turn:], drawn(3000 - turn, seed=10 * turn + k))
            if not copying.read(theirs[k])[turn:].equal(drawn(3000 - turn, seed=10 * turn + k)):
                wrong.append((k, turn))

    with disk(late(0, 0.001)):
        threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_buffers_of_inference_serve_training(file: File) -> None:
    there = kept(file, drawn(1000))
    with torch.inference_mode():
        assert copying.read(there).sum() == there.sum()
    copying.copy_(there[1:], drawn(999, seed=3))
    streaming.add_(there, torch.ones(1000, dtype=torch.float64))
    assert there[1:].equal(drawn(999, seed=3) + 1)


@pytest.mark.parametrize("first", [0, 512, 4095])
def test_pinned_memory_may_begin_anywhere(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """torch gives parts of larger blocks too, which do not begin at a page."""
    make, asked = torch.empty, []

    def pinned(nbytes: int, *, pin_memory: bool, **how: Any) -> Tensor:
        assert pin_memory
        asked.append(nbytes)
        whole = make(nbytes + 2 * ALIGNMENT, **how)
        begin = -whole.data_ptr() % ALIGNMENT + first
        return whole[begin : begin + nbytes]

    monkeypatch.setattr(devices, "in_use", lambda: "cuda")
    monkeypatch.setattr(torch, "empty", pinned)
    buffer = transfers.DirectBuffer(8192)
    assert len(buffer.bytes) == 8192
    assert buffer.bytes.data_ptr() % ALIGNMENT == 0
    assert asked == [8192] + [8192 + ALIGNMENT] * (first > 0)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_is_not_where_buffers_are(file: File, device: str) -> None:
    values = drawn(1000)
    with torch.device(device):
        there = kept(file, values)
        found = copying.read(there[1:])
        nothing = tensors.empty((0, 3), torch.float32, file)
    assert found.equal(values[1:])
    assert nothing.device.type == "cpu"


def test_lent_buffers_are_nan_when_they_are_given_back(file: File) -> None:
    there = kept(file, drawn(1000))
    for on in (True, False):
        with sf.debug(memory=on):
            one = reading(there)
            assert one is not None
            one.wait()
            values = one.values
            assert values.equal(there)
            one.give_back()
            assert bool(values.isnan().all()) is on


# --- what fails ---


def test_memory_of_a_read_that_failed_goes_to_others_when_nothing_is_under_way_into_it(
    file: File, fresh: Buffers
) -> None:
    there, held = kept(file, drawn(5000)), Held("read")
    done, before = [], spare(fresh)

    def first_fails(what: str, offset: int) -> None:
        if what == "read" and offset % 40960 == 0:
            raise OSError(errno.EIO, "Input/output error")
        held(what, offset)
        done.append(offset)

    with disk(first_fails):
        one = reading(there)
        assert one is not None
        with pytest.raises(RuntimeError, match=r"reading 0.0 MB of params in '.*' failed: Input/output error"):
            one.wait()
        one.give_back()
        assert spare(fresh) == before - transfers.UNIT if before else spare(fresh) == 0
        held.go.set()
        wait_for(lambda: len(done) == 4)
        wait_for(lambda: spare(fresh) == max(before, transfers.UNIT))


def wait_for(what: Any) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_disk_that_hangs_is_given_up_and_its_memory_is_nobody_elses(
    file: File, fresh: Buffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, held = kept(file, drawn(5000)), Held("read")
    monkeypatch.setenv("SHARDFN_DISK_TIMEOUT", "0.1")
    with disk(held):
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=r"has taken more than 0.1 s.*SHARDFN_DISK_TIMEOUT"):
            read(there)
        assert time.monotonic() - begin < 5
        lent = spare(fresh)
        held.go.set()
        wait_for(lambda: spare(fresh) == lent + transfers.UNIT)
    assert read(there).equal(drawn(5000))


def test_a_place_is_nobody_elses_while_a_write_to_it_is_under_way(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    there, held = kept(file, drawn(5000)), Held("write")
    monkeypatch.setenv("SHARDFN_DISK_TIMEOUT", "0.1")
    with disk(held):
        with pytest.raises(RuntimeError, match="has taken more than"):
            write(there, drawn(5000, seed=1))
        before = file.nbytes
        del there
        gc.collect()
        monkeypatch.setenv("SHARDFN_DISK_TIMEOUT", "20")
        other = tensors.empty((5000,), torch.float64, file, zeros=True)
        assert file.nbytes == before + 40960
        held.go.set()
        write(other, drawn(5000, seed=2))
    assert other.equal(drawn(5000, seed=2))
    wait_for(lambda: free(file, 40960) == 1)


def test_a_time_out_of_the_system_is_told_as_such(file: File) -> None:
    there = kept(file, drawn(50))
    with disk(failing("read", number=errno.ETIMEDOUT)), pytest.raises(RuntimeError, match="Connection timed out"):
        read(there)


@pytest.mark.parametrize("said", ["soon", "0", "-1", "nan"])
def test_a_patience_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("SHARDFN_DISK_TIMEOUT", said)
    with pytest.raises(ValueError, match=f"SHARDFN_DISK_TIMEOUT must be a number of seconds above 0, got '{said}'"):
        transfers.patience()


def test_a_fork_reads_but_does_not_write(tmp_path: Path) -> None:
    there = kept(File(str(tmp_path), "params"), drawn(100))
    here, child = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            assert copying.read(there).equal(drawn(100))
            copying.copy_(there, drawn(100, seed=1))
        except RuntimeError as error:
            os.write(child, str(error).encode())
        except BaseException as error:
            os.write(child, repr(error).encode())
        os._exit(0)
    os.close(child)  # so that reading ends if the fork dies
    told = os.read(here, 1000).decode()
    os.waitpid(process, 0)
    os.close(here)
    assert "is a fork of" in told
    assert copying.read(there).equal(drawn(100))


# --- ahead ---


def test_what_is_announced_is_read_once_and_is_what_it_is_when_it_is_taken(file: File) -> None:
    there, ahead, reads = kept(file, drawn(500)), DiskPrefetch(), []
    with disk(lambda what, offset: reads.append(what)):
        ahead.announce(there)
        ahead.announce(there)
        wait_for(lambda: reads == ["read"])
        for change in (lambda: None, lambda: there.mul_(2), lambda: copying.copy_(there, drawn(500, seed=4))):
            change()
            one = ahead.started_read(there)
            assert one is not None
            one.wait()
            assert one.values.equal(there)
            one.give_back()
            ahead.announce(there)
    assert len(ahead._reads) == 1


def test_what_changes_unseen_is_not_taken_from_before(file: File) -> None:
    """Nobody counts the changes of what inference made."""
    with torch.inference_mode():
        there, ahead = tensors.empty((500,), torch.float64, file, zeros=True), DiskPrefetch()
        ahead.announce(there)
        there.fill_(3)
        one = ahead.started_read(there)
        assert one is not None
        one.wait()
        assert one.values.equal(torch.full((500,), 3.0, dtype=torch.float64))


def test_what_a_transform_made_is_not_announced(file: File) -> None:
    there, ahead = kept(file, drawn(5, 4)), DiskPrefetch()

    def f(x: Tensor) -> Tensor:
        ahead.announce(x)
        assert ahead.started_read(x) is None
        return x.square().sum()

    assert torch.func.grad(f)(there).equal(2 * drawn(5, 4))
    assert torch.func.vmap(f)(there).equal(drawn(5, 4).square().sum(1))


def test_what_nobody_takes_is_given_up_without_a_wait_or_an_error(file: File, fresh: Buffers) -> None:
    there, ahead, held = [kept(file, drawn(5000, seed=k)) for k in range(6)], DiskPrefetch(), Held("read")

    def fails(what: str, offset: int) -> None:
        held(what, offset)
        raise OSError(errno.EIO, "Input/output error")

    with disk(fails):
        for one in there:
            ahead.announce(one)
        begin = time.monotonic()
        ahead.give_up()
        assert time.monotonic() - begin < 5
        held.go.set()
        wait_for(lambda: spare(fresh) == fresh.nbytes)
    taken = ahead.started_read(there[0])
    assert taken is not None
    taken.wait()
    assert taken.values.equal(there[0])


# --- gradients that leave ---


def leaving(file: File) -> Any:
    made = GradOffload(lambda: None)  # type: ignore[arg-type, return-value]
    return made, mock.patch("shardfn.tiers.offload.placing.file_of", return_value=file)


def test_gradients_arrive_and_add_up_on_a_slow_disk(file: File) -> None:
    made, there = leaving(file)
    with there, disk(late(1)):
        found = [made.add(None, drawn(3000, seed=k), "disk") for k in range(6)]
        found = [made.add(x, drawn(3000, seed=k + 50), "disk") for k, x in enumerate(found)]
        made.wait_for_gradients()
    for k, x in enumerate(found):
        assert x.equal(drawn(3000, seed=k) + drawn(3000, seed=k + 50))


def test_a_gradient_that_cannot_be_written_is_told_once(file: File) -> None:
    made, there = leaving(file)
    with there:
        with disk(failing("write", after=1)):
            for k in range(2):
                made.add(None, drawn(500, seed=k), "disk")
            with pytest.raises(RuntimeError, match=r"writing 0.0 MB of params"):
                made.wait_for_gradients()
        found = made.add(None, drawn(500), "disk")
        made.wait_for_gradients()
    assert found.equal(drawn(500))


# --- columns through windows ---


@pytest.mark.parametrize("chunk", [64, 512, 1000, 2**19])
@pytest.mark.parametrize("seed", range(3))
def test_columns_change_as_in_memory_on_a_slow_disk(file: File, chunk: int, seed: int) -> None:
    n = 2500
    columns = [drawn(n, seed=k) for k in range(3)]
    there = [kept(file, columns[0]), columns[1].clone(), kept(file, columns[2])]

    def change(some: list[Tensor]) -> None:
        some[0].addcmul_(some[1], some[2])
        some[2].mul_(-1)

    with mock.patch.object(streaming, "CHUNK", chunk), disk(late(seed)):
        streaming.stream(
            streaming.Window([x[a:b] for x in there], [True, False, True], change)
            for a, b in streaming.windows_of(0, n)
        )
    change(columns)
    assert there[0].equal(columns[0])
    assert there[2].equal(columns[2])


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("after", [0, 1, 7, 12])
def test_a_stream_that_fails_leaves_the_rest_usable(file: File, verb: str, after: int) -> None:
    there, more = kept(file, drawn(2500)), drawn(2500, seed=1)
    with (
        mock.patch.object(streaming, "CHUNK", 200),
        disk(failing(verb, after)),
        pytest.raises(RuntimeError, match="Input/output error"),
    ):
        streaming.add_(there, more)
    copying.copy_(there, drawn(2500))
    with mock.patch.object(streaming, "CHUNK", 200):
        streaming.add_(there, more)
    assert copying.read(there).equal(drawn(2500) + more)


def test_nothing_is_written_any_more_when_a_stream_has_failed(file: File) -> None:
    """It would be over what is written there next."""
    there, writes = kept(file, drawn(2500)), []
    another = threading.Event()

    def first_fails(what: str, offset: int) -> None:
        if what == "write":
            writes.append(offset)
            if len(writes) == 1:
                assert another.wait(30)
                raise OSError(errno.EIO, "Input/output error")
            another.set()
            time.sleep(0.05)

    with mock.patch.object(streaming, "CHUNK", 512), disk(first_fails):
        with pytest.raises(RuntimeError, match="Input/output error"):
            streaming.add_(there, drawn(2500, seed=1))
        found = there.clone()
        time.sleep(0.2)
    assert len(writes) > 1
    assert there.equal(found)


def test_a_gradient_that_is_under_way_when_another_fails_ends_first(file: File) -> None:
    made, there = leaving(file)
    writes: list[int] = []

    def first_fails(what: str, offset: int) -> None:
        if what == "write":
            writes.append(offset)
            if len(writes) == 1:
                raise OSError(errno.EIO, "Input/output error")
            time.sleep(0.1)

    with there, disk(first_fails):
        for k in range(2):
            made.add(None, drawn(500, seed=k), "disk")
        wait_for(lambda: len(writes) == 2)
        with pytest.raises(RuntimeError, match="Input/output error"):
            made.wait_for_gradients()
        wait_for(lambda: free(file, 4096) >= 1)
