"""Which functions travel by name, and which by value."""

import importlib.util
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf
import shardfn.optim as so
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
    assert len(serialization.pack(serialization.encode_outcome, (), {})) < 200


MADE = {
    "stage": lambda: sf.stage(torch.dot),
    "remat": lambda: sf.stage(torch.dot, remat=True),
    "grad": lambda: sf.grad(sf.stage(torch.dot)),
    "value_and_grad": lambda: sf.value_and_grad(sf.stage(torch.dot)),
    "hessian": lambda: sf.hessian(torch.dot),
    "jacrev": lambda: sf.jacrev(torch.dot),
    "accumulate": lambda: sf.accumulate(torch.dot, [torch.ones(2)]),
    "compile": lambda: sf.compile(torch.dot),
    "shard_map": lambda: sf.shard_map(sf.stage(torch.dot), in_specs=..., out_specs=...),
    "optimizer": lambda: so.chain(so.clip_by_global_norm(1.0), so.adamw(1e-3)),
}


@pytest.mark.parametrize("name", MADE)
def test_what_the_package_makes_of_a_function_travels_to_ranks(name):
    made: Any = MADE[name]()
    function, _, _ = pickle.loads(serialization.pack(made, (), {}))
    assert type(function) is type(made)


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
    outcome = serialization.decode_outcome(serialization.encode_outcome(Returned({"x": x, "none": None})))
    assert isinstance(outcome, Returned)
    assert torch.equal(outcome.value["x"], x)
    assert outcome.value["none"] is None


def test_filters_survive_the_journey():
    with state.filtering([("error", "bad.*", "builtins:UserWarning", "", 0), ("ignore", "", "gone:Gone", "", 0)]):
        assert state.filters() == [("error", "bad.*", "builtins:UserWarning", "", 0)]
