"""Every optimizer of the comparison learns, alike on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardfn as sf
from examples import optimizers, train_lm
from shardfn.testing import world

TINY = train_lm.Config(width=16, heads=2, layers=1, hidden=24, context=16, batch=8, warmup=3, dtype=torch.float64)


def compared(shard: int) -> optimizers.Curves:
    text = torch.frombuffer(bytearray(b"def f(x):\n    return x + 1\n" * 40), dtype=torch.uint8)
    mesh = sf.make_mesh(device="cpu", replica=1, shard=shard)
    return optimizers.compare(TINY, mesh, text, 12, sf.full_shard("shard"))


def test_optimizers_learn_alike_on_any_mesh(tmp_path: Path) -> None:
    wanted = world(1).with_deadline(150).run(compared, 1)[0]
    assert set(wanted) == set(optimizers.optimizers(TINY, 12))
    for name, curve in wanted.items():
        assert curve[-1][1] < curve[0][1] - 0.05, name
    for found in world(2).with_deadline(150).run(compared, 2):
        for name, curve in wanted.items():  # Muon orthogonalises in bfloat16; Shampoo's roots amplify rounding
            losses, others = ([loss for _, loss in each] for each in (curve, found[name]))
            assert others == pytest.approx(losses, rel=1e-2 if name == "muon" else 1e-6), name
    optimizers.draw(wanted, tmp_path / "optimizers.png")
    assert (tmp_path / "optimizers.png").stat().st_size > 1000
