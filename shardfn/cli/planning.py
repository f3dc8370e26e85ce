"""`shardfn plan`: a step of one's own, of a configuration or of a known model; or what of many ways fits."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from shardfn.cli.printing import as_json, count, local, print_table, size
from shardfn.local_paths import local_path
from shardfn.mesh.make import make_mesh
from shardfn.plan import planning, presets
from shardfn.plan.drawing import duration
from shardfn.plan.fits import RESERVE, size_of
from shardfn.plan.machines import Chip, Links
from shardfn.plan.plan import StepPlan
from shardfn.plan.timeline import Timeline
from shardfn.quoting import amount, byte_count
from shardfn.shapes.searching import Candidate, search
from shardfn.shapes.settings import OPTIMIZERS, Setting, plan_shape, planned_config
from shardfn.shapes.sizes import SHAPES, shape
from shardfn.shards.placement import Tier

FITS, DOES_NOT = 0, 1


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Gives the command its arguments."""
    about = (
        "MODULE:FUNCTION, a function of the mesh that returns a step and its arguments, in a tuple; or a config.json "
        "of Hugging Face, or its folder"
    )
    command.add_argument("what", nargs="?", metavar="STEP", help=about)
    command.add_argument("--model", metavar="NAME", help=f"in place of STEP: {', '.join(SHAPES)}")
    command.add_argument("--mesh", type=_mesh_axes, metavar="AXES", help="sizes of axes, such as replica=128,shard=8")
    command.add_argument("--ranks", type=count, metavar="N", help="in place of --mesh: list what fits on N ranks")
    command.add_argument("--rank", type=int, default=0, metavar="R", help="whose plan; default: 0")
    command.add_argument("--strategy", metavar="NAME", help="default: %(default)s")
    command.add_argument("--remat", choices=("off", "on", "offload"), help="default: %(default)s")
    command.add_argument("--batch", type=count, metavar="N", help="sequences for a rank; default: 1")
    command.add_argument("--micro", type=count, metavar="N", help="micro-batches; default: 1")
    command.add_argument("--sequence", type=count, metavar="N", help="tokens; default: the model's most")
    command.add_argument("--dtype", help="of computing and gathering; default: %(default)s")
    command.add_argument("--kept", metavar="DTYPE", help="of parameters, gradients and state; default: %(default)s")
    command.add_argument("--optimizer", choices=tuple(OPTIMIZERS), help="default: %(default)s")
    command.add_argument(
        "--lora", type=count, metavar="RANK", help="train adapters on all linear layers; default: none"
    )
    command.add_argument("--base", choices=("full", "nf4", "int8"), help="beneath adapters; default: %(default)s")
    for kind in ("params", "grads", "state"):
        command.add_argument(f"--{kind}-on", choices=get_args(Tier), help="default: %(default)s")
    command.set_defaults(**_OF_MODELS)
    command.add_argument(
        "--fit", type=_memory_size, metavar="SIZE", help="the memory of a device, such as 80GiB; default: the chip's"
    )
    command.add_argument(
        "--reserve", type=_memory_size, default=RESERVE, metavar="SIZE", help="of it, left free; default: %(default)s"
    )
    command.add_argument(
        "--chip",
        default="h100",
        metavar="NAME",
        help=f"{', '.join(presets.CHIPS)}, or a file that Chip.save wrote; default: %(default)s",
    )
    command.add_argument(
        "--links", metavar="NAME", help="as --chip, or a file that Links.save wrote; default: the chip's"
    )
    command.add_argument("--per-node", type=count, default=8, metavar="N", help="ranks on a node; default: 8")
    command.add_argument("--schedule", action="store_true", help="print every work in order, with its times and bytes")
    command.add_argument("--json", type=local, metavar="FILE", help="write the plan, or the list, as JSON")
    command.add_argument("--picture", type=local, metavar="FILE", help="write a picture of its timeline and memory")
    command.add_argument("--trace", type=local, metavar="FILE", help="write a trace for chrome://tracing or Perfetto")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        The exit status.

    Raises:
        ValueError: arguments contradict each other; or as `planned`.
    """
    if (args.what is None) == (args.model is None):
        raise ValueError("plan: pass one of STEP and --model NAME; see shardfn plan --help")
    if (args.mesh is None) == (args.ranks is None):
        raise ValueError("plan: pass one of --mesh AXES, for one plan, and --ranks N, for a list of what fits")
    for size_given in (args.fit, args.reserve):
        if size_given is not None:
            size_of(size_given)
    for file in (args.json, args.picture, args.trace):
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(f"plan: {file} cannot be written: there is no folder {file.absolute().parent}")
    chip = _load_or_find(args.chip, Chip.load, presets.chip)
    links = _load_or_find(args.links or args.chip, Links.load, presets.links)
    if args.ranks is not None:
        return _list_candidates(args, links, chip)
    made, tokens = _requested_plan(args)
    timeline = made.timed(links, chip, tokens=tokens)
    verdict = made.fits(args.fit or chip.memory, args.reserve)
    if args.schedule:
        _print_schedule(made, timeline)
    print(made.table())
    print()
    print(timeline)
    print(verdict)
    if args.json:
        made.save(args.json)
    if args.picture:
        made.save_picture(args.picture, timeline)
    if args.trace:
        made.trace(args.trace, timeline)
    return FITS if verdict or not args.fit else DOES_NOT


def _print_schedule(made: StepPlan, timeline: Timeline) -> None:
    """Prints a line for each work: when it begins and ends on the chip, and what it computes or moves."""
    rows = [
        (
            number, duration(begins), duration(ends), work.stream, work.kind, work.phase, work.stage or "-",
            " x ".join(work.axis) or "-", amount(sum(work.flops.values()), "FLOP") if work.flops else "-",
            byte_count(work.sent) if work.sent else "-", ", ".join(map(str, work.after)) or "-",
        )
        for number, (work, begins, ends) in enumerate(zip(made.works, timeline.begins, timeline.ends, strict=True))
    ]  # fmt: skip
    head = ["", "begins", "ends", "stream", "work", "pass", "stage", "axis", "computes", "sends", "after"]
    print_table(head, rows, right=(0, 1, 2, 8, 9))


def _requested_plan(args: argparse.Namespace) -> tuple[StepPlan, int | None]:
    """Returns the plan, and the tokens that a rank processes, if they are known."""
    setting = _setting(args, args.mesh)
    if args.model is not None:
        known = shape(args.model)
        each = args.batch * (args.sequence or known.context)
        return plan_shape(known, setting, args.rank), each // args.mesh.get("tensor", 1)
    local_path(args.what, "plan: STEP")
    if ":" in args.what and not Path(args.what).exists():
        return _user_plan(args), None
    if not Path(args.what).exists():
        raise ValueError(f"plan: there is no file {args.what!r}; for your own step write MODULE:FUNCTION")
    tokens = args.batch * args.sequence or None
    return planned_config(Path(args.what), setting, args.rank), tokens


# Options for what this command makes itself, and their defaults.
_OF_MODELS = {fact.name: fact.default for fact in fields(Setting) if fact.name not in ("mesh", "tiers", "per_node")}
_OF_MODELS |= dict.fromkeys(("params_on", "grads_on", "state_on"), "device")


def _user_plan(args: argparse.Namespace) -> StepPlan:
    """Returns the plan of the user's own step."""
    given = [f"--{name.replace('_', '-')}" for name, default in _OF_MODELS.items() if getattr(args, name) != default]
    if given:
        raise ValueError(
            f"plan: {', '.join(given)}: not supported with your own step, {args.what}. Leave it out, and change the "
            f"function"
        )
    module, _, name = args.what.partition(":")
    if module.endswith(".py"):
        raise ValueError(f"plan: {args.what}: write a module, not its file: {module.removesuffix('.py')}:{name}")
    sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ValueError(f"plan: {module} has no function {name!r}")
    with planning.mode(math.prod(args.mesh.values()), args.rank, per_node=args.per_node):
        made = found(make_mesh(**args.mesh))
        if not isinstance(made, tuple) or not made or not callable(made[0]):
            raise ValueError(
                f"plan: {args.what} returned {type(made).__name__}; it returns a tuple, of a step and its arguments: "
                f"return step, params, state, tokens"
            )
        return planning.step(*made)


