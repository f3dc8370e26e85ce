"""Behaviors that the tests of torch.distributed.checkpoint check, and files in both directions."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardfn as sf
import shardfn.optim as so
from shardfn import P, checkpoint
from shardfn.testing import world
from tests.models import STRATEGIES, data_mesh, distance, drawn

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
KEPT = so.adamw(0.1)


def params(seed: int = 1) -> Any:
    draw = drawn(seed)
    return {"layers": [{"w": draw(7, 3), "b": draw(3)} for _ in range(2)], "head": {"scale": draw(1)}}


def placed(seed: int = 1, strategy: str = "full_shard", tree: Any = None) -> Any:
    mesh = data_mesh(dist.get_world_size())
    return sf.shard(params(seed) if tree is None else tree, mesh, STRATEGIES[strategy])


def stepped(ps: Any, state: Any, steps: int = 2) -> tuple[Any, Any]:
    for number in range(steps):
        ps, state = KEPT.step(ps, optree.tree_map(lambda x, number=number: torch.sin(3 * x + number), ps), state)
    return ps, state


def everywhere(ranks: int, f: Callable[..., Any], *args: Any) -> Any:
    """The results of a function on a world's ranks, which are all the same."""
    first, *others = world(ranks).run(f, *args)
    assert all(distance(other, first) == 0 for other in others)
    return first


def saved(path: Path, ranks: int = 2, strategy: str = "full_shard", **more: Any) -> None:
    everywhere(ranks, lambda: checkpoint.save(path, {"model": placed(1, strategy), **more}) or torch.zeros(1))


def read(path: Path, ranks: int = 2, strategy: str = "full_shard", **options: Any) -> Any:
    return everywhere(
        ranks, lambda: sf.unshard(checkpoint.load(path, {"model": placed(0, strategy)}, **options)["model"])
    )


def refusal(path: Path, like: Callable[[], Any], **options: Any) -> str:
    """What all ranks say of a tree that does not fit."""
    errors = world(2).errors(lambda: checkpoint.load(path, like(), **options))
    said = {str(error) for error in errors}
    assert len(said) == 1
    assert all("CheckpointError" in str(type(error)) + str(error) for error in errors), said
    return said.pop()


# --- other meshes and placements ---


def reshards_on_load(folder: Path) -> None:
    for writers, first in ((2, "full_shard"), (4, "hybrid_shard"), (1, "ddp")):
        path = folder / f"{writers}"
        saved(path, writers, first)
        for readers, second in ((1, "full_shard"), (3, "full_shard"), (4, "hfsdp"), (4, "ddp")):
            assert distance(read(path, readers, second), params()) == 0, (writers, readers)


def a_tensor_that_is_cut_by_a_spec_is_loaded_by_another(folder: Path) -> None:
    whole = {"w": drawn(3)(8, 12)}

    def run(spec: P, saving: bool) -> Any:
        mesh = sf.make_mesh(device="cpu", data=1, tensor=dist.get_world_size())
        start = whole if saving else {"w": torch.zeros(8, 12).double()}
        ps = sf.shard(start, mesh, sf.full_shard("data"), specs={"w": spec})
        if saving:
            return checkpoint.save(folder / "one", ps) or whole
        return sf.unshard(checkpoint.load(folder / "one", ps))

    everywhere(4, run, P("tensor"), True)
    for ranks, spec in ((2, P(None, "tensor")), (4, P(None, "tensor")), (4, P()), (1, P("tensor"))):
        assert distance(everywhere(ranks, run, spec, False), whole) == 0


def optimizer_state_reshards(folder: Path) -> None:
    def written() -> Any:
        ps = placed()
        ps, state = stepped(ps, KEPT.init(ps))
        checkpoint.save(folder / "one", {"model": ps, "optim": state})
        return sf.unshard(stepped(ps, state)[0])

    def resumed() -> Any:
        like = placed(0, "hybrid_shard")
        now = checkpoint.load(folder / "one", {"model": like, "optim": KEPT.init(like)})
        return sf.unshard(stepped(now["model"], now["optim"])[0])

    want = everywhere(2, written)
    assert distance(everywhere(4, resumed), want) < 1e-12


# --- what a state may hold ---


def nested_containers_and_values_that_are_no_tensors(folder: Path) -> None:
    state = {
        "list": [{"step": 3}, 0.5, "text", True], "tuple": (torch.arange(3), None), "empty": {}, "": {"key": -math.inf},
        "scalar": torch.tensor(7),
    }  # fmt: skip
    zeros = optree.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else type(x)(), state)
    zeros["list"][0]["step"] = 0

    def run() -> Any:
        checkpoint.save(folder / "one", state)
        return checkpoint.load(folder / "one", zeros)

    for found in world(2).run(run):
        pairs = zip(optree.tree_leaves(found), optree.tree_leaves(state), strict=True)
        assert all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


