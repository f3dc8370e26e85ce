"""What docstrings show is so."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module", ["mesh.spec", "mesh.selectors", "shards.init", "shards.partition", "shards.placement"]
)
def test_examples_in_docstrings_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"shardfn.{module}"))
    assert (found.failed, found.attempted > 0) == (0, True)