def _setting(args: argparse.Namespace, mesh: dict[str, int]) -> Setting:
    tiers = {kind: getattr(args, f"{kind}_on") for kind in ("params", "grads", "state")}
    facts = {name: getattr(args, name) for name in ("per_node", *_OF_MODELS) if not name.endswith("_on")}
    return Setting(mesh, tiers={kind: tier for kind, tier in tiers.items() if tier != "device"}, **facts)


def _list_candidates(args: argparse.Namespace, links: Links, chip: Chip) -> int:
    """Lists what fits, cheapest first."""
    views = [f"--{name}" for name in ("schedule", "picture", "trace") if getattr(args, name)]
    if views:
        raise ValueError(f"plan: {', '.join(views)}: of one plan, and --ranks lists many: pass --mesh AXES instead")
    if args.model is None:
        raise ValueError("plan: --ranks lists ways to train a known model: pass --model NAME, or --mesh AXES for STEP")

    def show_progress(each: Candidate) -> None:
        if sys.stderr.isatty():
            print(f"\r{each.setting}"[:100].ljust(100), end="", file=sys.stderr)

    memory, reserve = size_of(args.fit or chip.memory), size_of(args.reserve)
    room = f"{size(memory)}, of which {size(reserve)} are left free"
    found = search(
        shape(args.model), args.ranks, memory, _setting(args, {"shard": args.ranks}), links, chip,
        reserve=reserve, told=show_progress,
    )  # fmt: skip
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if args.json:
        listed = [as_json(each) | {"fits": each.fits} for each in found]
        args.json.write_text(json.dumps(listed, indent=1) + "\n")
    fitting = [each for each in found if each.fits]
    if not fitting:
        nearest = max(found, key=lambda each: each.spare)
        missing = size(-nearest.spare)
        print(f"nothing of {len(found)} fits into {room}; nearest: {nearest.setting}, with {missing} missing")
        return DOES_NOT
    rows = list(map(_candidate_row, fitting))
    print_table(list(rows[0]), [tuple(row.values()) for row in rows], right=(3, 5, 6, 7, 8, 9, 10))
    print(f"{len(fitting)} of {len(found)} fit into {room}; on {chip.name}, {links.name}")
    return FITS


