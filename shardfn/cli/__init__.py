"""The command line: `checkpoint inspect | verify | consolidate | reshard | diff | digest`, `translate`, `plan`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

from shardfn.checkpoint import tools, verifying
from shardfn.checkpoint.folders import found_at, is_checkpoint, restored, source_of
from shardfn.checkpoint.reading import Report
from shardfn.checkpoint.team import CheckpointError
from shardfn.checkpoint.tools import WriteResult
from shardfn.cli import planning
from shardfn.cli.printing import as_json, count, local, print_json, print_table, size
from shardfn.translate import TranslateError, translate

SAME, DIFFERENT, WRONG = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: its arguments; default: this process's.

    Returns:
        The exit status: 0; 1 for a damaged checkpoint, two that differ, keys without a translation, or a plan that does
        not fit; 2 if the command failed; 130 if it was interrupted; 141 if its output was closed.
    """
    try:
        args = _parser().parse_args(argv)
        if find_spec("rich") is None:
            raise CheckpointError("the command line needs rich, which is in the extra cli: pip install '.[cli]'")
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:  # the reader is gone: let the flush at exit succeed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (CheckpointError, TranslateError, _Usage) as error:
        return _say(str(error), WRONG)
    except Exception as error:
        return _say(f"{type(error).__name__}: {error}", WRONG)


