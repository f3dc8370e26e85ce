"""The pages on translating show what the command prints."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from shardfn.translate import translate

DOCS = Path(__file__).resolve().parents[2] / "docs/how-to"
PAGE = "\n".join((DOCS / f"translate-{name}.md").read_text() for name in ("configurations", "programs"))


def test_the_page_shows_what_is_printed(tmp_path: Path):
    files = re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)```$", PAGE, re.DOTALL | re.MULTILINE)
    shown = re.findall(r"^`shardfn translate ([\w.]+)` prints:\n\n```text\n(.*?)```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(files) == len(shown) == 6
    with contextlib.chdir(tmp_path):
        for (name, text), (printed, program) in zip(files, shown, strict=True):
            Path(name).write_text(text)
            assert printed == name
            assert translate(name).program.strip() == program.strip()


def test_the_page_shows_the_table(tmp_path: Path):
    text = re.search(r"^`ds_config.json`:\n\n```json\n(.*?)```$", PAGE, re.DOTALL | re.MULTILINE)
    assert text is not None
    (tmp_path / "ds_config.json").write_text(text[1])
    rows = translate(tmp_path / "ds_config.json").rows
    lines = [f"| {row.key} | {row.value} | {row.status} | {row.text} |" for row in rows]
    assert "\n".join(lines) in PAGE
