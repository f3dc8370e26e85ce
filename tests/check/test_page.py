"""The page on the checker's messages shows those that its programs raise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from shardfn.check.findings import Kind
from shardfn.testing import world

PAGE = Path(__file__).resolve().parents[2] / "docs/checker.md"


def messages(text: str) -> list[tuple[str, str]]:
    """What each block that must raise an error raises, and what the page shows of that."""
    namespace: dict[str, Any] = {"__name__": "page"}
    found = []
    for block in re.finditer(r"```python( raises=\S+)?\n(.*?)```(\s*```text\n(.*?)```)?", text, re.DOTALL):
        code = "\n" * text[: block.start(2)].count("\n") + block[2]
        try:
            exec(compile(code, "docs/checker.md", "exec", dont_inherit=True), namespace)
        except Exception as error:
            found.append((str(error), block[4] or ""))
    return found


def plain(message: str) -> str:
    return " ".join(re.sub(r"checker\.md:\d+", "checker.md", message).split())


def test_the_page_shows_what_is_raised() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = world(2).run(messages, text)
    assert len(found[0]) == len(re.findall(r"```python raises", text)) > 10
    for rank in found:
        for raised, shown in rank:
            assert plain(raised) == plain(shown)


def test_each_kind_has_an_entry() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [kind for kind in get_args(Kind) if f"\n## `{kind}`: " not in text] == []
