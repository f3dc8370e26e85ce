import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from shardfn.testing.forkserver import preload
from shardfn.testing.world import close_worlds

# Lent memory is full of nan when nobody should read it, in every test and in every process that one starts.
os.environ.setdefault("SHARDFN_DEBUG", "memory")

pytest_plugins = ["shardfn.testing.plugin"]

# What the ranks of some tests would load anew in every world, for seconds.
COMPILER = ("torch._inductor.compile_fx",)
MODELS = ("transformers.models.llama.modeling_llama", *COMPILER)
LOADED = {
    "interop": MODELS, "examples": MODELS, "test_documents.py": MODELS,
    "test_compiled_step.py": COMPILER, "test_transforms.py": COMPILER,
}  # fmt: skip

# The files that take longest: several workers begin with them, so that in the end none waits long for another.
LONG = (
    "examples/test_launch", "mesh/test_launchers", "collectives/test_hangs", "check/test_right",
    "optim/test_optim", "stages/test_compiled_step", "test_random_programs", "collectives/test_transforms",
    "interop/test_loading", "test_documents", "stages/test_stage", "interop/test_functional",
    "stages/test_stage_hidden", "parallel/test_meshes", "mesh/test_mesh", "stages/test_stage_transforms",
    "examples/test_train_lm", "stages/test_chaos", "checkpoint/test_checkpoint", "collectives/test_collectives",
    "shards/test_strategies", "interop/test_tensor", "checkpoint/test_crash", "mesh/test_waiting",
    "transforms/test_fitting", "translate/test_translate", "run/test_elastic",
    "testing/test_processes", "stages/test_residency", "examples/test_finetune_hf", "stages/test_skip",
    "test_mutants", "parallel/test_pipeline", "stages/test_stage_dtypes", "stages/test_stage_ranks",
    "checkpoint/test_huggingface", "interop/test_behaviour", "examples/test_image_classifier",
    "examples/test_sentence_embeddings", "stages/test_stage_properties", "testing/test_failures",
)  # fmt: skip


def pytest_sessionstart(session: pytest.Session) -> None:
    # torch loads it at the first torch.func transform: worlds get from here what each of their ranks would load.
    importlib.import_module("torch._dynamo")


@pytest.fixture(autouse=True)
def no_world_is_left() -> Iterator[None]:
    """A run of one rank may start in pytest's own process; the tests after it find no process group there."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def no_world_waits() -> Iterator[None]:
    """A world costs processor time while nobody uses it, and a new one is there at once."""
    yield
    close_worlds()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several workers, which take file after file
        items.sort(key=lambda item: place(item.path))


def place(path: Path) -> int:
    name = path.relative_to(Path(__file__).parent).with_suffix("").as_posix()
    return LONG.index(name) if name in LONG else len(LONG)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # what lives as long as the session need not be searched for garbage
    for part in {part for item in session.items for part in item.path.parts}:
        preload(*LOADED.get(part, ()))
