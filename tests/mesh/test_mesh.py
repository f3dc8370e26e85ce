"""Axis names on any mesh of any process arrangement, against numpy; and processes that start and end well."""

from __future__ import annotations

import gc
import inspect
import itertools
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, example, given, settings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardfn as sf
from shardfn.checkpoint.team import team_of
from shardfn.collectives.agree import ranks_along as group_of_axis
from shardfn.collectives.into_buffers import transports
from shardfn.compat import process_groups
from shardfn.mesh import start
from shardfn.mesh.axes import axis_of, sizes
from shardfn.mesh.groups import cpu_group, group_over
from shardfn.testing import World, world

NAMES = ("a", "b", "c")
SHAPES = [(4,), (1, 4), (4, 1), (2, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 1, 4)]


def under(mesh: DeviceMesh, f: Any, *args: Any) -> Any:
    return sf.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)(*args)


def counted() -> Any:
    """Counts the process groups that are made."""
    return mock.patch.object(dist, "new_group", autospec=True, side_effect=dist.new_group)


def ranks_along(ranks: np.ndarray, names: tuple[str, ...], axes: tuple[str, ...], rank: int) -> list[int]:
    """The ranks of the group along `axes` that holds `rank`, in the order of their positions."""
    here = dict(zip(names, (int(i[0]) for i in np.nonzero(ranks == rank)), strict=True))
    sizes = dict(zip(names, ranks.shape, strict=True))
    positions = itertools.product(*(range(sizes[axis]) for axis in axes))
    return [int(ranks[tuple({**here, **dict(zip(axes, p, strict=True))}[n] for n in names)]) for p in positions]


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"a": 4}, (4,)),
        ({"a": -1}, (4,)),
        ({"a": 2, "b": 2}, (2, 2)),
        ({"a": 2, "b": -1}, (2, 2)),
        ({"a": -1, "b": 2}, (2, 2)),
        ({"a": 4, "b": -1}, (4, 1)),
        ({"a": 1, "b": -1, "c": 2}, (1, 2, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("world", [(4, "processes"), (4, "threads")], indirect=True, ids=str)
def test_a_mesh_holds_all_ranks_slowest_axis_first(world: World, sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    def body() -> Any:
        mesh = sf.make_mesh(device="cpu", **sizes)
        index = under(mesh, lambda: tuple(sf.axis_index(name) for name in sizes))
        size = under(mesh, lambda: tuple(sf.axis_size(name) for name in sizes))
        return mesh.device_type, mesh.mesh_dim_names, tuple(mesh.shape), size, index

    for rank, found in enumerate(world.run(body)):
        assert found == ("cpu", tuple(sizes), shape, shape, tuple(np.unravel_index(rank, shape)))


def positions_and_sums(order: list[int], shape: tuple[int, ...], names: tuple[str, ...], axes: Any) -> Any:
    mesh = DeviceMesh("cpu", torch.tensor(order).reshape(shape), mesh_dim_names=names)

    def body(x: torch.Tensor) -> Any:
        return sf.axis_index(axes), sf.axis_size(axes), sf.all_gather(x[None], axes).tolist(), sf.psum(x, axes).item()

    return under(mesh, body, torch.tensor(10.0 ** dist.get_rank()))


@st.composite
def any_mesh(draw: st.DrawFn) -> tuple[list[int], tuple[int, ...], tuple[str, ...], tuple[str, ...]]:
    """Ranks in any order, in any shape, with any names, and some of the names in any order."""
    shape = draw(st.sampled_from(SHAPES))
    names = tuple(draw(st.permutations(NAMES)))[: len(shape)]
    axes = draw(st.permutations(names))[: draw(st.integers(1, len(names)))]
    return draw(st.permutations(range(4))), shape, names, tuple(axes)


@settings(max_examples=80, deadline=None, phases=[Phase.explicit, Phase.generate])  # a hang is not worth shrinking
@given(drawn=any_mesh())
@example(drawn=([0, 2, 1, 3], (2, 2), ("a", "b"), ("a", "b")))
@example(drawn=([3, 1, 2, 0], (2, 2), ("a", "b"), ("b",)))
@example(drawn=([3, 1, 2, 0], (2, 2), ("a", "b"), ("b", "a")))
@example(drawn=([0, 1, 2, 3], (2, 1, 2), ("a", "b", "c"), ("c", "b", "a")))
def test_axes_in_any_order_on_any_mesh_are_major_to_minor(drawn: Any) -> None:
    order, shape, names, axes = drawn
    ranks = np.array(order).reshape(shape)
    spelled = axes[0] if len(axes) == 1 else axes
    found = world(4).with_deadline(10).run(positions_and_sums, *drawn[:3], spelled)
    for rank, (index, size, gathered, total) in enumerate(found):
        group = ranks_along(ranks, names, axes, rank)
        assert (index, size) == (group.index(rank), len(group))
        assert gathered == [10.0**other for other in group]
        assert total == sum(gathered)


def groups_made() -> list[int]:
    """How many process groups each of several uses of meshes makes on this rank, in a world that has none yet."""
    unordered = torch.tensor([[[3, 1]], [[2, 0]]])  # no row in ascending order: torch's own groups do not serve
    own = DeviceMesh("cpu", unordered, mesh_dim_names=("a", "b", "c"))
    under(own, lambda: None)  # ranks compare their arguments in the group of the whole mesh
    made: list[int] = []

    def count(use: Any) -> None:
        with counted() as new_group:
            use()
        made.append(new_group.call_count)

    def add(mesh: DeviceMesh, *axes: Any) -> None:
        # A call that is checked compares what it does, in groups of their own.
        sf.shard_map(
            lambda: [sf.psum(torch.ones(1), axis) for axis in axes],
            mesh=mesh, in_specs=..., out_specs=..., check=False,
        )()  # fmt: skip

    for axes in ("a", ("b",), ("b", "a"), ("c", "a"), ("b", "c", "a"), ("a", "c")):
        count(lambda axes=axes: add(own, axes, axes))
    count(lambda: sf.make_mesh(a=4))
    count(lambda: sf.make_mesh(a=2, b=2))
    count(lambda: sf.make_mesh(b=2, c=2))
    count(lambda: sf.make_mesh(a=2, b=1, c=2, d=1))
    count(lambda: add(sf.make_mesh(b=2, c=2), "b", "c", ("b", "c"), ("b",)))
    count(lambda: add(sf.make_mesh(b=2, c=2), ("c", "b")))
    count(lambda: add(sf.make_mesh(x=2, y=2), ("y", "x")))
    return made


def test_ranks_make_one_group_for_all_meshes_and_axes() -> None:
    with World(4) as fresh:
        made = fresh.run(groups_made)
    # The first mesh: rows of `a` and of `c, a`, each once; its whole in order was made when ranks compared arguments.
    assert made == [[1, 0, 0, 1, 0, 0, 0, 2, 0, 1, 0, 1, 0]] * 4


@pytest.mark.parametrize(
    ("part", "axes"),
    [("b", "b"), ("a", ("a",)), (("a", "c"), ("c", "a")), (("b", "c"), ("b", "c")), (("a", "b", "c"), ("a", "c"))],
    ids=str,
)
def test_a_slice_of_a_mesh_is_a_mesh(part: Any, axes: Any) -> None:
    def body() -> Any:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=NAMES)[part]
        return under(mesh, lambda: sf.all_gather(torch.tensor([dist.get_rank()]), axes).tolist())

    ranks = np.arange(4).reshape(2, 1, 2)
    for rank, gathered in enumerate(world(4).run(body)):
        assert gathered == ranks_along(ranks, NAMES, (axes,) if isinstance(axes, str) else axes, rank)


def test_ranks_that_a_mesh_leaves_out_are_told_so() -> None:
    def body() -> Any:
        mesh = DeviceMesh("cpu", [0, 2], mesh_dim_names=("a",))
        return under(mesh, lambda: sf.psum(torch.tensor(1), "a").item())

    for rank, error in enumerate(world(4).errors(body)):
        if rank in (0, 2):
            assert error is None
        else:
            assert isinstance(error, ValueError)
            assert re.search(rf"rank {rank}\b.*mesh", str(error))


def own_group() -> None:
    dist.new_group([0, 1])


def one_row_sums() -> None:
    mesh = sf.make_mesh(a=2, b=1, c=2, device="cpu")
    under(mesh, lambda: sf.psum(torch.ones(1), ("b", "c")) if sf.axis_index("a") == 0 else None)


def half_sorted_rows() -> None:
    """torch made a group for the row in ascending order; the other row needs one of ours."""
    under(DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("a", "b")), lambda: sf.psum(torch.ones(1), "b"))


@pytest.mark.parametrize("before", [own_group, one_row_sums, half_sorted_rows], ids=lambda f: f.__name__)
def test_ranks_that_made_other_groups_before_still_meet(before: Any) -> None:
    def body() -> Any:
        before()
        mesh = sf.make_mesh(a=2, b=2, device="cpu")
        return under(mesh, lambda: sf.all_gather(torch.tensor([dist.get_rank()]), ("b", "a")).tolist())

    assert world(4).with_deadline(10).run(body) == [[0, 2, 1, 3]] * 4


def test_two_meshes_on_the_same_ranks_do_not_mix() -> None:
    def body() -> Any:
        rows, columns = (DeviceMesh("cpu", r, mesh_dim_names=("a", "b")) for r in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
        mine = torch.tensor([dist.get_rank()])
        inner = sf.shard_map(lambda x: sf.all_gather(x, "b"), mesh=columns, in_specs=..., out_specs=...)
        return under(rows, lambda: [sf.all_gather(mine, "b"), inner(mine), sf.all_gather(mine, "b")])

    for rank, found in enumerate(world(4).run(body)):
        row, column = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert [f.tolist() for f in found] == [row, column, row]


@pytest.mark.parametrize("sizes", [{"a": 4096}, {"a": 64, "b": -1}, {"a": 8, "b": 64, "c": 8}], ids=str)
def test_a_mesh_of_thousands(sizes: dict[str, int]) -> None:
    ranks = [0, 1234, 4095]

    def body() -> Any:
        mesh = sf.make_mesh(device="cpu", **sizes)

        def shapes(x: torch.Tensor) -> Any:
            return [sf.axis_index(n) for n in sizes], sf.all_gather(x, tuple(sizes), dim=1).shape, sf.axis_size("a")

        return under(mesh, shapes, torch.ones(2, 3))

    shape = tuple(4096 // 64 if size == -1 else size for size in sizes.values())
    for rank, (index, gathered, size) in zip(ranks, world(4096, "fake", ranks=ranks).run(body), strict=True):
        assert tuple(index) == np.unravel_index(rank, shape)
        assert gathered == (2, 3 * 4096)
        assert size == shape[0]


SINGLE = """
    import torch
    import shardfn as sf
    from shardfn import P

    x = torch.arange(6.0).view(2, 3)

    def body(x):
        same = [sf.psum(x, "shard"), sf.pmean(x, "shard"), sf.pmax(x, "shard"), sf.pvary(x, "shard")]
        same += [sf.all_gather(x, "shard", dim=1), sf.reduce_scatter(x, "shard"), sf.ppermute(x, "shard", [(0, 0)])]
        same += [sf.collectives.local_slice(x, "shard"), sf.all_to_all(x, "shard", split_dim=0, concat_dim=1)]
        gradient = sf.grad(lambda x: sf.psum((x**2).sum(), "shard"))(x)
        return same, gradient, (sf.axis_index("shard"), sf.axis_size("shard"))

    for mesh in (sf.make_mesh(shard=-1), sf.make_mesh(shard=1, replica=1, device="cpu")):
        same, gradient, where = sf.shard_map(body, mesh=mesh, in_specs=P("shard"), out_specs=...)(x)
        assert all(y.equal(x) for y in same) and gradient.equal(2 * x) and where == (0, 1), (same, gradient, where)
    print("done")
"""
PAIR = """
    import sys, torch
    import shardfn as sf

    mesh = sf.make_mesh(shard=-1, device="cpu")
    total = lambda: sf.psum(torch.ones(3), "shard")[0].item()
    f = sf.shard_map(total, mesh=mesh, in_specs=(), out_specs=...)
    assert f() == 2.0
    print("begun", flush=True)
    if mesh.get_local_rank() == 1:
        {end}
    sys.stdout.write(f"done {{f()}} ")  # in one piece
"""


def environment(**extra: Any) -> dict[str, str]:
    """As a user's shell has it: nothing from a launcher."""
    launched = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    plain = {key: value for key, value in os.environ.items() if key not in launched}
    root = str(Path(__file__).parents[2])
    return plain | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"} | {key: str(value) for key, value in extra.items()}


def script(path: Path, text: str) -> list[str]:
    file = path / "program.py"
    file.write_text(textwrap.dedent(text))
    return [str(file)]


def test_a_single_process_needs_no_launcher(tmp_path: Path) -> None:
    command = [sys.executable, *script(tmp_path, SINGLE)]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")


def test_torchrun_ends_cleanly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += script(tmp_path, PAIR.format(end="pass"))
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    notices = re.compile(r"\[Gloo\]|.*torch/distributed/run\.py|\*+$|Setting OMP_NUM_THREADS|W\d{4} .*torch")
    assert [line for line in ran.stderr.splitlines() if line and not notices.match(line)] == []
    assert (ran.returncode, ran.stdout.count("done 2.0")) == (0, 2)


def start_pair(tmp_path: Path, end: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [sys.executable, *script(tmp_path, PAIR.format(end=end))]
    settings = [environment(RANK=r, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for r in range(2)]
    return [
        subprocess.Popen(program, env=each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for each in settings
    ]


@pytest.mark.parametrize(
    ("end", "code", "says"), [("raise RuntimeError('broken here')", 1, "broken here"), ("sys.exit(3)", 3, "")]
)
def test_a_rank_that_fails_leaves_at_once(tmp_path: Path, end: str, code: int, says: str) -> None:
    """The other rank stands in a collective: to wait for it, as at a good end, would take for ever."""
    good, bad = start_pair(tmp_path, end)
    try:
        assert bad.stdout is not None
        assert bad.stderr is not None
        assert bad.stdout.readline() == "begun\n", bad.stderr.read()  # loading torch takes what time it takes
        begun = time.monotonic()
        _, error = bad.communicate(timeout=20)
        assert bad.returncode == code
        assert says in error
        good.communicate(timeout=20)
        assert good.returncode != 0
        assert time.monotonic() - begun < 20
    finally:
        for process in (good, bad):
            process.kill()
            process.communicate()


def test_a_mesh_joins_torch_distributed_that_runs_already() -> None:
    def body() -> Any:
        before = dist.group.WORLD
        sf.make_mesh(a=-1, device="cpu")
        return before is dist.group.WORLD

    assert world(2).run(body) == [True, True]


def test_sizes_names_the_fix_for_a_mesh_without_names() -> None:
    def body() -> Any:
        with pytest.raises(ValueError, match=r"no axis names: pass mesh_dim_names=\(\.\.\.\)"):
            sizes(init_device_mesh("cpu", (2,)))

    world(2, "threads").run(body)


@pytest.fixture(params=["gloo", "cpu:gloo", None])
def backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def made_under(backend: str | None, store: str) -> Any:
    """In a world of that backend: which groups have one of their own, and whether they work."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2)  # type: ignore[attr-defined]
    mesh = sf.make_mesh(a=2, device="cpu")
    assert under(mesh, lambda: sf.psum(torch.ones(1), "a").item()) == 2
    teams = [team_of((), use) for use in ("checkpoint", "ask")]
    assert [team.gathered(rank) for team in teams] == [[0, 1]] * 2
    groups = [team.group for team in teams] + [cpu_group(group_of_axis(axis_of(mesh, "a")), "compare")]
    return len({group.group_name for group in [dist.group.WORLD, *groups]}), {dist.get_backend(g) for g in groups}


def test_what_ranks_do_at_the_same_time_has_a_group_of_its_own_under_every_backend(
    backend: str | None, tmp_path: Path
) -> None:
    with World(2) as fresh:
        assert fresh.run(made_under, backend, str(tmp_path / "store")) == [(4, {"gloo"})] * 2


def bound_to_a_device() -> Any:
    """What the world is bound to while a group is made, and after."""
    world_ = dist.group.WORLD
    assert world_ is not None
    world_.bound_device_id = torch.device("cuda:0")
    seen = []

    def look(*args: Any, **kwargs: Any) -> Any:
        seen.append(world_.bound_device_id)
        return make(*args, **kwargs)

    make = dist.new_group
    with mock.patch.object(dist, "new_group", look):
        group_over([0, 1], "a use")
    after, world_.bound_device_id = world_.bound_device_id, None
    return seen, after == torch.device("cuda:0")


def test_groups_are_not_split_off_a_world_that_is_bound_to_devices() -> None:
    """A split is made by all ranks of the world, and a group by its members alone."""
    with World(2) as fresh:
        assert fresh.run(bound_to_a_device) == [([None], True)] * 2


def on_devices(first: int, second: int, count: int) -> Any:
    """Each rank says that it uses that device."""
    fake = mock.Mock(is_initialized=lambda: True, device_count=lambda: count)
    fake.current_device = lambda: (first, second)[dist.get_rank()]
    fake.get_device_properties = lambda index: mock.Mock(uuid=f"GPU {index}")
    with mock.patch.object(torch, "cuda", fake):
        start.claim_device("cuda")
        start.claim_device("cuda")  # another mesh


@pytest.mark.parametrize(("devices", "count", "fine"), [((0, 1), 2, True), ((0, 0), 2, False), ((0, 0), 1, True)])
def test_two_ranks_on_one_device_of_several_are_told(devices: tuple[int, int], count: int, fine: bool) -> None:
    with World(2) as fresh:
        errors = [error for error in fresh.errors(on_devices, *devices, count) if error]
    assert (not errors) is fine
    for error in errors:
        assert re.search(r"ranks [01] and [01] both use cuda:0 .*set_device", str(error))


def test_no_gloo_is_told() -> None:
    def body() -> str:
        mesh = sf.make_mesh(a=2, device="cpu")
        with mock.patch.object(dist, "is_gloo_available", return_value=False), pytest.raises(RuntimeError) as caught:
            under(mesh, lambda: sf.psum(torch.ones(1), "a"))
        return str(caught.value)

    with World(2) as fresh:
        for said in fresh.run(body):
            assert "built without gloo" in said


@pytest.mark.parametrize("backend", ["nccl", "threaded"])
def test_direct_messages_are_refused_where_they_may_wait_for_ever(backend: str) -> None:
    def body() -> None:
        mesh = sf.make_mesh(a=2, device="cpu")
        with mock.patch.object(process_groups, "backend_of", return_value=backend):
            with transports(mesh, all_gather="native"):
                pass
            for op in ("all_gather", "reduce_scatter"):
                direct = transports(mesh, **{op: "direct"})
                with (
                    pytest.raises(
                        ValueError, match=f'{op}="direct".*{backend} with tensors on cpu.* Pass {op}="native"'
                    ),
                    direct,
                ):
                    pass

    world(2).run(body)


def forked_with_garbage(path: str) -> int:
    """How a forked process ends whose garbage collector finds a group of the process before."""
    dist.init_process_group("gloo", store=dist.FileStore(path, 1), rank=0, world_size=1)  # type: ignore[attr-defined]
    gc.disable()
    circle: list[Any] = [dist.group.WORLD]
    circle.append(circle)
    dist.destroy_process_group()
    del circle
    child = multiprocessing.get_context("fork").Process(target=gc.collect, daemon=True)
    child.start()
    child.join(30)
    assert child.exitcode is not None
    return child.exitcode


def test_a_forked_process_leaves_the_groups_of_the_one_before_alone(tmp_path: Path) -> None:
    assert world(1, "alone").run(forked_with_garbage, str(tmp_path / "store")) == [0]


def as_in_an_older_torch() -> Any:
    """What a group is told of its order where `new_group` sorts ranks, as before torch 2.13."""
    make = dist.new_group
    keeps: dict[str, Any] = {"sort_ranks": False} if "sort_ranks" in inspect.signature(make).parameters else {}

    def older(ranks: Any, timeout: Any, backend: Any = None, use_local_synchronization: bool = False) -> Any:
        inside = all(0 <= rank < dist.get_world_size() for rank in ranks)
        assert inside
        return make(sorted(ranks), timeout, backend, use_local_synchronization=use_local_synchronization, **keeps)

    with mock.patch.object(dist, "new_group", older):
        group = group_over([3, 1, 2, 0], "older")
    found = [torch.zeros(1) for _ in range(4)]
    dist.all_gather(found, torch.tensor([float(dist.get_rank())]), group=group)
    ranks = dist.get_process_group_ranks(group)
    return [x.item() for x in found], ranks, {type(rank) for rank in ranks}, group.rank()


def test_ranks_keep_their_order_where_torch_sorts_them() -> None:
    with World(4) as fresh:
        for rank, said in enumerate(fresh.run(as_in_an_older_torch)):
            assert said == ([3.0, 1.0, 2.0, 0.0], [3, 1, 2, 0], {int}, [3, 1, 2, 0].index(rank))


def test_worlds_of_threads_end_where_torch_has_forgotten_how() -> None:
    """torch 2.11's class for them lacks what `destroy_process_group` reads."""

    class Older:
        data = SimpleNamespace()

        def _get_world(self) -> Any:
            return self.data

    with mock.patch.object(process_groups._threaded(), "ThreadLocalWorld", Older):
        process_groups._threaded()
        one: Any = Older()
        one.comms.append("a")
        assert one.comms == ["a"]
