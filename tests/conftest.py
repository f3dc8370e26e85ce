import gc
import importlib
import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from shardfn.testing.forkserver import preload
from shardfn.testing.world import close_worlds

# Lent memory is full of nan when nobody should read it, in every test and in every process that one starts.
os.environ.setdefault("SHARDFN_DEBUG", "memory")

pytest_plugins = ["shardfn.testing.plugin", "tests.durations"]

# What the ranks of some tests would load anew in every world, for seconds.
COMPILER = ("torch._inductor.compile_fx",)
MODELS = ("transformers.models.llama.modeling_llama", *COMPILER)
LOADED = {
    "interop": MODELS, "examples": MODELS, "test_documents.py": MODELS,
    "test_compiled_step.py": COMPILER, "test_transforms.py": COMPILER,
}  # fmt: skip


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


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # what lives as long as the session need not be searched for garbage
    for part in {part for item in session.items for part in item.path.parts}:
        preload(*LOADED.get(part, ()))
