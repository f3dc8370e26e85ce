"""The table of transforms on the page on derivatives is the one that the benchmark finds."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks.transforms import RANKS, SYSTEMS, TRANSFORMS, _verdict, outcome
from shardfn.testing import world

PAGE = Path(__file__).resolve().parents[2] / "docs/explanation/derivatives.md"


def quoted() -> dict[tuple[str, str], str]:
    """By transform and system; a row of the page may name several transforms."""
    section = PAGE.read_text().split("## Compared with other systems")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    (_, *systems), _, *rows = lines
    found = {}
    for first, *cells in rows:
        plain = re.sub(r"\(.*\)$", "", first.replace("()", "")).replace("`", "").strip()
        for name in plain.split(", "):
            for system, cell in zip(systems, cells, strict=True):
                found[name.replace("loss.backward", "loss.backward()"), system] = cell
    return found


def test_the_page_names_every_transform_and_system() -> None:
    assert set(quoted()) == {(transform, system) for transform in TRANSFORMS for system in SYSTEMS}


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_page_says_what_comes_back(system: str) -> None:
    # All of them for shardfn; two for the peers, which are torch's to change.
    chosen = TRANSFORMS if system == "shardfn" else ("loss.backward()", "grad")
    found = {name: outcome(world(RANKS), system, name).split(":")[0] for name in chosen}
    assert found == {name: quoted()[name, system] for name in chosen}


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([1.0, 2.0], "right"),
        ([1.0, 2.0 + 1e-10], "another value"),
        ([1.0], "another value"),
        ([float("nan"), 2.0], "another value"),
        ([0.0, 0.0], "all zeros"),
        ([3.0, 4.0], "this rank's rows only"),
        ([5.0, 5.0], "its own weights instead"),
    ],
)
def test_what_comes_back_is_told_apart(found: list[float], verdict: str) -> None:
    wanted, mine, unmoved = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor(5.0)
    given = torch.tensor(found, dtype=torch.float64)
    assert _verdict(given, wanted.double(), mine.double(), unmoved.double()) == verdict
