"""The documentation is executed: its Python code, its links, and its account of the public names."""

import ast
import contextlib
import dataclasses
import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from torch.distributed import fsdp

import shardfn
from shardfn import checkpoint, interop, optim, parallel
from shardfn.testing import world

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 88  # what a page shows of a block without scrolling
PAGES = [Path("README.md"), *(path.relative_to(ROOT) for path in sorted((ROOT / "docs").rglob("*.md")))]
PAGES = [page for page in PAGES if "_build" not in page.parts]
each_page = pytest.mark.parametrize("page", PAGES, ids=str)


@dataclass(frozen=True)
class Block:
    """One ```python block: its first line of code in the page, and the error that it must raise."""

    line: int
    code: str
    raises: str | None


def text_of(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def tokens_of(text: str) -> list[Token]:
    return MarkdownIt("commonmark").parse(text)


def python_blocks(text: str, above: int = 0) -> Iterator[Block]:
    """The blocks of a page in order, those inside directives such as {note} too."""
    for token in tokens_of(text):
        if token.type != "fence" or token.map is None:
            continue
        line = above + token.map[0] + 2
        if token.info.startswith("{"):
            yield from python_blocks(token.content, above=line - 1)
        elif token.info.split()[:1] == ["python"]:
            raises = re.search(r"\sraises=(\S+)", token.info)
            yield Block(line, token.content, raises and raises[1])


def ranks_of(text: str) -> int:
    """The N of `<!-- ranks: N -->`, the size of the world that the page runs on; `none` is a process without others."""
    comments = "".join(token.content for token in tokens_of(text) if token.type == "html_block")
    ranks = re.search(r"<!--\s*ranks:\s*(\d+|none)\s*-->", comments)
    return 0 if ranks and ranks[1] == "none" else int(ranks[1]) if ranks else 1


def page_before(page: Path, text: str) -> Path | None:
    """The page from which the code of this one goes on, which `<!-- after: FILE -->` names."""
    comments = "".join(token.content for token in tokens_of(text) if token.type == "html_block")
    name = re.search(r"<!--\s*after:\s*(\S+)\s*-->", comments)
    return Path(os.path.normpath(page.parent / name[1])) if name else None


def pages_before(page: Path) -> list[tuple[Path, list[Block]]]:
    """All of those, the first of them first, with their blocks."""
    before = page_before(page, text_of(page))
    return [*pages_before(before), (before, list(python_blocks(text_of(before))))] if before else []


Program = Sequence[tuple[Path, list[Block]]]


def run_page(page: Path, blocks: list[Block], folder: Path, earlier: Program = ()) -> list[int]:
    """Run a page's blocks as one program on this rank, and say which lines they start at."""
    # In the main module cloudpickle sends the page's functions by value, and torch.compile finds their names.
    namespace = vars(sys.modules["__main__"])
    before = dict(namespace)
    executed = []
    try:
        with contextlib.chdir(folder):
            for other, its_blocks in earlier:
                for block in its_blocks:
                    run_block(other, block, namespace)
            for block in blocks:
                run_block(page, block, namespace)
                executed.append(block.line)
    finally:
        namespace.clear()
        namespace.update(before)
    return executed


def run_block(page: Path, block: Block, namespace: dict[str, Any]) -> None:
    where = f"{page}:{block.line}"
    padded = "\n" * (block.line - 1) + block.code  # so that line numbers are the page's
    try:
        exec(compile(padded, ROOT / page, "exec", dont_inherit=True), namespace)
    except Exception as error:
        if block.raises and isinstance(error, eval(block.raises, namespace)):
            return
        inner = error.__traceback__ and error.__traceback__.tb_next
        report = "".join(traceback.format_exception(type(error), error, inner))
        raise AssertionError(f"{where}: the block failed\n{report}") from None
    if block.raises:
        raise AssertionError(f"{where}: the block did not raise {block.raises}")


def lines_that_look_like_python(text: str) -> list[int]:
    """Where code starts by a reading of the text that knows no Markdown, so that no block escapes the parser."""
    fence = r"[\s>*+-]*(```|~~~|:::).*\b(py|python\d*|pycon|ipython\d*|code|code-block|code-cell|doctest)\b"
    other = r"\s*(>>> |\.\. (code|code-block|testcode|doctest)::)"
    return [
        number + 1
        for number, line in enumerate(text.splitlines(), start=1)
        if re.match(fence, line) or re.match(other, line)
    ]


def wide_lines(text: str) -> list[str]:
    """The lines of code blocks that do not fit the page."""
    blocks = (token.content for token in tokens_of(text) if token.type == "fence")
    return [line for block in blocks for line in block.splitlines() if len(line) > COLUMNS]


def links_of(text: str) -> Iterator[str]:
    for token in tokens_of(text):
        for part in [token, *(token.children or [])]:
            if part.type in ("html_block", "html_inline"):
                yield from re.findall(r"""(?:href|src)=["']([^"']+)""", part.content)
            elif link := part.attrGet("href") or part.attrGet("src"):
                yield str(link)


ALIASES = {
    "sf": shardfn, "shardfn": shardfn, "so": optim, "checkpoint": checkpoint, "interop": interop, "parallel": parallel,
}  # fmt: skip

SPACES = (shardfn, shardfn.check, shardfn.collectives, shardfn.plan, shardfn.shards, shardfn.strategies)
PUBLIC = {f"{space.__name__}.{name}": getattr(space, name) for space in SPACES for name in space.__all__}


def spans_of(text: str) -> list[str]:
    """The `code` within sentences and tables."""
    return [part.content for token in tokens_of(text) for part in token.children or [] if part.type == "code_inline"]


def unknown_names(span: str) -> list[str]:
    """What a span takes from the package that the package has not."""
    wrong = []
    for alias, rest in re.findall(rf"(?<![\w./-])({'|'.join(ALIASES)})((?:\.[A-Za-z_]\w*)+)", span):
        value: Any = ALIASES[alias]
        for name in rest[1:].split("."):
            if not hasattr(value, name):
                wrong.append(f"{alias}{rest}")
                break
            value = getattr(value, name)
    return wrong


def unknown_arguments(span: str) -> list[str]:
    """Keywords of a span's calls of public functions that these do not take."""
    try:
        calls = [node for node in ast.walk(ast.parse(span)) if isinstance(node, ast.Call)]
    except SyntaxError:
        return []
    known = {path.rpartition(".")[2]: value for path, value in PUBLIC.items()} | {"functional": interop.functional}
    wrong = []
    for call in calls:
        alias, _, name = ast.unparse(call.func).rpartition(".")
        function = getattr(ALIASES.get(alias), name, None) if alias else known.get(name)
        if not callable(function):
            continue
        takes = dict(inspect.signature(function).parameters)
        if function is interop.functional:  # the rest goes to stages
            takes = {**takes, **inspect.signature(shardfn.stage).parameters}
        elif any(one.kind is one.VAR_KEYWORD for one in takes.values()):
            continue
        wrong += [f"{name}({word.arg}=)" for word in call.keywords if word.arg and word.arg not in takes]
    return wrong


def knobs() -> set[str]:
    """What FSDP and the Trainer can be asked for, by name."""
    asked = {*inspect.signature(fsdp.FullyShardedDataParallel.__init__).parameters}
    asked |= {*inspect.signature(fsdp.fully_shard).parameters}
    asked |= {name for name, value in vars(fsdp.FSDPModule).items() if inspect.isfunction(value)}
    for kind in (fsdp.MixedPrecision, fsdp.MixedPrecisionPolicy, fsdp.CPUOffload, fsdp.CPUOffloadPolicy):
        asked |= {field.name for field in dataclasses.fields(kind)}
    for names in (fsdp.BackwardPrefetch, fsdp.ShardingStrategy, fsdp.StateDictType):
        asked |= {one.name for one in names}
    settings = importlib.import_module("transformers").TrainingArguments.__doc__
    listed = settings.split("fsdp_config (", 1)[1].split("> DeepSpeed", 1)[0]
    return {name for name in asked if not name.startswith("_")} - {"self", "module", "modules"} | {
        *re.findall(r"^\s+- (\w+) \(", listed, re.MULTILINE)
    }


@each_page
def test_what_a_page_names_exists(page: Path):
    found = [wrong for span in spans_of(text_of(page)) for wrong in (*unknown_names(span), *unknown_arguments(span))]
    assert found == []


def test_every_knob_of_fsdp_and_the_trainer_is_on_the_pages_for_their_users():
    pages = ("from-fsdp", "from-accelerate")
    spans = " ".join(span for name in pages for span in spans_of(text_of(Path(f"docs/reference/{name}.md"))))
    assert {name for name in knobs() if not re.search(rf"(?<![A-Za-z]){re.escape(name)}\b", spans)} == set()


@pytest.mark.parametrize("page", [page for page in PAGES if any(python_blocks(text_of(page)))], ids=str)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path):
    text = text_of(page)
    blocks = list(python_blocks(text))
    ranks = ranks_of(text)
    earlier = pages_before(page)
    ran_on = world(ranks) if ranks else world(1, "alone")
    executed = ran_on.with_deadline(180).run(
        run_page, page, blocks, tmp_path, earlier
    )  # importing transformers is slow
    assert executed == [[block.line for block in blocks]] * max(1, ranks)


