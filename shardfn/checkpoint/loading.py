"""From a checkpoint to a tree of any placement, each rank reading what it holds."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardfn.checkpoint import matching
from shardfn.checkpoint.boxes import whole
from shardfn.checkpoint.contents import Contents, LocalBox, contents, generators, rebuilt
from shardfn.checkpoint.files import MODELS, FileReader, model_in
from shardfn.checkpoint.folders import is_checkpoint, manifests, restored, source_of
from shardfn.checkpoint.matching import Asked, Differences, Name, Rule, by_rules
from shardfn.checkpoint.reading import CheckpointReader, Reader
from shardfn.checkpoint.saving import finish
from shardfn.checkpoint.team import CheckpointError, Team, on_each_rank, team_of
from shardfn.mesh import waiting
from shardfn.quoting import listed, short_errors
from shardfn.tiers import copying

_log = logging.getLogger("shardfn")


@waiting.during("sf.checkpoint.load")
@short_errors
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

    They are a checkpoint of `save`, on any mesh and by any strategy, or of torch.distributed.checkpoint, such as
    FSDP2's; or files of whole tensors, by `torch.save` or safetensors. Each rank reads the parts that it holds, one
    after another. Checksums are compared, but for safetensors, which has none. In addition to its shards a rank needs
    64 MB of memory, and the largest tensor of others' checkpoints that is not contiguous there.

    Of what `torch.save` wrote, `{"state_dict": {"w": w}, "epoch": 3}` say, entries are called by their keys joined by
    dots, `state_dict.w` and `epoch`, as those of our trees. Files are mapped, and unpickled as `weights_only=True`
    does; each rank compares the checksums of its share of them before anything is overwritten.

    Args:
        path: of a checkpoint, as `latest` finds one; of a file, or of an index of several, whatever its suffix; or of a
            folder with `model.safetensors` or `pytorch_model.bin`, or an index of several such.
        like: a tree as `save` takes one, placed as the result is to be.
        part: which part is read, as if it were all: the keys to it, joined by dots, `"state_dict"` or `"model"` say.
        names: rules from our names to those in the part, as for `export`.
        strict: whether everything must be the same on both sides. If not, what is missing stays as it is in `like`,
            what is extra is ignored, other dtypes are converted, and the log of `shardfn` says so; other shapes are
            still errors.
        ignore: regular expressions, or one; entries of the part whose whole name in it matches one are not wanted.
        donate: write into `like`'s tensors and generators. If not, they stay as they are, and are copied.

    Returns:
        The tree, with the values that were read.

    Raises:
        CheckpointError: what is missing, extra, of another shape or dtype, all at once; rules that do not fit; a
            damaged or foreign file; a pickle of more than tensors, numbers, strings and containers; files, a part or
            rules that differ between ranks. The same on every rank. Files that are gone or too short are found before
            anything is overwritten; where only a checksum of a checkpoint shows damage, `like` may have been
            overwritten in part, and the message says what.
        TypeError, ValueError: what is in `like` cannot be loaded.

    Example:
        ``tree = load(latest("runs/1"), {"params": params, "state": state, "step": 0})``, and
        ``params = load("last.ckpt", params, part="state_dict")``
    """
    finish()
    return filled(f"load {path}", path, like, Asked(part, by_rules(names), strict, ignore), donate)


def reader_of(path: Path, team: Team) -> Reader:
    """What reads a checkpoint, or files of whole tensors.

    Raises:
        CheckpointError: there is neither, or it is damaged.
    """
    if path.suffix and not path.exists() and not restored(path).exists():
        raise CheckpointError(f"{path} cannot be read: there is no such file or folder")
    if not path.is_dir() or not is_checkpoint(path):
        model = model_in(path)
        if model is not None:
            return FileReader(model, (team.rank, team.size))
    return CheckpointReader(source_of(path, MODELS))


