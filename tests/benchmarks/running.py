"""Benchmarks as commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def told(name: str, folder: Path, *options: str, seconds: float = 200) -> dict[str, Any]:
    """What the tiny form of a benchmark writes into a file in a folder."""
    file = folder / "told.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--tiny", *options, "--json", str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=ROOT, timeout=seconds, stdout=subprocess.DEVNULL, env=environment)
    found: dict[str, Any] = json.loads(file.read_text())
    return found
