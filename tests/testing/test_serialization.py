"""Which functions travel by name, and which by value."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from shardfn.testing import serialization, state
from shardfn.testing.errors import Returned

SOURCE = "LIMIT = 3\n\ndef within(x):\n    return x < LIMIT\n"


def load(name: str, file: Path):
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_function_of_an_importable_module_travels_by_name():
    assert len(serialization.pack(serialization.encode, (), {})) < 200


@pytest.mark.parametrize("shadowed", [False, True], ids=["nowhere to be found", "another file by that name"])
def test_a_function_that_ranks_cannot_import_travels_by_value(tmp_path, monkeypatch, shadowed):
    file = tmp_path / "hidden" / "odd_name.py"
    file.parent.mkdir()
    file.write_text(SOURCE)
    if shadowed:
        (tmp_path / "odd_name.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
    module = load("odd_name", file)
    monkeypatch.setitem(sys.modules, "odd_name", module)
    call = serialization.pack(module.within, (2,), {})
    monkeypatch.delitem(sys.modules, "odd_name")
    assert serialization.perform(call) == Returned(True)


def test_an_outcome_survives_the_journey():
    x = torch.arange(6.0).view(2, 3).t()
    outcome = serialization.decode(serialization.encode(Returned({"x": x, "none": None})))
    assert isinstance(outcome, Returned)
    assert torch.equal(outcome.value["x"], x)
    assert outcome.value["none"] is None


def test_filters_survive_the_journey():
    with state.filtering([("error", "bad.*", "builtins:UserWarning", "", 0), ("ignore", "", "gone:Gone", "", 0)]):
        assert state.filters() == [("error", "bad.*", "builtins:UserWarning", "", 0)]
