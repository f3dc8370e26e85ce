"""What the page on few bits says of the formats is what the benchmark finds, and a QLoRA step gathers what is said."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf
from benchmarks import bits
from benchmarks.few_bits_training import FORMATS, RECIPES
from shardfn.testing import World

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "few-bits.md"


def table(title: str) -> dict[str, list[str]]:
    """The rows of the first table below a title, by their first cell."""
    lines = PAGE.read_text().split(title)[1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    return {first: rest for first, *rest in rows[2:]}


def test_the_page_says_what_each_format_takes_and_loses() -> None:
    x = torch.randn(2**18, generator=torch.Generator().manual_seed(0))
    said = table("## Formats")
    for format in FORMATS:
        rate, error, more, _ = said[f"`quant.{format}`"]
        assert float(rate) == pytest.approx(format.rate, rel=1e-3)
        lost = format.decode(format.encode(x), len(x), x.dtype) - x
        assert float(error) == pytest.approx(lost.square().mean().sqrt().item(), rel=0.02)
        assert re.fullmatch(r"[+-]\d+\.\d+ %", more), "of a trained model's bits per byte"


def test_recipes_are_beside_one_in_float32() -> None:
    for recipe in RECIPES.values():
        other = RECIPES[recipe.beside]
        assert other.dtype == torch.float32
        assert other.strategy.gather_format is None is other.strategy.reduce_format


def test_what_the_peer_needs_is_asked_for_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else there(name))
    monkeypatch.setattr(sys, "argv", ["bits", "--tiny"])
    with pytest.raises(SystemExit, match=r"peft cannot be found: pip install 'shardfn\[dev\]'.*--only formats"):
        bits.main()


def gathers(cut: bool) -> Any:
    from benchmarks.qlora import TINY, by_shardfn

    told = by_shardfn(TINY, sf.full_shard if cut else sf.ddp)
    first = told["step"]()
    measured, formula = told["gathered"]()
    return measured, formula, (first - told["step"]()).item()


@pytest.mark.world(2, "processes")
@pytest.mark.parametrize("cut", [True, False])
def test_a_qlora_step_gathers_what_the_formats_say(world: World, cut: bool) -> None:
    pytest.importorskip("transformers")
    for measured, formula, gained in world.with_deadline(120).run(gathers, cut):
        assert measured == formula
        assert gained > 0
