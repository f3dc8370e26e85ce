"""Plans what a step computes, sends and holds, and shows what the ranks of a mesh hold.

It imports `stages`, `optim`, `tiers`, `shards`, `simulated`, `collectives`, `quant`, `mesh` and `compat`.
"""

from shardfn.plan.machines import Chip, Links
from shardfn.plan.measuring import measure_chip, measure_links
from shardfn.plan.memory import MemoryEstimate, estimate_memory
from shardfn.plan.plan import StepPlan
from shardfn.plan.planning import mode, step
from shardfn.plan.profiling import Profile, profile_step

__all__ = [
    "Chip",
    "Links",
    "MemoryEstimate",
    "Profile",
    "StepPlan",
    "estimate_memory",
    "measure_chip",
    "measure_links",
    "mode",
    "profile_step",
    "step",
]