@pytest.mark.parametrize("page", [page for page in PAGES if page_before(page, text_of(page))], ids=str)
def test_a_page_whose_code_goes_on_from_another_says_so(page: Path):
    before = page_before(page, text_of(page))
    assert before is not None
    assert before in PAGES
    assert ranks_of(text_of(before)) == ranks_of(text_of(page))
    first = text_of(page).split("\n## ")[0]
    assert before in [Path(os.path.normpath(page.parent / link.partition("#")[0])) for link in links_of(first)]


def test_the_command_on_the_index_takes_the_code_out_of_every_page():
    command = re.search(r"^awk '(.*)'", text_of(Path("docs/how-to/index.md")), re.MULTILINE)
    assert command
    for page in PAGES:
        taken = subprocess.run(["awk", command[1], ROOT / page], capture_output=True, text=True, check=True).stdout
        assert taken == "".join(block.code for block in python_blocks(text_of(page)) if not block.raises), page


def words_of(text: str) -> int:
    """All words of a page but those of its tables."""
    return len(" ".join(line for line in text.splitlines() if line[:1] != "|").split())


@each_page
def test_a_page_is_short(page: Path):
    if page.name == "README.md":
        assert len(text_of(page).split()) <= 900
    assert words_of(text_of(page)) <= 1500


