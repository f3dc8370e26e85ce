"""Optimizers, norms and masks know leaves that other axes cut."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import shardfn as sf
import shardfn.optim as so
from shardfn import P
from shardfn.testing import World
from tests.models import distance, drawn
from tests.optimizers import optimizers_named

SPECS = sf.by_path([(r".*\.up", P(None, "tensor")), (r".*\.down", P("tensor")), (r".*\.norm", P())])
MESHES = [
    {"replica": 1, "shard": 2, "tensor": 2, "pipe": 1},
    {"replica": 1, "shard": 1, "tensor": 4, "pipe": 1},
    {"replica": 2, "shard": 1, "tensor": 2, "pipe": 1},
    {"replica": 1, "shard": 1, "tensor": 2, "pipe": 2},
]
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: so.adamw(1e-2, weight_decay=lambda path, shape: 0.1 if len(shape) > 1 else 0.0),
    **optimizers_named("adafactor, lamb, shampoo, soap"),
    "muon": lambda: so.masked(so.muon(1e-2, dtype=None), lambda path, shape: len(shape) == 2, so.adamw(1e-3)),
    "lion, clipped": lambda: so.chain(so.clip_by_global_norm(0.1), so.lion(1e-2)),
    "averaged": lambda: so.ema(so.sgd(0.1, momentum=0.9), 0.9),
}


def whole() -> Any:
    normal = drawn(0)
    return [{"up": normal(6, 8), "down": normal(8, 6), "norm": normal(6)} for _ in range(2)]


def trained(sizes: dict[str, int]) -> dict[str, float]:
    mesh, found = sf.make_mesh(device="cpu", **sizes), {}

    def placed(path: str, shape: tuple[int, ...]) -> sf.Placement:
        return sf.hybrid_shard(shard="shard", replica="replica").only_on(pipe=int(path[0]) % sizes["pipe"])

    for name, make in OPTIMIZERS.items():
        opt, plain, params = make(), whole(), sf.shard(whole(), mesh, placed, specs=SPECS)
        state, wanted = opt.init(params), opt.init(plain)
        for _ in range(3):
            params, state = opt.step(params, optree.tree_map(torch.sin, params), state)
            plain, wanted = opt.step(plain, optree.tree_map(torch.sin, plain), wanted)
        found[name] = distance(sf.unshard(params), plain)
        norms, those = so.norms(params), so.norms(plain)
        found[f"{name}: norms"] = max(abs(norms.parameters[key] - those.parameters[key]) for key in those.parameters)
    return found


@pytest.mark.world(4)
def test_steps_are_those_of_whole_parameters(world: World) -> None:
    for sizes in MESHES:
        for found in world.run(trained, sizes):
            assert len(found) == 2 * len(OPTIMIZERS)
            # SOAP's eigenvectors amplify rounding, which is another one on each kind of processor.
            limits = {name: 1e-8 if name.startswith("soap") else 1e-12 for name in found}
            assert not {name: x for name, x in found.items() if not x < limits[name]}, sizes