def dtypes_and_bits_are_preserved(folder: Path) -> None:
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.int8, torch.bool, torch.uint8)
    tree = {str(kind): torch.arange(-3, 4).to(kind) for kind in kinds}
    tree["special"] = torch.tensor([math.nan, math.inf, -0.0, 5e-324], dtype=torch.float64)

    def run() -> Any:
        checkpoint.save(folder / "one", {"plain": tree, "model": placed(tree={"a": {"x": tree["special"]}})})
        like = {"plain": optree.tree_map(torch.zeros_like, tree), "model": placed(tree={"a": {"x": torch.zeros(4)}})}
        like["model"] = placed(tree={"a": {"x": torch.zeros(4).double()}})
        now = checkpoint.load(folder / "one", like)
        return now["plain"] | {"shards": sf.unshard(now["model"])["a"]["x"]}

    for found in world(2).run(run):
        for name, want in (*tree.items(), ("shards", tree["special"])):
            assert found[name].dtype == want.dtype
            assert torch.equal(found[name].view(torch.uint8), want.view(torch.uint8)), name


def strided_and_expanded_tensors(folder: Path) -> None:
    base = drawn(5)(6, 4)
    tree = {"turned": base.T, "every other": base[::2], "expanded": base[:1].expand(3, 4), "empty": base[:0]}

    def run() -> Any:
        checkpoint.save(folder / "one", tree)
        return checkpoint.load(folder / "one", optree.tree_map(lambda x: torch.zeros(x.shape).double(), tree))

    assert distance(everywhere(2, run), tree) == 0


def loading_is_into_the_tensors_that_are_there(folder: Path) -> None:
    def run() -> Tensor:
        ps = placed()
        checkpoint.save(folder / "one", ps)
        like = placed(0)
        now = checkpoint.load(folder / "one", like)
        assert now["head"].values.data_ptr() == like["head"].values.data_ptr()
        other = placed(0)
        checkpoint.load(folder / "one", other, donate=False)
        return torch.tensor(distance(sf.unshard(other), params(0)))

    assert everywhere(2, run) == 0


# --- what does not fit ---


def missing_and_extra_entries_are_all_named(folder: Path) -> None:
    saved(folder / "one", step=3)
    like = lambda: {"model": placed() | {"tail": {"w": torch.zeros(2)}}}  # noqa: E731
    said = refusal(folder / "one", like)
    assert "missing in the checkpoint: model.tail.w" in said
    assert "not in the tree: step" in said


def missing_entries_are_kept_if_asked_for(folder: Path) -> None:
    saved(folder / "one", step=3)

    def run() -> Any:
        like = {"model": placed(0), "tail": torch.ones(2)}
        now = checkpoint.load(folder / "one", like, strict=False)
        return {"tail": now["tail"], "model": sf.unshard(now["model"])}

    assert distance(everywhere(2, run), {"tail": torch.ones(2), "model": params()}) == 0


def entries_can_be_ignored(folder: Path) -> None:
    saved(folder / "one", step=3)
    assert distance(read(folder / "one", ignore="step"), params()) == 0


def model_of(tree: Any) -> Any:
    return {"model": placed(tree=tree)}


def another_shape_or_dtype_is_refused(folder: Path) -> None:
    saved(folder / "one")
    for scale in (torch.zeros(2).double(), torch.zeros(1)):
        tree = params() | {"head": {"scale": scale}}
        assert "head.scale" in refusal(folder / "one", functools.partial(model_of, tree))


def another_shape_is_refused_even_if_not_strict(folder: Path) -> None:
    saved(folder / "one")
    tree = params() | {"head": {"scale": torch.zeros(2).double()}}
    assert "head.scale" in refusal(folder / "one", functools.partial(model_of, tree), strict=False)


def a_part_of_a_checkpoint(folder: Path) -> None:
    saved(folder / "one", step=3)
    assert distance(everywhere(2, lambda: sf.unshard(checkpoint.load(folder / "one", placed(0), part="model"))),
                    params()) == 0  # fmt: skip


