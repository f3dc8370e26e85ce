"""Compiled steps on a simulated device: the numbers of the step as it is, no race, and no wait of the host."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch._inductor.compile_fx
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.compat import inductor
from shardfn.compiled import stages as traced
from shardfn.mesh.scope import mesh_of
from shardfn.shards.layout import flat_shards
from shardfn.stages.schedule import schedule_of
from shardfn.testing import Device, simulated, world
from tests.models import DATA, drawn
from tests.transforms.steps import WIDTH, block
from tests.transforms.test_compiled import ROWS, STEPS, in_turn, of_blocks

NAMES = ["hybrid_shard, plain", "zero1, accumulate", "hpz, remat", "mics, plain", "few bits", "shard_state",
         "prefetch 2", "kept for the step", "muon", "clipped", "tensor"]  # fmt: skip


@contextlib.contextmanager
def rank_of(store: str, size: int) -> Iterator[Device]:
    met = dist.FileStore(store, size)  # type: ignore[attr-defined]
    with simulated(size, met.add("ranks", 1) - 1, store=met) as device, sf.debug(memory=False):
        yield device


def copied(tree: Any) -> Any:
    return optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tree)


def on_the_device(store: str, name: str) -> Any:
    """Of a program: what `in_turn` finds, and races and waits of the compiled calls."""
    noted: list[Any] = []
    with rank_of(store, 4) as device:

        @contextlib.contextmanager
        def around(i: int) -> Iterator[None]:
            device.reset_counts()
            yield
            noted.append((device.races, device.synchronizations))

        return in_turn(name, around), noted


@pytest.mark.central
@pytest.mark.parametrize("name", NAMES)
def test_a_program_on_a_device_is_the_step_without_a_race_or_a_wait(tmp_path: Path, name: str) -> None:
    for numbers, noted in world(4, "alone").with_deadline(240).run(on_the_device, str(tmp_path / "store"), name):
        assert [off < 1e-12 for off, *_ in numbers] == [True] * STEPS
        assert [races for races, _ in noted] == [[]] * STEPS
        for i in range(3, STEPS):
            assert noted[i][1] == []
            assert numbers[i][1:] == (Counter(), Counter())


# --- streams ---


def on_streams(store: str, training: str, evaluating: str, ordered: bool) -> Any:
    """Losses, and races, of a step and of an evaluation on another stream, by programs of these kinds."""
    kinds: dict[str, Callable[[Any], Any]] = {"plain": lambda f: f, "compile": sf.compile, "graphed": sf.cuda_graph}
    with rank_of(store, 2) as device:
        module, (step, params, state) = torch.get_device_module(device.name), of_blocks()
        copies = copied(params)
        layer, batch, kept = sf.stage(block), drawn(1)(ROWS, WIDTH, WIDTH).to(device.name), list[Any]()

        @sf.shard_map(mesh=mesh_of(flat_shards(params)[0].layout.grid, "here"), in_specs=..., out_specs=...)
        def evaluated(params: Any, x: Tensor) -> Tensor:
            for p in sf.layers(params["blocks"]):
                x = layer(p, x)
            return sf.pmean(x.square().mean(), DATA)

        train, evaluate, side = kinds[training](step), kinds[evaluating](evaluated), module.Stream()
        side.wait_stream(module.current_stream())
        device.reset_counts()
        for _ in range(7):
            params, state, value = train(params, state, batch)
            with torch.no_grad(), module.stream(side):
                if ordered:
                    side.wait_stream(module.default_stream())
                kept += [value, evaluate(params if ordered else copies, batch)]
                if ordered:
                    module.default_stream().wait_stream(side)
        module.synchronize()
        return [x.item() for x in kept], device.races


STREAMS = [("compile", "plain"), ("compile", "compile"), ("graphed", "plain"), ("graphed", "graphed")]


@pytest.mark.parametrize(("training", "evaluating"), STREAMS)
@pytest.mark.parametrize("ordered", [False, True], ids=["of copies", "of the same"])
def test_programs_on_two_streams_do_not_meet_in_gathered_parameters(
    tmp_path: Any, training: str, evaluating: str, ordered: bool
) -> None:
    ranks = world(2, "alone").with_deadline(120)
    for losses, races in ranks.run(on_streams, str(tmp_path / "store"), training, evaluating, ordered):
        assert races == []
        assert losses[::2] == sorted(losses[::2], reverse=True)
        assert losses[1:-1:2] == pytest.approx(losses[2::2] if ordered else [losses[1]] * 6, rel=1e-12)


# --- errors in the middle ---


def failing(store: str, work: str, after: int) -> Any:
    """Losses of a step as it is, and of a program that fails once in the middle; bytes before and after; races."""
    with rank_of(store, 2) as device, pytest.MonkeyPatch.context() as patch:
        kind, (step, params, state), left = getattr(traced, work), of_blocks(), list[int]()
        plain, run, losses, sizes = kind.finish, sf.compile(step), list[list[float]](), list[int]()
        batch = drawn(1)(ROWS, WIDTH, WIDTH).to(device.name)
        schedule = schedule_of(mesh_of(flat_shards(params)[0].layout.grid, "here"))

        def finish(self: Any, started: Any) -> Any:
            if left and not left.pop():
                raise torch.OutOfMemoryError("no memory")
            return plain(self, started)

        patch.setattr(kind, "finish", finish)
        for call in (step, run):
            found: list[float] = []
            one = copied((params, state))
            for i in range(6):
                saved = copied(one)
                left += range(after + 1) if call is run and i == 4 else ()
                try:
                    *one, value = call(*one, batch)
                except torch.OutOfMemoryError:
                    *one, value = call(*saved, batch)
                found.append(value.item())
                sizes.append(len(schedule.buffers) + len(schedule.kept) + len(schedule.open))
            losses.append(found)
        return losses, sizes[-1] - sizes[-3], device.races


@pytest.mark.parametrize(("work", "after"), [("GatherFunction", 0), ("GatherFunction", 3), ("Reducing", 1)])
def test_after_an_error_in_the_middle_a_program_goes_on_from_copies(tmp_path: Any, work: str, after: int) -> None:
    for (plain, again), more, races in (
        world(2, "alone").with_deadline(120).run(failing, str(tmp_path / "s"), work, after)
    ):
        assert again == pytest.approx(plain, rel=1e-12)
        assert (more, races) == (0, [])


# --- what the host would wait for, and what inductor is asked ---


def indexed(store: str, transform: Callable[[Any], Any]) -> str:
    with rank_of(store, 1):
        places = torch.tensor([0, 1], device="cpu")
        step, params, state = of_blocks(function=lambda p, x: block(p, x)[:, places])
        run = transform(step)
        try:
            for _ in range(3):
                params, state, _ = run(params, state, torch.ones(ROWS, WIDTH, WIDTH, dtype=torch.float64).to("sim"))
        except RuntimeError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize("transform", [sf.compile, sf.cuda_graph])
def test_indices_from_the_cpu_are_refused(tmp_path: Any, transform: Any) -> None:
    found = world(1, "alone").with_deadline(60).run(indexed, str(tmp_path / "store"), transform)[0]
    assert "(step): the step copies indices from the CPU to sim at" in found


def test_regions_have_results_of_their_own_and_the_strides_of_the_trace_whatever_is_set(monkeypatch: Any) -> None:
    config, compile_fx = torch._inductor.config, torch._inductor.compile_fx
    plain, seen = compile_fx.compile_fx_inner, list[Any]()

    def compiled(*args: Any) -> Any:
        seen.append((config.triton.cudagraphs, config.keep_output_stride, config.fallback_random))
        return plain(*args)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compiled)
    graph = inductor.functional(lambda x: [x.t() + 1], [torch.ones(3, 4)])
    with config.patch({"triton.cudagraphs": True, "keep_output_stride": False, "fallback_random": False}):
        (found,) = inductor.compiled(graph)([torch.ones(3, 4)])
    assert (seen, found.stride()) == ([(False, True, True)], (1, 4))