class _Usage(Exception):
    """Arguments that are not a valid command."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Usage(f"{message}; see {self.prog} --help")


def _say(message: str, status: int) -> int:
    print(f"shardfn: {' '.join(message.split())}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="shardfn", description="Functional sharded training on PyTorch.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    about = "what checkpoints hold, whether they are whole, and what to make of them"
    _checkpoint(_command(commands, "checkpoint", None, about))
    codes = "Exit status: 0 all of it, 1 something has no counterpart or no value, 2 could not be read."
    about = "what another system's configuration is in lines of shardfn"
    command = _command(commands, "translate", _translate, about, codes)
    about = (
        "YAML of Accelerate or Composer, JSON of DeepSpeed, or Python with a strategy of Lightning, Composer or torch, "
        "or with the arguments of Transformers' Trainer"
    )
    command.add_argument("file", type=local, metavar="FILE", help=about)
    command.add_argument("--json", action="store_true", help="print JSON")
    about = "what a training step computes, sends and holds on many ranks, and whether it fits, without running it"
    codes = "Exit status: 0 planned, 1 it does not fit, or nothing does, 2 could not be planned."
    planning.add_arguments(_command(commands, "plan", planning.run, about, codes))
    return parser


def _command(commands: Any, name: str, run: Callable[..., int] | None, about: str, more: str = "") -> Any:
    command = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}. {more}".strip())
    command.set_defaults(run=run)
    return command


def _checkpoint(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = functools.partial(_command, commands)

    def only(sub: Any) -> None:
        sub.add_argument("--entries", metavar="REGEX", type=_pattern, help="only those whose whole name matches")

    sub = command("inspect", _inspect, "list what is in a checkpoint, or the checkpoints in a folder")
    sub.add_argument("path", type=local, metavar="PATH")
    only(sub)
    sub.add_argument("--json", action="store_true", help="print JSON")

    codes = "Exit status: 0 whole, 1 damaged, 2 could not be done."
    sub = command("verify", _verify, "read every byte, compare with the checksums, and name all damage", codes)
    sub.add_argument("paths", type=local, metavar="PATH", nargs="+")
    sub.add_argument("--json", action="store_true", help="print JSON, a list with an object for each path")

    sub = command("consolidate", _consolidate, "write whole tensors to one file", "SRC is also one of torch's own.")
    sub.add_argument("src", type=local, metavar="SRC")
    about = "NAME.safetensors: tensors, part by part; or NAME.pt: nested dicts of all, which must fit into memory"
    sub.add_argument("dst", type=local, metavar="DST", help=about)
    only(sub)
    sub.add_argument("--strip", metavar="PREFIX", default="", help="what names that begin with it lose, as `model.`")
    sub.add_argument("--overwrite", action="store_true", help="replace DST")

    about = "write the same checkpoint as another number of ranks would"
    sub = command("reshard", _reshard, about, "SRC is also one of torch's own, DST always one of shardfn.")
    sub.add_argument("src", type=local, metavar="SRC")
    sub.add_argument("dst", type=local, metavar="DST")
    sub.add_argument("--ranks", type=count, metavar="N", required=True)

    codes = "Exit status: 0 the same, 1 different, 2 could not be done."
    sub = command("diff", _diff, "compare two checkpoints, written by any number of ranks", codes)
    sub.add_argument("a", type=local, metavar="A")
    sub.add_argument("b", type=local, metavar="B")
    about = "absolute differences up to which numbers are the same; default: %(default)s"
    sub.add_argument("--tolerance", type=_tolerance, metavar="T", default=0.0, help=about)
    sub.add_argument("--json", action="store_true", help="print JSON")

    about = "print a hash of all bits, which is the same for any number of ranks that wrote them"
    sub = command("digest", _digest, about, "Entries of which each rank has its own are left out.")
    sub.add_argument("path", type=local, metavar="PATH")
    only(sub)


def _inspect(args: argparse.Namespace) -> int:
    if not is_checkpoint(restored(args.path)):
        summaries = tools.summaries(args.path)
        if args.entries is not None:
            raise CheckpointError(f"{args.path} is a folder of checkpoints: --entries is for one of them")
        if args.json:
            return print_json({"path": args.path, "checkpoints": summaries})
        rows = [
            (entry.path.name, *_summary_row(entry).values(), "latest" if entry.latest else "") for entry in summaries
        ]
        print_table(["checkpoint", *_summary_row(summaries[0]), ""], rows, right=(5, 6, 7))
        return SAME
    about, source = tools.summary(args.path), source_of(args.path)
    names = tools.matching_names(source, args.entries)
    tensors = tools.entries(source, names)
    numbers = {name: source.numbers[name] for name in names if name in source.numbers}
    if args.json:
        return print_json({**as_json(about), "by_rank": source.by_rank, "entries": tensors, "numbers": numbers})
    if tensors:
        cells = [(entry.name, entry.dtype, list(entry.shape), size(entry.bytes), entry.parts) for entry in tensors]
        print_table(["tensor", "dtype", "shape", "bytes", "parts"], cells, right=(3, 4))
    if numbers:
        rows = [(name, type(value).__name__, repr(value)) for name, value in numbers.items()]
        print_table(["number", "type", "value"], rows)
    for name, ranks in source.by_rank.items():
        print(f"{name} is that of {ranks} ranks, each its own")
    print_table(["", ""], [(key, value) for key, value in _summary_row(about).items()])
    if not about.whole:
        print(f"Files are gone or cut off: see shardfn checkpoint verify {args.path}")
    return SAME


def _summary_row(entry: tools.Summary) -> dict[str, Any]:
    state = {"state": "whole" if entry.whole else "torn", "format": entry.format, "made": entry.made}
    columns = {**state, "ranks": entry.ranks, "number": entry.number, "bytes": size(entry.bytes), "files": entry.files}
    return {key: "-" if value is None else value for key, value in columns.items()}


def _verify(args: argparse.Namespace) -> int:
    for path in args.paths:
        found_at(path)
    verdicts = []
    for path in args.paths:
        with _bar(f"verify {path}") as report:
            verdicts.append(verifying.verify(path, report))
        if not args.json:
            verdict = verdicts[-1]
            content = f"{verdict.entries} entries, {size(verdict.bytes)} in {verdict.files} files"
            if verdict.damage:
                places = f"{len(verdict.damage)} place{'s' * (len(verdict.damage) > 1)}"
                print(f"{verdict.path}: damaged in {places}; {content}")
                rows = [
                    (bad.file, f"{bad.start}-{bad.stop}", ", ".join(bad.entries), bad.what) for bad in verdict.damage
                ]
                print_table(["file", "bytes", "entries", "what is wrong"], rows)
            else:
                print(f"{verdict.path}: whole; {content}")
            if verdict.format == "torch":
                print(
                    "  torch.distributed.checkpoint keeps no checksums of files: only the structure could be checked, "
                    "and the checksums that items have themselves"
                )
    if args.json:
        print_json([{**as_json(verdict), "whole": not verdict.damage} for verdict in verdicts])
    return DIFFERENT if any(verdict.damage for verdict in verdicts) else SAME


def _consolidate(args: argparse.Namespace) -> int:
    with _bar(f"consolidate {args.src}") as report:
        written = tools.consolidate(
            args.src, args.dst, pattern=args.entries, strip=args.strip, overwrite=args.overwrite, report=report
        )
    return _print_written(written)


def _reshard(args: argparse.Namespace) -> int:
    with _bar(f"reshard {args.src}") as report:
        written = tools.reshard(args.src, args.dst, args.ranks, report=report)
    return _print_written(written)


def _print_written(written: WriteResult) -> int:
    print(f"{written.path}: {written.tensors} tensors, {written.numbers} numbers, {size(written.bytes)}")
    if written.left_out:
        print(f"left out, because it cannot hold them: {', '.join(written.left_out)}")
    return SAME


def _diff(args: argparse.Namespace) -> int:
    with _bar(f"diff {args.a} {args.b}") as report:
        difference = tools.diff(args.a, args.b, tolerance=args.tolerance, report=report)
    if args.json:
        print_json({"same": not difference, **as_json(difference)})
        return DIFFERENT if difference else SAME
    if not difference:
        print("the same")
        return SAME
    rows: list[tuple[Any, ...]] = [(name, "only in A", "") for name in difference.only_a]
    rows += [(name, "only in B", "") for name in difference.only_b]
    rows += [(name, "of another kind", f"{a}; {b}") for name, (a, b) in difference.kinds.items()]
    rows += [(name, "another number", f"{a!r}; {b!r}") for name, (a, b) in difference.numbers.items()]
    rows += [
        (name, "other values", f"{differ} of {numel}, by up to {largest:.3g}")
        for name, (differ, numel, largest) in difference.values.items()
    ]
    print_table(["entry", "is", "A; B"], rows)
    return DIFFERENT


def _digest(args: argparse.Namespace) -> int:
    with _bar(f"digest {args.path}") as report:
        print(tools.digest(args.path, args.entries, report=report))
    return SAME


def _translate(args: argparse.Namespace) -> int:
    translation = translate(args.file)
    status = SAME if translation.complete else DIFFERENT
    if args.json:
        print_json({**as_json(translation), "complete": translation.complete})
        return status
    print(translation.program)
    rows = [(row.key, row.value, row.status, row.text) for row in translation.rows]
    print_table([f"key of {translation.system}", "value", "is", "what it becomes, or why it has no meaning"], rows)
    return status


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from error
    return text


def _tolerance(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) >= 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a tolerance: a number that is not negative")


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Report]:
    """A progress bar of bytes, shown on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(20), DownloadColumn(), TransferSpeedColumn()
    console, shown = Console(stderr=True), sys.stderr.isatty()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not shown, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