def a_damaged_file_is_refused(folder: Path) -> None:
    saved(folder / "one")
    assert not checkpoint.verify(folder / "one").damage
    file = max((file for file in (folder / "one").glob("*.distcp")), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    place = content.index(params()["layers"][0]["w"].numpy().tobytes()[:32])
    content[place] ^= 1
    file.write_bytes(content)
    assert checkpoint.verify(folder / "one").damage
    assert file.name in refusal(folder / "one", lambda: {"model": placed(0)})


def a_folder_without_metadata_is_no_checkpoint(folder: Path) -> None:
    state_dict_saver.save({"model": params()}, checkpoint_id=folder / "one", no_dist=True)
    (folder / "one" / ".metadata").unlink()
    assert "is not a checkpoint" in refusal(folder / "one", lambda: {"model": placed(0)})


# --- asynchronous saving, and old checkpoints ---


def training_goes_on_while_a_checkpoint_is_written(folder: Path) -> None:
    def run() -> Any:
        ps = placed()
        pending = checkpoint.save_async(folder / "one", {"model": ps})
        with torch.no_grad():
            for x in optree.tree_leaves(ps):  # a flat shard is a node, and its values a leaf
                x.zero_()
        pending.wait()
        return torch.zeros(1)

    everywhere(2, run)
    assert distance(read(folder / "one"), params()) == 0


def an_existing_checkpoint_is_replaced_only_if_asked_for(folder: Path) -> None:
    saved(folder / "one")
    errors = world(2).errors(lambda: checkpoint.save(folder / "one", {"model": placed(2)}))
    assert all(error is not None for error in errors)
    assert distance(read(folder / "one"), params()) == 0
    everywhere(2, lambda: checkpoint.save(folder / "one", {"model": placed(2)}, overwrite=True) or torch.zeros(1))
    assert distance(read(folder / "one"), params(2)) == 0


def the_newest_are_kept(folder: Path) -> None:
    for step in range(4):
        everywhere(2, lambda step=step: checkpoint.save(folder / f"{step}", {"s": step}, keep=2) or torch.zeros(1))
    assert sorted(path.name for path in folder.iterdir() if path.name[0] != ".") == ["2", "3"]
    assert checkpoint.latest(folder) == folder / "3"


# --- torch's own loader and saver ---


def torch_reads_shards_as_whole_tensors(folder: Path) -> None:
    saved(folder / "one", 4, "hybrid_shard", step=3)
    like = {"model": optree.tree_map(torch.zeros_like, params()), "step": 0}
    state_dict_loader.load(like, checkpoint_id=folder / "one", no_dist=True)
    assert like["step"] == 3
    assert distance(like["model"], params()) == 0


def torch_writes_what_is_read_as_shards(folder: Path) -> None:
    state_dict_saver.save({"model": params()}, checkpoint_id=folder / "one", no_dist=True)
    assert distance(read(folder / "one", 4, "hfsdp"), params()) == 0


def torch_lists_the_same_names_and_shapes(folder: Path) -> None:
    saved(folder / "ours", 2)
    state_dict_saver.save({"model": params()}, checkpoint_id=folder / "theirs", no_dist=True)
    listed: list[Any] = [FileSystemReader(folder / name).read_metadata() for name in ("ours", "theirs")]
    ours, theirs = (
        {name: (x.size, x.properties.dtype) for name, x in one.state_dict_metadata.items()} for one in listed
    )
    assert ours == theirs


def torch_reads_a_part(folder: Path) -> None:
    saved(folder / "one", step=3)
    like = {"model": {"head": {"scale": torch.zeros(1).double()}, "none": torch.ones(1)}}
    state_dict_loader.load(like, checkpoint_id=folder / "one", planner=DefaultLoadPlanner(allow_partial_load=True),
                           no_dist=True)  # fmt: skip
    assert distance(like["model"]["head"], params()["head"]) == 0


def torch_makes_one_file_which_is_read_back(folder: Path) -> None:
    saved(folder / "one")
    dcp_to_torch_save(folder / "one", folder / "one.pt")
    shutil.rmtree(folder / "one")
    assert distance(read(folder / "one.pt"), params()) == 0


BEHAVIORS = [
    torch_reads_shards_as_whole_tensors, torch_writes_what_is_read_as_shards, missing_and_extra_entries_are_all_named,
    dtypes_and_bits_are_preserved, training_goes_on_while_a_checkpoint_is_written, reshards_on_load,
    a_tensor_that_is_cut_by_a_spec_is_loaded_by_another, optimizer_state_reshards,
    nested_containers_and_values_that_are_no_tensors, strided_and_expanded_tensors,
    loading_is_into_the_tensors_that_are_there, missing_entries_are_kept_if_asked_for, entries_can_be_ignored,
    another_shape_or_dtype_is_refused, another_shape_is_refused_even_if_not_strict, a_part_of_a_checkpoint,
    a_damaged_file_is_refused, a_folder_without_metadata_is_no_checkpoint,
    an_existing_checkpoint_is_replaced_only_if_asked_for, the_newest_are_kept, torch_lists_the_same_names_and_shapes,
    torch_reads_a_part, torch_makes_one_file_which_is_read_back,
]  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("behavior", BEHAVIORS, ids=lambda f: f.__name__)
def test_behavior_of_torch_distributed_checkpoint(behavior: Callable[[Path], None], tmp_path: Path) -> None:
    behavior(tmp_path)