def _candidate_row(each: Candidate) -> dict[str, Any]:
    figures, setting = each.figures, each.setting
    assert figures is not None, "what fits was planned"
    return {
        "strategy": setting.strategy,
        "mesh": ",".join(f"{name}={number}" for name, number in setting.mesh.items()),
        "remat": setting.remat,
        "batch": setting.batch,
        "on the host": ", ".join(setting.tiers),
        "needs": size(figures.needed),
        "s a step": f"{figures.seconds:.3g}",
        "exposed": f"{100 * figures.exposed / figures.seconds:.0f} %",
        "MFU": f"{100 * figures.utilization:.1f} %",
        "tokens/s": f"{each.tokens:,.0f}",
        "GPU h / 1e9 tokens": f"{each.cost:,.0f}",
    }


def _memory_size(text: str) -> str:
    if re.fullmatch(r"[\d.]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} has no unit: write {text}GiB, or {text}GB")
    return text


def _mesh_axes(text: str) -> dict[str, int]:
    parts = [re.fullmatch(r"([A-Za-z_]\w*)=([1-9]\d*)", part.strip()) for part in text.split(",")]
    axes = {part[1]: int(part[2]) for part in parts if part}
    if len(axes) != len(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh: write axes and sizes, such as replica=128,shard=8")
    return axes


def _load_or_find(name: str, load: Callable[[Any], Any], known: Callable[[str], Any]) -> Any:
    return load(name) if name.endswith(".json") else known(name)
