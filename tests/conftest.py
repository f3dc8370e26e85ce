import importlib
import os

import pytest

# Lent memory is full of nan when nobody should read it, in every test and in every process that one starts.
os.environ.setdefault("SHARDFN_DEBUG", "memory")

pytest_plugins = ["shardfn.testing.plugin"]


def pytest_sessionstart(session: pytest.Session) -> None:
    # torch loads it at the first torch.func transform: worlds get from here what each of their ranks would load.
    importlib.import_module("torch._dynamo")
