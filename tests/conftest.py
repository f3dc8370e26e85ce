import gc
import importlib
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from shardfn.simulated.operations import NAME
from shardfn.testing.forkserver import preload
from shardfn.testing.world import close_worlds
from tests.interpreted import Call, process

# In every test, and in every process that a test starts, memory that nobody should read is filled with nan.
os.environ.setdefault("SHARDFN_DEBUG", "memory")

pytest_plugins = ["shardfn.testing.plugin", "tests.durations"]

# Modules that the ranks of some tests would otherwise import in every world, which takes seconds.
COMPILER = ("torch._inductor.compile_fx",)
MODELS = ("transformers.models.llama.modeling_llama", *COMPILER)
LOADED = {
    "interop": MODELS, "examples": MODELS, "test_documents.py": MODELS,
    "test_torch_compile.py": COMPILER, "test_transforms.py": COMPILER, "test_peft.py": ("peft",),
}  # fmt: skip


def pytest_sessionstart(session: pytest.Session) -> None:
    # torch imports it at the first torch.func transform. Imported here, the ranks of all worlds have it already.
    importlib.import_module("torch._dynamo")


@pytest.fixture(autouse=True)
def no_world_is_left() -> Iterator[None]:
    """A run of one rank may use pytest's own process; its process group is destroyed before the next test.

    A simulated device would stay registered, so a test that needs one has a process of its own.
    """
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    assert not hasattr(torch, NAME), "a test has simulated a device in pytest's own process"


@pytest.fixture(autouse=True, scope="module")
def no_world_waits() -> Iterator[None]:
    """Closes unused worlds, since they take processor time, and new ones start quickly."""
    yield
    close_worlds()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # objects that live as long as the session need not be searched for garbage
    for part in {part for item in session.items for part in item.path.parts}:
        preload(*LOADED.get(part, ()))


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """Calls functions in a process in which kernels in Triton run on the CPU."""
    with process(True, tmp_path_factory.mktemp("triton")) as call:
        yield call