@each_page
def test_what_a_page_tells_to_install_is_there(page: Path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = re.findall(r"pip\s+install\s+'?(?:shardfn|\.)\[([\w,-]+)\]", text_of(page))
    assert {name for names in asked for name in names.split(",")} <= {*project["optional-dependencies"]}


def test_the_page_on_strategies_names_each_field_of_a_placement():
    section = text_of(Path("docs/reference/strategies.md")).split("## Write your own")[1].split("\n## ")[0]
    fields = [field.name for field in dataclasses.fields(shardfn.Placement)]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == fields


@each_page
def test_no_python_code_of_a_page_escapes_execution(page: Path):
    text = text_of(page)
    assert lines_that_look_like_python(text) == [block.line for block in python_blocks(text)]


@each_page
def test_the_code_of_a_page_fits_it(page: Path):
    assert wide_lines(text_of(page)) == []


@each_page
def test_relative_links_of_a_page_lead_to_files(page: Path):
    links = [urlsplit(link) for link in links_of(text_of(page))]
    paths = [unquote(link.path) for link in links if link.path and not link.scheme and not link.netloc]
    assert [path for path in paths if not (ROOT / page.parent / path).exists()] == []


def test_pages_that_the_package_names_exist():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "shardfn").rglob("*.py")]
    named = {name for source in sources for name in re.findall(r"docs/[\w/-]+\.md", source)}
    assert named
    assert {name for name in named if Path(name) not in PAGES} == set()


def has_example(path: Path) -> bool:
    lines = [line for line in path.read_text().splitlines() if ">>> " in line]
    return any("doctest: +SKIP" not in line for line in lines)


