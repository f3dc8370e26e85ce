"""Parameters go to Hugging Face's files and come from them, from any mesh to any other."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.checkpoint import huggingface, safetensors
from shardfn.checkpoint.files import FileReader
from shardfn.checkpoint.huggingface import export_hf, import_hf
from shardfn.checkpoint.team import CheckpointError
from shardfn.testing import World
from tests.models import mesh_of, same
from tests.refusals import refused
from tests.resident import grown

library = pytest.importorskip("safetensors.torch")

RULES: list[Any] = [
    (r"blocks\.(\d+)\.(q|o)", r"model.layers.\1.\2_proj.weight", "T"),
    (r"blocks\.(\d+)\.norm", r"model.layers.\1.norm.weight"),
]
MESHES: dict[str, tuple[dict[str, int], Callable[[], Any]]] = {
    "alone": ({"shard": 1}, lambda: sf.full_shard("shard")),
    "sharded": ({"shard": 4}, lambda: sf.full_shard("shard")),
    "the same everywhere": ({"shard": 4}, lambda: sf.ddp("shard")),
    "hybrid": ({"replica": 2, "shard": 2}, lambda: sf.hybrid_shard(shard="shard", replica="replica")),
    "tensor parallel": ({"shard": 2, "tensor": 2}, lambda: sf.full_shard("shard")),
    "pipelined": ({"shard": 2, "pipe": 2}, lambda: at_places),
}


def at_places(path: str, shape: tuple[int, ...]) -> sf.Placement:
    name, number, *_ = path.split(".")
    return sf.full_shard("shard").only_on(pipe=int(number) % 2) if name == "blocks" else sf.full_shard("shard")


def whole(seed: int = 0) -> Any:
    """Some of everything: of no dimension and of no element, of odd sizes, of several dtypes in a stage, frozen."""
    g = torch.Generator().manual_seed(seed)

    def block() -> Any:
        return {
            "q": torch.randn(6, 8, generator=g),
            "o": torch.randn(8, 6, generator=g).bfloat16(),
            "experts": torch.randn(2, 3, 4, generator=g),
            "norm": torch.randn(7, generator=g),
            "scale": torch.randn((), generator=g).double(),
            "none": torch.empty(0, 4),
            "ids": torch.randint(9, (5,), generator=g),
            "mask": torch.rand(3, generator=g) > 0.5,
        }

    return {"embed": {"w": torch.randn(9, 6, generator=g)}, "blocks": [block() for _ in range(3)]}


def placed(name: str, tree: Any) -> Any:
    sizes, strategy = MESHES[name]
    specs = sf.by_path([(r".*\.q", P(None, "tensor")), (r".*\.o", P("tensor"))], strict=False)
    mesh = mesh_of(**sizes)
    shards = sf.shard(tree, mesh, strategy(), specs=specs if "tensor" in sizes else P(), frozen=[r".*\.norm"])
    return {**shards, "plain": tree["embed"]["w"].clone().mT}  # whole, and not contiguous


def expected(tree: Any) -> dict[str, Tensor]:
    found = {"embed.w": tree["embed"]["w"], "plain": tree["embed"]["w"].mT}
    for i, block in enumerate(tree["blocks"]):
        for name, x in block.items():
            found[f"blocks.{i}.{name}"] = x
        for name in "qo":
            found[f"model.layers.{i}.{name}_proj.weight"] = found.pop(f"blocks.{i}.{name}").mT
        found[f"model.layers.{i}.norm.weight"] = found.pop(f"blocks.{i}.norm")
    return found


def files_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= library.load_file(file)
    return found


def there_and_back(name: str, other: str, folder: Path, **more: Any) -> bool:
    params = placed(name, whole())
    export_hf(folder, params, names=RULES, **more)
    like = placed(other, whole(seed=1))
    index = folder / safetensors.INDEX
    found = import_hf(index if index.exists() else folder, like, names=RULES)
    assert found is like
    return all(map(torch.equal, optree.tree_leaves(sf.unshard(found)), optree.tree_leaves(sf.unshard(params))))


@pytest.mark.world(4)
@pytest.mark.parametrize("largest", [5 * 2**30, 300])
@pytest.mark.parametrize("name", [name for name in MESHES if name != "alone"])
def test_parameters_come_back_on_another_mesh(world: World, tmp_path: Path, name: str, largest: int) -> None:
    names = [one for one in MESHES if one != "alone"]
    other = names[(names.index(name) + 1) % len(names)]
    assert all(world.run(there_and_back, name, other, tmp_path, largest=largest))
    assert same(files_of(tmp_path), expected(whole()))
    index = tmp_path / safetensors.INDEX
    if largest > 2**30:
        assert os.listdir(tmp_path) == [safetensors.MODEL]
        return
    told = json.loads(index.read_bytes())
    assert len(set(told["weight_map"].values())) > 3
    assert {*told["weight_map"].values(), index.name} == set(os.listdir(tmp_path))
    assert told["metadata"]["total_size"] == sum(x.nbytes for x in expected(whole()).values())
    for tensor, file in told["weight_map"].items():
        assert tensor in library.load_file(tmp_path / file)


@pytest.mark.world(1)
def test_one_process_is_enough(world: World, tmp_path: Path) -> None:
    assert world.run(there_and_back, "alone", "alone", tmp_path) == [True]
    assert same(files_of(tmp_path), expected(whole()))


def converted(folder: Path) -> Any:
    tree = {"a": {"w": torch.randn(40, 5), "n": torch.arange(4)}, "b": {"w": torch.randn(33).bfloat16()}}
    mesh = mesh_of(shard=2)
    params = sf.shard(tree, mesh, sf.full_shard("shard"))
    export_hf(folder, params, dtype=torch.bfloat16, metadata={"by": "me"})
    like = sf.shard(optree.tree_map(lambda x: torch.zeros_like(x, dtype=torch.float64), tree), mesh, sf.ddp("shard"))
    return tree, sf.unshard(import_hf(folder / safetensors.MODEL, like))


def test_dtypes_are_converted(world: World, tmp_path: Path) -> None:
    for tree, found in world.run(converted, tmp_path):
        assert torch.equal(found["a"]["w"], tree["a"]["w"].bfloat16().double())
        assert torch.equal(found["a"]["n"], tree["a"]["n"].double())
        assert torch.equal(found["b"]["w"], tree["b"]["w"].double())
    there = files_of(tmp_path)
    assert {name: x.dtype for name, x in there.items()} == {
        "a.w": torch.bfloat16, "a.n": torch.int64, "b.w": torch.bfloat16,
    }  # fmt: skip
    with sys.modules["safetensors"].safe_open(tmp_path / safetensors.MODEL, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "by": "me"}


def small(value: float = 1.0, n: int = 6) -> Any:
    mesh = mesh_of(shard=-1)
    tree = {"a": torch.full((n, 4), value), "b": {"w": torch.full((n,), value)}}
    return sf.shard(tree, mesh, sf.full_shard("shard"))


def test_an_earlier_model_is_replaced(world: World, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model_card.safetensors").write_text("of somebody else")
    (tmp_path / ".model.safetensors.writing").write_text("of a process that died")
    for value, largest in enumerate([10, 100, 10, 2**20, 10, 2**20]):
        world.run(lambda value=value, largest=largest: export_hf(tmp_path, small(value), largest=largest))
        found = {file for file in os.listdir(tmp_path) if file not in ("config.json", "model_card.safetensors")}
        numbered = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", safetensors.INDEX}
        assert found == (numbered if largest < 120 else {safetensors.MODEL})
        source = FileReader(tmp_path / (safetensors.INDEX if safetensors.INDEX in found else safetensors.MODEL)).source
        assert source.places.keys() == {"a", "b.w"}
        assert all(library.load_file(file)[name].eq(value).all() for name, file in source.places.items())
    assert (tmp_path / "config.json").read_text() == "{}"


def interrupted(folder: Path, what: str, failing: int) -> str:
    """The error of an export whose write fails on one rank, or whose end fails."""
    params, before = small(2.0), getattr(huggingface, what)

    def fails(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    if torch.distributed.get_rank() == failing:
        setattr(huggingface, what, fails)
    try:
        with pytest.raises(CheckpointError) as caught:
            export_hf(folder, params, largest=10)
    finally:
        setattr(huggingface, what, before)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "failing"), [("_file_portions", 1), ("_file_portions", 0), ("begin", 0), ("publish", 0)]
)
def test_what_fails_leaves_the_earlier_model(world: World, tmp_path: Path, what: str, failing: int) -> None:
    world.run(lambda: export_hf(tmp_path, small(1.0), largest=10))
    for told in world.run(interrupted, tmp_path, what, failing):
        assert f"rank {failing}: OSError: [Errno 28] No space left" in told
    assert len(os.listdir(tmp_path)) == 3
    assert all(x.eq(1).all() for x in files_of(tmp_path).values())


def wrong_exports(folder: Path) -> dict[str, str]:
    params, rank = small(), torch.distributed.get_rank()
    return {
        "twice": refused(lambda: export_hf(folder, params, names=[("a|b.w", "x")])),
        "idle": refused(lambda: export_hf(folder, params, names=[("a", "x"), (r"c\..*", "y")])),
        "vector": refused(lambda: export_hf(folder, params, names=[("b.w", "y", "T")])),
        "rule": refused(lambda: export_hf(folder, params, names=[("b.w", "y", "t")])),
        "template": refused(lambda: export_hf(folder, params, names=[("b.w", r"\3")])),
        "paths": refused(lambda: export_hf(folder / str(rank), params)),
        "trees": refused(lambda: export_hf(folder, {**params, f"more{rank}": torch.ones(2)})),
        "dtype": refused(lambda: export_hf(folder, {"x": torch.ones(2, dtype=torch.complex128)})),
        "metadata": refused(lambda: export_hf(folder, params, metadata={"step": 3})),  # type: ignore[dict-item]
        "number": refused(lambda: export_hf(folder, {**params, "step": 3})),
        "one rank": refused(lambda: export_hf(folder, params, names=[("c", "y")] if rank else [])),
    }


def test_what_cannot_be_exported_is_an_error_on_every_rank(world: World, tmp_path: Path) -> None:
    for told in world.run(wrong_exports, tmp_path):
        assert "a and b.w are both 'x' there" in told["twice"]
        assert r"no parameter matches 'c\\..*'; the first of them are a, b.w" in told["idle"]
        assert 'a rule with "T" matches b.w, but of float32 [6]' in told["vector"]
        assert "got ('b.w', 'y', 't')" in told["rule"]
        assert "invalid group reference" in told["template"]
        assert "ranks were given different" in told["paths"]
        assert "ranks were given different" in told["trees"]
        assert "x is complex128 [2], which safetensors does not know" in told["dtype"]
        assert "metadata must map strings" in told["metadata"]
        assert "got ['step']" in told["number"]
        assert "rank 1: no parameter matches 'c'" in told["one rank"]
    assert os.listdir(tmp_path) == []


def wrong_imports(folder: Path) -> dict[str, str]:
    import_hf(folder / "good", small())
    values = small(5.0)
    like = {"a": values["a"], "c": torch.ones(2), "b": values["b"]}
    found = {
        "all": refused(lambda: import_hf(folder / "good", {**like, "a": small(n=8)["a"]}, ignore=["nothing"])),
        "loose": refused(lambda: import_hf(folder / "good", {**like, "a": small(n=8)["a"]}, strict=False)),
        "turned": refused(lambda: import_hf(folder / "good", values, names=[("a", "a", "T")])),
        "extra": refused(lambda: import_hf(folder / "good", {"a": values["a"]})),
        "unmatched": refused(lambda: import_hf(folder / "good", values, names=[("x", "y")])),
        "number": refused(lambda: import_hf(folder / "good", {**values, "step": 3})),
        **{name: refused(lambda: import_hf(folder / name, values)) for name in DAMAGED},  # noqa: B023
    }
    import_hf(folder / "good", {"a": values["a"]}, ignore=[r"b\..*"])
    import_hf(folder / "good", like, strict=False)
    assert all(x.eq(1).all() for x in optree.tree_leaves(sf.unshard(like)))
    return found


def gone(folder: Path) -> None:
    shutil.rmtree(folder)


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def cut(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def no_index(folder: Path) -> None:
    (folder / safetensors.INDEX).write_text("{")


def other_index(folder: Path) -> None:
    (folder / safetensors.INDEX).write_text('{"weight_map": ["a"]}')


def swapped(folder: Path) -> None:
    text = (folder / safetensors.INDEX).read_text()
    (folder / safetensors.INDEX).write_text(text.replace("00001-of", "00003-of").replace("00002-of", "00001-of"))
    (folder / "model-00002-of-00002.safetensors").rename(folder / "model-00003-of-00002.safetensors")


def elsewhere(folder: Path, where: str) -> None:
    index = folder / safetensors.INDEX
    index.write_text(index.read_text().replace('"model-00002', f'"{where}/model-00002'))


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (cut, "model-00002-of-00002.safetensors cannot be read: .*not fully covered"),
    "lost": (lambda folder: (folder / "model-00001-of-00002.safetensors").unlink(), "model-00001.*cannot be read: No"),
    "no index": (no_index, "index.json cannot be read: JSONDecodeError"),
    "other index": (other_index, "index.json cannot be read: AttributeError"),
    "swapped": (swapped, "model-00001-of-00002.safetensors has no b.w, though model.safetensors.index.json says so"),
    "up": (lambda folder: elsewhere(folder, "../good"), "index.json cannot be read: it names ../good/model-00002"),
    "anywhere": (lambda folder: elsewhere(folder, str(folder.parent / "good")), "it names /.*, outside of its folder"),
    "empty": (empty, "neither manifest.json nor .metadata nor model.safetensors nor model.safetensors.index.json"),
    "gone": (gone, "there is no folder .*gone"),
}


def through_links(folder: Path) -> bool:
    export_hf(folder / "blobs", small(), largest=10)
    (folder / "snapshot").mkdir(exist_ok=True)
    for file in (folder / "blobs").iterdir():
        with contextlib.suppress(FileExistsError):
            (folder / "snapshot" / file.name).symlink_to(f"../blobs/{file.name}")
    like = import_hf(folder / "snapshot", small(0.0))
    return all(x.eq(1).all() for x in optree.tree_leaves(sf.unshard(like)))


def test_links_in_the_folder_of_an_index_are_followed_as_in_a_cache(world: World, tmp_path: Path) -> None:
    assert all(world.run(through_links, tmp_path))


def test_what_cannot_be_imported_is_an_error_on_every_rank(world: World, tmp_path: Path) -> None:
    for name in ("good", *DAMAGED):
        world.run(lambda name=name: export_hf(tmp_path / name, small(), largest=10))
        if name in DAMAGED:
            DAMAGED[name][0](tmp_path / name)
    for told in world.run(wrong_imports, tmp_path):
        assert "missing in the checkpoint: c; of another shape: a is float32 [6, 4] there, float32 [8," in told["all"]
        assert "of another shape: a is" in told["loose"]
        assert "float32 [4, 6] when its last two dimensions are swapped in the tree" in told["turned"]
        assert "in the checkpoint, but not in the tree: b.w" in told["extra"]
        assert "no parameter matches 'x'" in told["unmatched"]
        assert "got ['step']" in told["number"]
        for name, (_, words) in DAMAGED.items():
            assert re.search(words, told[name]), told[name]


def without_library(folder: Path) -> str:
    sys.modules["safetensors"] = None  # type: ignore[assignment]
    try:
        export_hf(folder, small())
        return refused(lambda: import_hf(folder, small()))
    finally:
        del sys.modules["safetensors"]


def test_export_needs_no_library_and_import_says_which(world: World, tmp_path: Path) -> None:
    for told in world.run(without_library, tmp_path):
        assert "ImportError: " in told
        assert "pip install '.[huggingface]'" in told


# --- memory ---

STAGES, WIDE = 2, 2**11  # 32 MB a stage, in two parameters


def wide(n: int, mesh: Any, specs: Any) -> Any:
    def maker(g: torch.Generator) -> Any:
        return {"w": torch.randn(n, n, generator=g), "v": torch.ones(n // 2, 2 * n)}

    return sf.init_sharded({"blocks": [maker] * STAGES}, 0, mesh, sf.full_shard("shard"), specs=specs)


def peaks(folder: Path, sizes: dict[str, int], specs: P, dtype: torch.dtype) -> tuple[float, float]:
    mesh, names, step = mesh_of(**sizes), [(r"(.*)\.w", r"\1.weight", "T")], huggingface.STEP
    huggingface.STEP = 2**20
    try:
        for n in (8, WIDE):  # the first makes what is made once
            params = wide(n, mesh, specs)
            exported = grown(lambda: export_hf(folder, params, names=names, dtype=dtype))[0]  # noqa: B023
            imported = grown(lambda: import_hf(folder, params, names=names))[0]  # noqa: B023
    finally:
        huggingface.STEP = step
    return exported, imported


@pytest.mark.parametrize(
    ("sizes", "specs", "dtype"),
    [({"shard": 2}, P(), torch.bfloat16), ({"shard": 2, "tensor": 2}, P(None, "tensor"), torch.float32)],
)
def test_no_rank_needs_more_than_a_stage_above_its_shards(
    tmp_path: Path, sizes: dict[str, int], specs: P, dtype: torch.dtype
) -> None:
    stage = 2 * 4 * WIDE**2 / 2**20
    with World(math.prod(sizes.values())) as world:  # whose processes keep their malloc for themselves
        found = world.run(peaks, tmp_path, sizes, specs, dtype)
    for exported, imported in found:
        assert stage / 4 < exported < 1.2 * stage
        assert imported < 0.05 * stage


# --- transformers ---

LLAMA: list[Any] = [
    (r"embed", "model.embed_tokens.weight"),
    (r"blocks\.(\d+)\.attn\.(\w)", r"model.layers.\1.self_attn.\2_proj.weight", "T"),
    (r"blocks\.(\d+)\.mlp\.(\w+)", r"model.layers.\1.mlp.\2_proj.weight", "T"),
    (r"blocks\.(\d+)\.norm1", r"model.layers.\1.input_layernorm.weight"),
    (r"blocks\.(\d+)\.norm2", r"model.layers.\1.post_attention_layernorm.weight"),
    (r"norm", "model.norm.weight"),
    (r"head", "lm_head.weight", "T"),
]


def llama(d: int = 16, wide: int = 40, words: int = 50) -> Any:
    """Our tree: matrices are `[in, out]`, and of the queries' heads two share one of the keys'."""

    def block() -> Any:
        shapes = {"q": (d, d), "k": (d, d // 2), "v": (d, d // 2), "o": (d, d)}
        mlp = {"gate": (d, wide), "up": (d, wide), "down": (wide, d)}
        return {
            "attn": {name: torch.zeros(shape) for name, shape in shapes.items()},
            "mlp": {name: torch.zeros(shape) for name, shape in mlp.items()},
            "norm1": torch.zeros(d),
            "norm2": torch.zeros(d),
        }

    tree = {"embed": torch.zeros(words, d), "blocks": [block() for _ in range(2)], "norm": torch.zeros(d)}
    return {**tree, "head": torch.zeros(d, words)}


def through(source: Path, folder: Path, largest: int) -> Tensor:
    mesh = mesh_of(shard=2)
    params = import_hf(source, sf.shard(llama(), mesh, sf.full_shard("shard")), names=LLAMA)
    export_hf(folder, params, names=LLAMA, largest=largest)
    return sf.unshard(params["blocks"][1])["mlp"]["down"]


@pytest.mark.filterwarnings("ignore")
def test_a_llama_of_transformers_is_the_same_afterwards(world: World, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    words = torch.randint(50, (2, 9))
    wanted = model(words).logits
    for number, (their, our) in enumerate([("5GB", 5 * 2**30), ("15KB", 15_000)]):
        source, folder = tmp_path / f"theirs{number}", tmp_path / f"ours{number}"
        model.save_pretrained(source, max_shard_size=their)
        config.save_pretrained(folder)
        for down in world.run(through, source, folder, our):
            assert torch.equal(down, model.model.layers[1].mlp.down_proj.weight.mT)
        for path in (source, folder):
            assert len([*path.glob("*.safetensors")]) == 1 + number
        back = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
        assert torch.equal(back(words).logits, wanted)
        assert all(map(torch.equal, back.state_dict().values(), model.state_dict().values()))