def filled(
    what: str,
    source: str | os.PathLike[str],
    like: Any,
    asked: Asked,
    donate: bool,
    then: Callable[[Reader], Any] | None = None,
    check: Callable[[Contents], None] | None = None,
) -> Any:
    """The tree with what was read, as `load` says; `then` is run on the reader, too, and `check` before."""
    path, tree, held = on_each_rank(lambda: _begun(source, like, donate))
    team = team_of(held.grids)

    def compared() -> tuple[Reader, Any, Differences, dict[str, Name], Any, _Common]:
        if check is not None:
            check(held)
        reader, called = reader_of(path, team), asked.naming(held)
        differ, names = matching.compared(reader.source, held, team, asked, called)
        if differ.shapes or (asked.strict and differ):
            raise CheckpointError(f"{differ}{matching.hint(differ, names, reader.source, asked)}")
        every = [*held.boxes, *(LocalBox(name, whole(x.shape), x) for name, x in held.plain.items())]
        wanted = reader.wanted(names[one.name].box(one) for one in every if one.name in names)
        reader.check(wanted)
        more = None if then is None else then(reader)
        return reader, wanted, differ, names, more, _common(path, reader, asked, called)

    reader, wanted, differ, names, more, common = team.each(what, compared)
    _refuse_different(what, team.gathered(common, what))
    if differ and team.rank == 0:
        _log.warning("%s, not strict: %s", what, differ)

    def read() -> None:
        with torch.no_grad():
            reader.fill(wanted)
        for name, generator in generators(tree).items():
            if name in names:
                generator.set_state(held.plain[name])

    try:
        team.each(what, read)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_unusable(names) if donate else '`like` is as it was'}") from error.__cause__
    numbers = reader.source.numbers
    made = rebuilt(tree, {name: numbers[one.theirs] for name, one in names.items() if name in held.numbers})
    return made if then is None else (made, more)


class _Common(NamedTuple):
    """What all ranks must have in common, in short, and the path from which a rank has it."""

    files: int
    part: str
    names: int
    path: str


def _common(path: Path, reader: Reader, asked: Asked, called: dict[str, Name]) -> _Common:
    own = sorted((ours, *name) for ours, name in called.items() if name != Name(ours))
    return _Common(zlib.crc32(reader.identity().encode()), asked.part, zlib.crc32(repr(own).encode()), str(path))


def _refuse_different(what: str, every: list[_Common]) -> None:
    """Raises CheckpointError unless all ranks read the same: parts of two checkpoints make up none."""
    for rank, other in enumerate(every):
        differ = [key for key, a, b in zip(("files", "part=", "names="), every[0], other, strict=False) if a != b]
        if differ:
            raise CheckpointError(
                f"{what}: ranks were told to read different things, of other {' and '.join(differ)}: rank 0 from "
                f"{every[0].path}, rank {rank} from {other.path}. Let one rank choose, and send it to the others"
            )


def latest(root: str | os.PathLike[str]) -> Path | None:
    """Finds the newest whole checkpoint in a folder.

    Args:
        root: of one run's checkpoints, the parent of what `save` is given.

    Returns:
        Its path; None where there is none, or no such folder. One that is torn, or torch.distributed.checkpoint's own,
        is never it; the log of `shardfn` names those. "Newest" is by the number that each has in the folder, not by
        name or time.

    Raises:
        CheckpointError: the folder, or a manifest in it, cannot be read, as where a disk has failed.

    Example:
        ``if (path := latest("runs/1")) is not None: tree = load(path, tree)``
    """
    found = manifests(Path(root))
    for what in found.values():
        if isinstance(what, str):
            _log.warning("latest(%s) leaves out a checkpoint that is not whole: %s", root, what)
    whole = [path for path, what in found.items() if not isinstance(what, str)]
    return whole[-1] if whole else None


def _unusable(names: dict[str, Name]) -> str:
    """What a load that failed on the way may have written to, on some rank."""
    return (
        f"It was found on the way: these tensors of `like` are now in part the checkpoint's, in part as they were: "
        f"{listed(names)}. Load a whole checkpoint into them; donate=False leaves `like` as it is"
    )


def _begun(source: Any, like: Any, donate: bool) -> tuple[Path, Any, Contents]:
    """The path, the tree that is filled, and what it holds."""
    if source is None:
        raise TypeError("the path is None, which `latest` returns if there is no complete checkpoint")

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return leaf.clone_state()
        return copying.clone(leaf.detach()) if isinstance(leaf, Tensor) else leaf

    tree = like if donate else optree.tree_map(copied, like)
    return Path(source), tree, contents(tree, shared=False)
