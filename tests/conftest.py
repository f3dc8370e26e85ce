import importlib
import os

import pytest

from shardfn.testing.forkserver import preload

# Lent memory is full of nan when nobody should read it, in every test and in every process that one starts.
os.environ.setdefault("SHARDFN_DEBUG", "memory")

pytest_plugins = ["shardfn.testing.plugin"]

# What the ranks of some tests would load anew in every world, for seconds.
COMPILER = ("torch._inductor.compile_fx",)
MODELS = ("transformers.models.llama.modeling_llama", *COMPILER)
LOADED = {"interop": MODELS, "examples": MODELS, "test_compiled_step.py": COMPILER, "test_transforms.py": COMPILER}


def pytest_sessionstart(session: pytest.Session) -> None:
    # torch loads it at the first torch.func transform: worlds get from here what each of their ranks would load.
    importlib.import_module("torch._dynamo")


def pytest_collection_finish(session: pytest.Session) -> None:
    for part in {part for item in session.items for part in item.path.parts}:
        preload(*LOADED.get(part, ()))
