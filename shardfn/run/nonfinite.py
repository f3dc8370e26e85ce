"""Explains metrics that are not finite: which tensors have such numbers, and which stage made the first.

To find the stage, the steps since the last checkpoint are run again under `debug(nan=True)`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.checkpoint.contents import contents
from shardfn.checkpoint.team import RankGroup
from shardfn.debugging import debug
from shardfn.quoting import listed, short
from shardfn.run.checkpoints import Saver, loaded
from shardfn.run.folder import newest_checkpoint
from shardfn.run.stepping import Stepping
from shardfn.tiers import copying
from shardfn.tiers.tensors import on_disk


def wrong_metrics(metrics: dict[str, float]) -> list[str]:
    """Describes the metrics that must be finite and are not: the loss, or any if none is called `loss`."""
    watched = {"loss": metrics["loss"]} if "loss" in metrics else metrics
    return [f"{name} is {value}" for name, value in watched.items() if not math.isfinite(value)]


def explain(
    group: RankGroup, stepping: Stepping, state: Any, saver: Saver | None, bad: int, local_problem: str
) -> FloatingPointError:
    """Makes the error for a step whose metrics are not finite; collective over all ranks.

    Args:
        group: the ranks.
        stepping: runs a step.
        state: is overwritten by the last checkpoint.
        saver: None for a run without checkpoints.
        bad: the first step that is not finite, counted from 1.
        local_problem: what is not finite on this rank.
    """
    problems = group.gathered(local_problem, "comparing what is not finite")
    problem = next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")
    head = f"sf.run.loop: not finite at step {bad} ({short(problem, 800)})"
    if saver is None:
        names = list(dict.fromkeys(name for nans in group.gathered(not_numbers(state)) for name in nans))
        state_is = f"the state now has nan in {listed(names)}" if names else "the state has no nan"
        return FloatingPointError(
            f"{head}; {state_is}. Pass save=folder, and the stage that made it is found by running the steps since the "
            f"last checkpoint again; or run the step under sf.debug(nan=True)"
        )
    path = newest_checkpoint(group, saver.folder, True).path
    assert path is not None, "there is one since the run began"
    state, head_entries = loaded(path, state, saver.origin)
    try:
        result = _watched(group, stepping, state, head_entries["step"], bad)
    except Exception as error:  # the batches may not come again; the first finding is still reported
        result = f"that failed, by {type(error).__name__}: {short(error, 800)}"
    return FloatingPointError(
        f"{head}. Run again from {path}, with each stage watched: {result}. That checkpoint is good, and nothing was "
        f"saved after it"
    )


def _watched(group: RankGroup, stepping: Stepping, state: Any, start: int, bad: int) -> str:
    """Runs the steps up to `bad` again and describes the first number that is not finite."""
    rows = stepping.rows(start)
    with contextlib.ExitStack() as stack, debug(nan=True):
        stack.callback(stepping.close, rows)
        for n in range(start, bad):
            problem = ""
            try:
                state, metrics, _ = stepping.run_step(n, rows, state)
                if wrong := wrong_metrics({name: float(x) for name, x in metrics.items()}):
                    numbers = listed(wrong, separator=" and ")
                    problem = f"outside of the stages, {numbers}, though what they made was finite"
                elif names := not_numbers(state):
                    problem = f"the update made nan in {listed(names)}, though no stage did"
            except FloatingPointError as error:
                problem = str(error)
            problems = group.gathered(problem, "comparing what is not finite")
            for rank, text in enumerate(problems):
                if text:
                    return f"step {n + 1}, {text}" if "on rank" in text else f"step {n + 1}, on rank {rank}, {text}"
    return (
        "all numbers were finite then, so the step does not give the same twice: an operation that is not "
        "deterministic, or a device that makes mistakes"
    )


def not_numbers(state: Any) -> list[str]:
    """The names, as in a checkpoint, of the tensors of a state in which this rank holds a nan.

    Waits for the device. The least nested names come first: parameters before their optimizer state.
    """
    flags = [_has_nan(x) for x in _floating(state)]
    if not flags or not bool(torch.stack([x.cpu() for x in flags]).any()):
        return []
    flat_tree = contents({"state": state}, shared=False)
    named = [(box.name, box.values) for box in flat_tree.boxes] + list(flat_tree.plain.items())
    names = dict.fromkeys(name for name, x in named if any(bool(_has_nan(y)) for y in _floating(x)))
    return sorted(names, key=lambda name: name.count("."))


def _floating(state: Any) -> Iterator[Tensor]:
    for x in optree.tree_leaves(state):
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and x.numel():
            yield x.detach()


def _has_nan(x: Tensor) -> Tensor:
    parts = copying.portions(x) if on_disk(x) else [x]
    return torch.stack([_lowest(part).isnan() for part in parts]).any()


def _lowest(x: Tensor) -> Tensor:
    """The minimum, or nan if there is one; unlike `isnan` it needs no memory of the tensor's size."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if x.dtype.itemsize == 1:
        return torch.stack([part.float().amin() for part in x.reshape(-1).split(2**22)]).amin()
    return x.amin()
