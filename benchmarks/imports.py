"""What `import shardfn` loads besides torch: modules, and the memory of their Python objects.

    python -m benchmarks.imports

The import runs in new processes that have already imported torch. Modules that are imported later, on first use, are
not counted. Seconds are not reported, since they depend on the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.report import Goal, parser, publish

HEAVY = (
    "transformers",
    "numpy.testing",
    "matplotlib",
    "rich",
    "hypothesis",
    "pytest",
    "torch._inductor",
    "torch._dynamo",
)
PROGRAM = """
import json, sys, tracemalloc
import torch, torch.distributed
before = set(sys.modules)
tracemalloc.start()
import shardfn
taken, _ = tracemalloc.get_traced_memory()
print(json.dumps([sorted(set(sys.modules) - before), taken, sorted(before)]))
"""


def loaded() -> tuple[list[str], int, list[str]]:
    """The modules that shardfn loads, the bytes of their objects, and the modules that torch had loaded."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=120)
    modules, taken, before = json.loads(ran.stdout)
    return modules, taken, before


def main() -> None:
    args = parser("What `import shardfn` loads besides torch.").parse_args()
    modules, taken, _ = loaded()
    own = [name for name in modules if name.split(".")[0] == "shardfn"]
    packages = sorted({name.split(".")[0] for name in modules})
    heavy = [name for name in modules if name in HEAVY]
    rows: list[dict[str, Any]] = [
        {"modules": len(modules), "of shardfn": len(own), "MB": taken / 1e6, "packages": ", ".join(packages)}
    ]
    goals = [
        Goal("modules that shardfn loads of others", len(modules) - len(own), 30),
        Goal("modules of shardfn that it loads", len(own), 300, tolerance=0.05),
        Goal("heavy packages that it loads", len(heavy), 0),
        Goal("MB of Python objects", taken / 1e6, 15, tolerance=0.05),
    ]
    publish("import shardfn, after torch", rows, goals, args.json)


if __name__ == "__main__":
    main()
