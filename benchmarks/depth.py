"""Peak memory against depth, with everything on disk: constant, except for the saved inputs of the layers.

    OMP_NUM_THREADS=1 python -m benchmarks.tiers --only growth

Two ranks train models of 8, 16 and 32 equal layers, each model in new processes. Layers are recomputed in backward, so
only their inputs are saved; the size of the inputs is computed and subtracted. The same training in memory is shown for
comparison.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.crew import Crew, Usage
from benchmarks.model import Config
from benchmarks.on_disk import ENVIRONMENT, MB, RANKS, Training, nbytes
from benchmarks.report import Goal

LAYER = Config(vocabulary=4096, width=768, heads=12, hidden=2048, context=64, batch=1)
TINY = replace(LAYER, vocabulary=64, width=64, heads=2, hidden=128, context=16)


def built(usage: Usage, config: Config, folder: str | None) -> dict[str, Any]:
    usage.again()
    training = Training(config, folder)
    inputs = config.layers * config.batch * config.context * config.width * 4

    def peaks() -> dict[str, float]:
        for _ in range(3):
            training.step(config.context)
        return {
            "peak": (usage.peak() + usage.base) / MB,
            "inputs": inputs / MB,
            "state": 4 * nbytes(training.params) / MB,
        }

    return {"peaks": peaks}


def measured(config: Config, folder: str | None) -> dict[str, float]:
    """Megabytes, on the rank that takes most."""
    with Crew(RANKS, built, config, folder, environment=ENVIRONMENT) as crew:
        found = crew.turn("peaks")
    return {name: max(each[name] for each in found) for name in found[0]}


def growth(layers: list[int], folder: str, tiny: bool) -> tuple[list[dict[str, Any]], list[Goal]]:
    """A row for each depth, and the goal."""
    rows: list[dict[str, Any]] = []
    for n in layers:
        config = replace(TINY if tiny else LAYER, layers=n)
        disk, memory = measured(config, folder), measured(config, None)
        rows.append(
            {
                "layers": n,
                "state of a rank MB": disk["state"],
                "resident, on disk MB": disk["peak"],
                "inputs of layers MB": disk["inputs"],
                "resident without them MB": disk["peak"] - disk["inputs"],
                "resident, in memory MB": memory["peak"],
            }
        )
    left = [row["resident without them MB"] for row in rows]
    return rows, [Goal("resident without inputs, the deepest / the least deep", left[-1] / left[0], 1.05)]
