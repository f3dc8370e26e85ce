"""Adapters on a base in four bits learn alike on every mesh, cost less, and are in their files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardfn as sf
from shardfn import lora
from shardfn.testing import world

pytest.importorskip("transformers")
from examples import qlora as example
from examples.finetune_hf import DATA, IGNORED
from examples.run import bytes_tokenizer, joined
from tests.interop.zoo import losses_in_float64, norms_in_float64
from tests.reference import worst

pytestmark = pytest.mark.filterwarnings("ignore", "error::shardfn.check.VaryingWarning")

TINY = example.Config(
    batch=8, context=16, rate=5e-2, full_rate=1e-2, warmup=2, rank=2, alpha=4, looks=2, dtype=torch.float64
)
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
STEPS = 8
Rows = dict[str, example.Row]


def repeated(line: bytes) -> example.Data:
    return joined([line * 40]), joined([line * 20])


def chain(replica: int, shard: int, out: Path) -> tuple[Rows, float]:
    """What a whole run gives, and the bits per byte of the adapters that it leaves in files."""
    mesh, strategy = (
        sf.make_mesh(device="cpu", replica=replica, shard=shard),
        sf.hybrid_shard(shard="shard", replica="replica"),
    )
    python, cpp = repeated(b"def f(x):\n    return x + 1\n"), repeated(b"int f(int x) {\n  return x + 1;\n}\n")
    task = example.Task(TINY, mesh, strategy, bytes_tokenizer(), python, cpp, STEPS, seed=0)
    with losses_in_float64(), norms_in_float64():
        example.based(task, out / "base", 3 * STEPS, **SIZES)
        rows = example.in_four_bits(task, out / "base", out) + example.in_all_bits(task, out / "base")
        model, params = example.quantised(task, out / "base")
        adapters = lora.load(out / "adapter", model, mesh, sf.ddp(DATA))
        again = example.bits(task, lambda **batch: model(params, **batch, adapters=adapters), cpp[1])
    return {row.name: row for row in rows}, again


def test_adapters_on_four_bits_learn_alike_on_every_mesh_and_are_in_their_files(tmp_path: Path) -> None:
    ((alone, _),) = world(1).with_deadline(200).run(chain, 1, 1, tmp_path / "1")
    assert alone["base in 4 bits"].cpp != alone["base"].cpp
    assert alone["adapters on 4 bits"].cpp < alone["base in 4 bits"].cpp - 0.1
    assert alone["adapters on 4 bits"].sent == 0
    for rows, again in world(4).with_deadline(200).run(chain, 2, 2, tmp_path / "4"):
        off = {
            name: [abs(a / b - 1) for a, b in zip(row[1:3], alone[name][1:3], strict=True)]
            for name, row in rows.items()
        }
        assert worst(map(worst, off.values())) < 1e-12, off
        assert abs(rows["merged, by transformers"].cpp / rows["adapters on 4 bits"].cpp - 1) < 1e-12
        assert abs(again / rows["adapters on 4 bits"].cpp - 1) < 1e-12
        costs = [rows[name] for name in ("adapters on 4 bits", "adapters on all bits", "all parameters")]
        assert sorted(costs, key=lambda row: row.kept) == sorted(costs, key=lambda row: row.sent) == costs


def test_every_byte_of_a_text_is_predicted_and_counted() -> None:
    rows = torch.tensor([list("na\N{LATIN SMALL LETTER I WITH DIAERESIS}f".encode()), [0xFF, *b"a(b)"[:4]]])
    inputs, size = example.tokenized(bytes_tokenizer(), rows)
    predicted = torch.ne(inputs["labels"][:, 1:], IGNORED).sum(1)
    assert predicted.tolist() == [5, 4]
    assert size == 9


def test_the_texts_are_there_and_no_file_is_both_learnt_and_measured() -> None:
    learnt, held_out = (text.numpy().tobytes() for text in example.headers())
    assert len(learnt) > 5 * len(held_out) > 0
    assert b"#pragma once" in held_out
