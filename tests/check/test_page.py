"""The pages on the checker's messages show those that their programs raise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from shardfn.check.findings import Kind
from shardfn.testing import world

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "docs/explanation/checker.md",
    "docs/reference/checker-errors.md",
    "docs/reference/checker-warnings.md",
    "docs/reference/checker-warnings-of-ranks.md",
)


def messages(pages: dict[str, str]) -> list[tuple[str, str]]:
    """What each block that must raise an error raises, and what its page shows of that."""
    namespace: dict[str, Any] = {"__name__": "page"}
    found = []
    for name, text in pages.items():
        for block in re.finditer(r"```python( raises=\S+)?\n(.*?)```(\s*```text\n(.*?)```)?", text, re.DOTALL):
            code = "\n" * text[: block.start(2)].count("\n") + block[2]
            try:
                exec(compile(code, name, "exec", dont_inherit=True), namespace)
            except Exception as error:
                found.append((str(error), block[4] or ""))
    return found


def texts() -> dict[str, str]:
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}


def plain(message: str) -> str:
    return " ".join(re.sub(r"\.md:\d+", ".md", message).split())


def test_the_pages_show_what_is_raised() -> None:
    found = world(2).run(messages, texts())
    assert len(found[0]) == len(re.findall(r"```python raises", "".join(texts().values()))) > 10
    for rank in found:
        for raised, shown in rank:
            assert plain(raised) == plain(shown)


def test_each_kind_has_an_entry() -> None:
    text = "".join(texts().values())
    assert [kind for kind in get_args(Kind) if f"\n## `{kind}`: " not in text] == []
