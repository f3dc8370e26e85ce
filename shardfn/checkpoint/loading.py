"""Loads a checkpoint into a tree of any placement; each rank reads what it holds."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.checkpoint import matching
from shardfn.checkpoint.contents import Contents, LocalBox, contents, generators, rebuilt
from shardfn.checkpoint.files import MODELS, FileReader, model_in
from shardfn.checkpoint.folders import is_checkpoint, manifests, restored, setting, source_of
from shardfn.checkpoint.matching import Differences, LoadRequest, Rule, StoredName, by_rules
from shardfn.checkpoint.missed_steps import StepCounts, step_counts, with_missed
from shardfn.checkpoint.reading import BoxReader, CheckpointReader
from shardfn.checkpoint.saving import wait_for_saves
from shardfn.checkpoint.team import CheckpointError, RankGroup, on_each_rank, team_of
from shardfn.local_paths import local_path
from shardfn.mesh import waiting
from shardfn.quoting import listed
from shardfn.shards.boxes import full_box
from shardfn.tiers import copying
from shardfn.tracebacks import api_boundary

_log = logging.getLogger("shardfn")


@waiting.during("sf.checkpoint.load")
@api_boundary
def load(
    path: str | os.PathLike[str],
    like: Any,
    *,
    part: str = "",
    names: Iterable[Rule] = (),
    strict: bool = True,
    ignore: str | Iterable[str] = (),
    donate: bool = True,
) -> Any:
    """Reads training state from files, on all ranks together; overwrites `like` unless `donate=False`.

    The files are a checkpoint of `save`, on any mesh and by any strategy, or of torch.distributed.checkpoint, such as
    FSDP2's; or files of whole tensors, by `torch.save` or safetensors. Each rank reads the parts that it holds, one
    after another. Checksums are compared, except for safetensors, which has none. In addition to its shards a rank
    needs 64 MB of memory, and the largest tensor of another tool's checkpoint that is not contiguous there.

    Entries of a `torch.save` file such as `{"state_dict": {"w": w}, "epoch": 3}` are named by their keys joined by
    dots, `state_dict.w` and `epoch`, as in our trees. Files are mapped, and unpickled with `weights_only=True`; each
    rank compares the checksums of its share of them before anything is overwritten.

    Args:
        path: of a checkpoint, as `latest` finds one; of a file, or of an index of several, whatever its suffix; or of a
            folder with `model.safetensors` or `pytorch_model.bin`, or an index of several such.
        like: a tree as `save` takes one, placed as the result is to be.
        part: the part that is read as if it were all: the keys to it, joined by dots, such as `"state_dict"` or
            `"model"`.
        names: rules from our names to those in the part, as for `export_hf`.
        strict: whether everything must be the same on both sides. If not, what is missing keeps its values in `like`,
            what is extra is ignored, dtypes are converted, and all this is logged by the logger `shardfn`; different
            shapes are still errors.
        ignore: regular expressions, or one; entries of the part whose whole name in it matches one are ignored.
        donate: write into `like`'s tensors and generators. If not, they are copied and stay unchanged.

    Returns:
        The tree, with the values that were read.

    Raises:
        CheckpointError: entries are missing, extra, or of another shape or dtype, all listed at once; rules do not fit;
            a file is damaged or foreign, or a pickle of more than tensors, numbers, strings and containers; files, part
            or rules differ between ranks. The same on every rank. Files that are gone or too short are found before
            anything is overwritten; if only a checksum of a checkpoint shows the damage, `like` may have been
            overwritten in part, and the message says what.
        TypeError, ValueError: `like` has contents that cannot be loaded.

    Example:
        ``tree = load(latest("runs/1"), {"params": params, "state": state, "step": 0})``, and
        ``params = load("last.ckpt", params, part="state_dict")``
    """
    wait_for_saves()
    return load_into(f"load {path}", path, like, LoadRequest(part, by_rules(names), strict, ignore), donate)


def reader_of(path: Path, group: RankGroup) -> BoxReader:
    """The reader for a checkpoint, or for files of whole tensors.

    Raises:
        CheckpointError: there is neither, or it is damaged.
    """
    if path.suffix and not path.exists() and not restored(path).exists():
        raise CheckpointError(f"{path} cannot be read: there is no such file or folder")
    if not path.is_dir() or not is_checkpoint(path):
        model = model_in(path)
        if model is not None:
            return FileReader(model, (group.rank, group.size))
    return CheckpointReader(source_of(path, MODELS))


def load_into(
    task: str,
    source: str | os.PathLike[str],
    template: Any,
    request: LoadRequest,
    donate: bool,
    then: Callable[[BoxReader], Any] | None = None,
    check: Callable[[Contents], None] = lambda flat_tree: None,
) -> Any:
    """Loads into a tree, as `load` describes.

    Args:
        task: the operation, for messages.
        source: path to read from.
        template: the tree.
        request: which part, under which names, how strictly.
        donate: whether to write into `template`.
        then: called with the reader before anything is overwritten; its result is returned, too.
        check: called with the flattened tree first.
    """
    path, tree, flat_tree, counts = on_each_rank(lambda: _prepared(source, template, donate))
    group = team_of(flat_tree.grids)

    def compared() -> tuple[BoxReader, Any, Differences, dict[str, StoredName], Any, tuple[Any, ...]]:
        check(flat_tree)
        reader, naming = reader_of(path, group), request.naming(flat_tree)
        differences, names = matching.compare_entries(reader.source, flat_tree, group, request, naming)
        if differences.shapes or (request.strict and differences):
            raise CheckpointError(f"{differences}{matching.hint(differences, names, reader.source, request)}")
        tensors = _as_there(flat_tree, reader, names)
        boxes = [*flat_tree.boxes, *(LocalBox(name, full_box(x.shape), x) for name, x in flat_tree.plain.items())]
        plan = reader.plan_reads(names[target.name].box(target) for target in boxes if target.name in tensors)
        reader.check(plan)
        renamed = sorted((tree_name, *name) for tree_name, name in naming.items() if name != StoredName(tree_name))
        digests = zlib.crc32(reader.identity().encode()), request.part, zlib.crc32(repr(renamed).encode())
        return reader, plan, differences, names, None if then is None else then(reader), digests

    reader, plan, differences, names, then_result, digests = group.run_on_each(task, compared)
    numbers = {name: reader.source.numbers.get(target.theirs) for name, target in names.items()}
    _refuse_different(task, group.gathered((str(path), digests), task))
    if differences and group.rank == 0:
        _log.warning("%s, not strict: %s", task, differences)
    if group.rank == 0 and (other := _other_setting(_about(reader).get("exact"), flat_tree.exact)):
        _log.warning("%s: the run goes on with other bits than it would have had: %s", task, other)

    def read() -> None:
        with torch.no_grad():
            reader.fill(plan)
            for name, x in flat_tree.plain.items():
                if isinstance(number := numbers.get(name), (int, float)):
                    x.fill_(number)
        for name, generator in generators(tree).items():
            if name in names:
                generator.set_state(flat_tree.plain[name])

    try:
        group.run_on_each(task, read)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_unusable(names) if donate else '`like` is as it was'}") from error.__cause__
    numbers |= {name: flat_tree.plain[name].item() for name in flat_tree.plain.keys() & flat_tree.numbers.keys()}
    loaded = rebuilt(tree, {name: numbers[name] for name in flat_tree.numbers.keys() & names.keys()})
    loaded = with_missed(loaded, counts, numbers, names)
    return loaded if then is None else (loaded, then_result)


def _about(reader: BoxReader) -> dict[str, Any]:
    """The facts that a checkpoint has about itself; none in other files."""
    about: dict[str, Any] = getattr(reader.source, "about", {})
    return about


def _other_setting(before: Any, exact: int) -> str:
    """A description of the facts that change the bits of an exact run that resumes here; empty if none does."""
    current = setting(exact).get("exact", {"parts": 0})
    before = before if isinstance(before, dict) else {"parts": 0}
    if current["parts"] == before["parts"] == 0:
        return ""
    if not current["parts"] or not before["parts"]:
        was, is_now = (f"with_exact({x['parts']})" if x["parts"] else "not exact" for x in (before, current))
        return f"it was {was}, and is {is_now}"
    changed = [(key, before.get(key), x) for key, x in current.items() if before.get(key) != x]
    return "; ".join(f"{key} was {old!r}, and is {new!r}" for key, old, new in changed)


def _as_there(flat_tree: Contents, reader: BoxReader, names: dict[str, StoredName]) -> set[str]:
    """Makes room for numbers that are 0-d tensors in the files; returns the names of all that are tensors there."""
    kinds = {name: reader.source.tensors.get(target.theirs) for name, target in names.items()}
    tensors = {name: kind.dtype for name, kind in kinds.items() if kind is not None}
    flat_tree.plain |= {
        name: torch.empty((), dtype=tensors[name], device="cpu") for name in tensors.keys() & flat_tree.numbers.keys()
    }
    return set(tensors)


def _refuse_different(task: str, facts: list[tuple[str, tuple[Any, ...]]]) -> None:
    """Raises CheckpointError unless all ranks read the same: parts of two checkpoints must not be mixed.

    Args:
        task: the operation, for messages.
        facts: of each rank its path, and what must be equal: digests of files and names, and the part.
    """
    first_path, first = facts[0]
    for rank, (path, other) in enumerate(facts):
        differing = [key for key, a, b in zip(("files", "part=", "names="), first, other, strict=True) if a != b]
        if differing:
            raise CheckpointError(
                f"{task}: ranks were told to read different things, of other {' and '.join(differing)}: rank 0 from "
                f"{first_path}, rank {rank} from {path}. Let one rank choose, and send it to the others"
            )


def latest(root: str | os.PathLike[str]) -> Path | None:
    """Finds the newest complete checkpoint in a folder.

    Args:
        root: folder of one run's checkpoints, the parent of the paths given to `save`.

    Returns:
        Its path; None if there is none, or no such folder. Torn checkpoints, and those of torch.distributed.checkpoint,
        are left out, with a warning of the logger `shardfn`. "Newest" is by the number that each has in the folder, not
        by name or time.

    Raises:
        CheckpointError: the folder, or a manifest in it, cannot be read, as after a disk failure.

    Example:
        ``if (path := latest("runs/1")) is not None: tree = load(path, tree)``
    """
    by_path = manifests(local_path(root, "checkpoint.latest: root"))
    for manifest in by_path.values():
        if isinstance(manifest, str):
            _log.warning("latest(%s) leaves out a checkpoint that is not whole: %s", root, manifest)
    complete = [path for path, manifest in by_path.items() if not isinstance(manifest, str)]
    return complete[-1] if complete else None


def _unusable(names: dict[str, StoredName]) -> str:
    """For a message: which tensors a failed load may have overwritten in part."""
    return (
        f"It was found on the way: these tensors of `like` are now in part the checkpoint's, in part as they were: "
        f"{listed(names)}. Load a whole checkpoint into them; donate=False leaves `like` as it is"
    )


def _prepared(source: Any, template: Any, donate: bool) -> tuple[Path, Any, Contents, list[StepCounts]]:
    """The path, the tree to fill, its flattened contents, and the counts of steps in it."""
    if source is None:
        raise TypeError("path must be a checkpoint, got None, which `latest` returns if no checkpoint is complete")

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return leaf.clone_state()
        return copying.clone(leaf.detach()) if isinstance(leaf, Tensor) else leaf

    tree, counts = step_counts(template if donate else optree.tree_map(copied, template))
    flat_tree = contents(tree, shared=False)
    for count in counts:
        count.expect(flat_tree)
    return local_path(source, "checkpoint.load: path"), tree, flat_tree, counts
