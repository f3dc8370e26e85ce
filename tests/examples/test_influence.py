"""Scores of files are the same on any number of ranks, and a text comes from the file that it is like."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import shardfn as sf
from examples import influence, train_lm
from examples.run import stretches
from shardfn.testing import world

TINY = train_lm.Config(width=16, heads=2, layers=2, hidden=24, context=16, batch=8, warmup=3, dtype=torch.float64)


def scored(shard: int) -> dict[str, Tensor]:
    texts = [b"def f(x):\n    return x + 1\n" * 12, b"class A:\n    b = {}\n" * 15, b"<p>1, 2, 3</p>; " * 18]
    rows = [stretches(torch.frombuffer(bytearray(text), dtype=torch.uint8), 17).long() for text in texts]
    files, queries = ({str(i): x[part] for i, x in enumerate(rows)} for part in (slice(2, None), slice(2)))
    mesh = sf.make_mesh(device="cpu", replica=1, shard=shard)
    params, _ = influence.trained(TINY, mesh, files, 20, sf.full_shard("shard"))
    return influence.scores(TINY, mesh, params, files, queries)


def test_scores_of_files_do_not_depend_on_the_mesh(tmp_path: Path) -> None:
    wanted = world(1).with_deadline(100).run(scored, 1)[0]
    assert (wanted["EK-FAC"].argmax(1) == torch.arange(3)).all()
    for found in world(2).with_deadline(100).run(scored, 2):
        for way, values in wanted.items():
            assert (found[way] - values).abs().max() < 1e-6 * values.abs().max()
    influence.draw(wanted, ["f", "A", "p"], tmp_path / "scores.png")
    assert (tmp_path / "scores.png").stat().st_size > 1000


def test_every_file_has_stretches_of_both_kinds() -> None:
    files, held_out = influence.sources(influence.SMALL)
    assert list(files) == list(held_out) == list(influence.FILES)
    assert all(len(files[name]) >= 7 * (len(held_out[name]) - 1) > 0 for name in files)