SOURCES = [path for path in sorted((ROOT / "shardfn").rglob("*.py")) if has_example(path)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_in_docstrings_run(path: Path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    found = doctest.testmod(importlib.import_module(name), report=True)
    assert found.attempted > 0
    assert found.failed == 0


def test_a_public_name_has_one_path():
    assert len({path.rpartition(".")[2] for path in PUBLIC}) == len(PUBLIC)


@pytest.mark.parametrize("path", PUBLIC)
def test_a_public_name_is_explained(path: str):
    value, name = PUBLIC[path], path.rpartition(".")[2]
    if callable(value) or inspect.ismodule(value):
        assert value.__doc__, f"{path} has no docstring"
    api = "\n".join(text_of(page) for page in PAGES if page.name.startswith("api"))
    directives = re.findall(r"\bauto\w+:: (\S+)", api)
    home = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
    mentioned = re.search(rf"\b{re.escape(name)}\b", " ".join(re.findall(r"`([^`\n]+)`", api)))
    assert mentioned or path in directives or home in directives


SAMPLE = """\
<!-- ranks: 4 -->
# Title

```python
x = 1
```

- item
  ```python raises=ValueError
  raise ValueError(x)
  ```

```{note}
~~~python
y = x
~~~
```

```text
nothing
```
[a](b.md#c) ![d](e.png) <img src="f.png">
"""


def test_blocks_are_found_wherever_they_stand():
    assert list(python_blocks(SAMPLE)) == [
        Block(5, "x = 1\n", None),
        Block(10, "raise ValueError(x)\n", "ValueError"),
        Block(15, "y = x\n", None),
    ]
    assert lines_that_look_like_python(SAMPLE) == [5, 10, 15]


def test_a_page_says_how_many_ranks_it_needs():
    assert ranks_of(SAMPLE) == 4
    assert ranks_of("# Title") == 1


def test_a_page_says_which_page_it_goes_on_from():
    text = "<!-- ranks: 4 -->\n<!-- after: ../a/b.md -->\n# Title"
    assert page_before(Path("docs/how-to/c.md"), text) == Path("docs/a/b.md")
    assert page_before(Path("README.md"), SAMPLE) is None


def test_links_are_found_in_markdown_and_in_html():
    assert list(links_of(SAMPLE)) == ["b.md#c", "e.png", "f.png"]


def test_names_that_are_not_there_are_noticed():
    assert unknown_names("so.adamw(sf.pvary(x), sf.nothing.at_all)") == ["sf.nothing.at_all"]
    assert unknown_names("torch.distributed.checkpoint.nothing, deepspeed.checkpointing") == []
    assert unknown_arguments("functional(module, remat=True, prefetsch=2)") == ["functional(prefetsch=)"]
    assert unknown_arguments("sf.shard(..., frosen=[...])") == ["shard(frosen=)"]


@pytest.mark.parametrize("start", ["```py", "```{code-block} python", "``` pycon", ">>> 1", ".. code-block:: c"])
def test_code_in_another_dress_is_noticed(start: str):
    assert lines_that_look_like_python(f"text\n{start}\n") == [3]
    assert list(python_blocks(f"text\n{start}\n")) == []


def test_blocks_of_a_page_share_names_and_run_in_order(tmp_path: Path):
    assert run_page(Path("README.md"), list(python_blocks(SAMPLE)), tmp_path) == [5, 10, 15]


@pytest.mark.parametrize(
    ("block", "report"),
    [
        (Block(7, "x = 1\nx.y\n", None), r"^README\.md:7: the block failed\n.*line 8.*\nAttributeError"),
        (Block(7, "x.y\n", "ValueError"), r"^README\.md:7: the block failed\n.*line 7.*\nNameError"),
        (Block(7, "x = 1\nx y\n", None), r"^README\.md:7: the block failed\n.*line 8.*\nSyntaxError"),
        (Block(7, "x = 1\n", "ValueError"), r"^README\.md:7: the block did not raise ValueError"),
    ],
)
def test_a_wrong_block_is_reported_with_page_line_and_traceback(block: Block, report: str, tmp_path: Path):
    with pytest.raises(AssertionError) as failure:
        run_page(Path("README.md"), [block], tmp_path)
    assert re.search(report, str(failure.value), re.DOTALL)
