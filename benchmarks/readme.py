"""The table of costs in README.md, made from recorded figures; `python -m benchmarks.goals --readme` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- from benchmarks/figures.json -->\n", "<!-- until here -->\n"
COMMANDS = {"train_step --ranks 2": "2 ranks", "train_step --ranks 4 --rounds 5": "4 ranks"}
SYSTEMS = {
    "shardfn": "shardfn, `full_shard`",
    "shardfn, kept for backward": "shardfn, `shard_grad_op`",
    "FSDP2": "FSDP2",
    "FSDP1": "FSDP1",
    "DDP": "DDP",
}
COLUMNS = {"step": ("step ms", "ms"), "memory": ("peak MB", "MB")}


def costs(record: dict[str, Any]) -> str:
    """The table of the costs of a training step."""
    heads = [f"{what}, {ranks}" for what in COLUMNS for ranks in COMMANDS.values()]
    lines = [" | ".join(("", *heads)), "---|" * len(heads) + "---"]
    for system, name in SYSTEMS.items():
        lines.append(" | ".join((name, *_cells(record, system))))
    return "".join(f"| {line.strip()} |\n" if line[:3] != "---" else f"|{line}|\n" for line in lines)


def _cells(record: dict[str, Any], system: str) -> list[str]:
    rows = [next(row for row in record[words]["rows"] if row.get("system") == system) for words in COMMANDS]
    return [f"{row[key]:.0f} {unit}" for key, unit in COLUMNS.values() for row in rows]


def written(text: str, record: dict[str, Any]) -> str:
    """The page's text, with its table replaced by that of the record."""
    before, _, rest = text.partition(BEGIN)
    _, marked, after = rest.partition(END)
    if not marked:
        raise ValueError(f"README.md: no table stands between {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}{costs(record)}{END}{after}"


def write(record: dict[str, Any]) -> None:
    """Rewrites README.md."""
    FILE.write_text(written(FILE.read_text(), record))
