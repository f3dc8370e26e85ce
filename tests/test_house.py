"""The folders stand on each other, and not in circles."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from benchmarks.structure import circles, code_lines, floors, house

ROOT = Path(__file__).resolve().parents[1]
# From below: each imports only what stands before it.
ORDER = [
    "quoting", "tracebacks", "local_paths", "callers", "compat", "debugging", "mesh", "quant", "check", "collectives",
    "tiers", "simulated", "shards", "strategies", "testing", "transforms", "optim", "checkpoint", "stages", "compiled",
    "forward_mode", "plan", "curvature", "parallel", "interop", "lora", "run", "translate", "shapes", "cli",
]  # fmt: skip


def test_imports_lead_downwards() -> None:
    rooms = house().rooms()
    assert set(rooms) == set(ORDER)
    for name, imported in rooms.items():
        assert {other for other in imported if ORDER.index(other) >= ORDER.index(name)} == set(), name


def test_modules_import_in_no_circles() -> None:
    assert circles(house().imports) == []


def test_a_circle_and_the_floors_are_found(tmp_path: Path) -> None:
    package = tmp_path / "shardfn"
    for name, text in {
        "__init__.py": "from shardfn.high import one",
        "high.py": "from shardfn.low import two, three",
        "low/__init__.py": "",
        "low/two.py": "def f():\n    from shardfn.low import three",
        "low/three.py": "import typing\nif typing.TYPE_CHECKING:\n    from shardfn import high",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text + "\n")
    found = house(package)
    assert found.imports == {
        "high": {"low.two", "low.three"},
        "low": set(),
        "low.two": {"low.three"},
        "low.three": set(),
    }
    assert (circles(found.imports), floors(found.rooms())) == ([], [["low"], ["high"]])
    (package / "low/three.py").write_text("from shardfn import high\n")
    assert circles(house.__wrapped__(package).imports) == [["high", "low.three", "low.two"]]


CODE = '''"""A docstring
of two lines.
"""

# a comment

def _once(x):
    """Another."""
    return """text
    that is code""" + x  # and a comment


def twice():
    return _once(1), (
        2
    )
'''


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings(tmp_path: Path) -> None:
    assert code_lines(CODE) == 7
    (tmp_path / "one.py").write_text(CODE)
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/two.py").write_text("x = 1\n")
    found = house(tmp_path)
    assert (found.code, found.lines(), found.lines("stages")) == ({"one": 7, "stages.two": 1}, 8, 1)


def test_every_tensor_that_the_library_makes_says_on_which_device() -> None:
    """`torch.set_default_device` may be anything."""
    makers = {
        "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand",
        "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
    }  # fmt: skip
    silent = [
        f"{path}:{call.lineno}"
        for path in sorted((ROOT / "shardfn").rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in makers
        if isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
        if not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]
    assert silent == []


def test_no_test_takes_nan_for_a_small_number() -> None:
    lines = [(path, line) for path in (ROOT / "tests").rglob("*.py") for line in path.read_text().splitlines()]
    assert len(lines) > 10_000
    # Python's max of [1.0, nan] is 1.0: tests.reference.worst is not.
    hiding = [f"{path.name}: {line}" for path, line in lines if re.search(r"assert max\(.* < [\d.]*e-\d", line)]
    assert hiding == []
