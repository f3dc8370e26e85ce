"""The views of a plan show what it holds."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import quickjs

from shardfn.plans import printed
from shardfn.plans.plan import Plan
from shardfn.plans.schedule import Allocation, Held, Work
from tests.plans.plans import At, stack, taking
from tests.refusals import refused

HERE = Path(__file__).parent
NOTHING = Plan("step", {}, 0, (), (), {}, {}, Held(0, {}), (), 0)
HOSTILE = "</script><b onclick=x>&\"'{{data}}"


# --- the table ---


def test_equal_stages_are_one_row() -> None:
    text = stack(126).table(120)
    assert len(text.splitlines()) < 30
    assert text.count("layers.") == 5  # the peak, two allocations, and the first and last of the row
    assert re.search(r"\nlayers.0 … layers.125 \(126 alike\) +120 +10 TFLOP +10 TFLOP +20 TFLOP +3 +2.4 GB\n", text)


def test_stages_that_alternate_are_two_rows_and_one_that_differs_is_a_third() -> None:
    def works(layers: int) -> list[Work]:
        return [
            Work("compute", f"{i}.{part}", launches=n + (i == 2 and part == "mlp"))
            for i in range(layers)
            for part, n in (("attention", 5), ("mlp", 7))
        ]

    text = dataclasses.replace(NOTHING, works=tuple(works(5))).text(100)
    rows = [line.split("  ")[0] for line in text.splitlines()[7:]]
    assert rows == ["0.attention … 4.attention (5 alike)", "0.mlp … 4.mlp (4 alike)", "2.mlp"]


def test_what_is_summed_is_the_sum() -> None:
    plan = stack(5, whole=8_000_000)
    text = plan.table(160)
    rows = {re.split(" {2,}", line)[0]: re.split(" {2,}", line)[-2:] for line in text.splitlines() if " shard " in line}
    assert rows["all_gather"] == ["5", "5 MB"]
    assert rows["reduce_scatter"] == ["5", "5 MB"]
    assert f"all {plan.peak.total / 1e9:.4g} GB" in re.sub(" +", " ", text)
    assert f"{sum(work.launches for work in plan.works):,} operations" in text


def test_a_table_of_anything_fits_a_screen() -> None:
    works = tuple(Work("all_gather", f"stage{'x' * i}", axis=(f"a{i}",), dtype=f"int{i}", sent=i) for i in range(100))
    rows = tuple(Allocation("gradients", f"file{i}.py:3", "long" * 40, i, i) for i in range(100))
    plan = dataclasses.replace(NOTHING, works=works, allocations=rows, host={"optimizer": 5})
    lines = plan.table(60).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 60
    assert "… 87 more rows" in lines
    assert "… 95 more rows" in lines
    assert "on the host" in plan.table(60)


def test_a_plan_prints_as_its_table_with_and_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = stack(4)
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=printed.WIDE, force_terminal=True, color_system="truecolor")
    console.print(plan)
    colored = out.getvalue()
    assert "\x1b[" in colored
    plain = re.sub(r"\x1b\[[\d;]*m", "", colored)
    assert [line.rstrip() for line in plain.splitlines()] == plan.text(printed.WIDE).splitlines()
    assert "<span" in plan._repr_html_()
    monkeypatch.setattr(printed, "find_spec", lambda name: None)
    assert repr(plan) == str(plan) == plan.table()
    assert plan._repr_html_().startswith("<pre>step on")


def test_an_empty_plan_has_views(tmp_path: Path) -> None:
    assert "no mesh: rank 0 of 1" in str(NOTHING)
    NOTHING.html(tmp_path / "page.html", At((), ()))
    NOTHING.save_picture(tmp_path / "picture.png")
    NOTHING.trace(tmp_path / "trace.json")
    assert Script(tmp_path / "page.html").drawn() == []


# --- the page, in an engine that runs its script ---


class Page(HTMLParser):
    """What a page consists of: its scripts, and the tags that it opens."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and data.strip():
            self.scripts.append(data)


class Script:
    """A page whose script has run, without a browser."""

    def __init__(self, path: Path) -> None:
        self.page = Page(path)
        self.data, script = self.page.scripts
        self.context = quickjs.Context()
        self.context.eval((HERE / "page.js").read_text())
        self.context.set("given", self.data)
        self.context.eval("named.data.textContent = given;")
        self.context.eval(script)

    def drawn(self, panel: int = 0) -> list[dict[str, Any]]:
        """The bars that are drawn: their attributes."""
        text = self.context.eval(f"charts[{panel}].svg.innerHTML")
        return [dict(re.findall(r'([\w-]+)="([^"]*)"', one)) for one in re.findall(r"<rect data-work[^>]*>", text)]

    def svg(self, panel: int = 0) -> str:
        return self.context.eval(f"charts[{panel}].svg.innerHTML")

    def happens(self, name: str, panel: int = 0, **facts: float) -> None:
        self.context.eval(f"charts[{panel}].svg.happens({name!r}, {json.dumps(facts)})")

    @property
    def left(self) -> float:
        """Where the axis begins."""
        return self.context.eval("LEFT")

    @property
    def width(self) -> float:
        return self.context.eval("widthOf(charts[0].svg)")

    @property
    def told(self) -> str:
        return self.context.eval("about.style.display === 'none' ? '' : about.textContent")


@pytest.fixture
def paged(tmp_path: Path) -> Callable[..., Script]:
    def make(plan: Plan, *args: Any, **options: Any) -> Script:
        plan.html(tmp_path / "page.html", *args, **options)
        return Script(tmp_path / "page.html")

    return make


def test_a_page_has_all_of_the_plan_and_needs_no_network(paged: Any) -> None:
    plan = stack(6)
    script = paged(plan, taking(plan))
    panel = json.loads(script.data)[0]
    words, works = panel["words"], panel["works"]
    assert [words[i] for i in works["stage"]] == [work.stage for work in plan.works]
    assert works["sent"] == [work.sent for work in plan.works]
    assert works["begin"] == [round(t * 1e9) for t in taking(plan).begins]
    assert panel["lanes"] == ["compute", "gathers", "reductions"]
    assert [sum(held) for held in zip(*panel["held"][1:], strict=True)] == [one.total for one in plan.held]
    assert not [facts for _, facts in script.page.tags if {"src", "href"} & set(facts)]
    assert re.findall(r"https?://[^\"]*", "".join(script.page.scripts)) == ["http://www.w3.org/2000/svg"]


def test_a_page_draws_each_work_where_it_is_in_time(paged: Any) -> None:
    plan = stack(3)
    times = taking(plan)
    script = paged(plan, times)
    left, width = script.left, script.width
    bars = script.drawn()
    assert sorted(int(bar["data-work"]) for bar in bars) == list(range(len(plan.works)))
    whole = max(times.ends)
    for bar in bars:
        i = int(bar["data-work"])
        assert float(bar["x"]) == pytest.approx(left + width * times.begins[i] / whole, abs=0.02)
        assert float(bar["width"]) == pytest.approx(max(1, width * (times.ends[i] - times.begins[i]) / whole), abs=0.02)
    assert len({bar["y"] for bar in bars}) == 3
    assert len({bar["fill"] for bar in bars if plan.works[int(bar["data-work"])].phase == "backward"}) == 3
    assert script.svg().count("data-kind") == 7
    assert "peak" in script.svg()


def test_a_page_of_many_works_draws_a_few_bars_for_each_pixel(paged: Any) -> None:
    plan = stack(3000)
    script = paged(plan)
    assert 800 < len(script.drawn()) < 3 * 1100
    assert len(script.svg()) < 1_000_000


def test_the_wheel_zooms_where_it_is_and_two_clicks_show_all(paged: Any) -> None:
    plan = stack(40)
    script = paged(plan)
    number = len(script.drawn())
    middle = script.left + script.width / 2
    for _ in range(8):
        script.happens("wheel", deltaY=-200, clientX=middle, clientY=30)
    seen = sorted(int(bar["data-work"]) for bar in script.drawn())
    assert 0 < len(seen) < number / 10
    assert seen[0] < len(plan.works) / 2 < seen[-1] + 2
    script.happens("dblclick")
    assert len(script.drawn()) == number


def test_dragging_moves_and_stays_within_the_step(paged: Any) -> None:
    script = paged(stack(40))
    script.happens("wheel", deltaY=-400, clientX=600)
    before = script.context.eval("view.from")
    for x, inside in ((300, True), (10**6, False)):
        script.happens("pointerdown", clientX=600)
        script.happens("pointermove", clientX=x)
        script.context.eval("window.happens('pointerup', {})")
        assert (script.context.eval("view.from") > before) == inside
    assert script.context.eval("view.from") == 0


def test_keys_zoom_and_move(paged: Any) -> None:
    script = paged(stack(40))
    for key in ("+", "+", "ArrowRight"):
        script.context.eval(f"window.happens('keydown', {{ key: '{key}' }})")
    assert script.context.eval("view.to - view.from") == pytest.approx(0.49)
    assert script.context.eval("view.from") == pytest.approx(0.255 + 0.098)
    script.context.eval("window.happens('keydown', { key: '0' })")
    assert script.context.eval("view.to - view.from") == 1


def test_pointing_at_a_work_tells_of_it_and_a_click_keeps_that(paged: Any) -> None:
    plan = stack(3)
    script = paged(plan)
    gather = script.left + script.width * 0.5 / len(plan.works)
    script.happens("pointermove", clientX=gather, clientY=18 + 29 + 5)
    assert script.told.splitlines() == [
        "all_gather over shard: forward of layers.0",
        f"work 1 of {len(plan.works)}",
        "800 MB sent",
        "model.py:40",
    ]
    script.happens("click", clientX=gather, clientY=18 + 29 + 5)
    script.happens("pointermove", clientX=gather, clientY=400)
    assert "all_gather" in script.told
    assert 'class="chosen"' in script.svg()
    script.happens("click", clientX=gather, clientY=400)
    assert script.told == ""


def test_pointing_at_the_memory_tells_what_is_held(paged: Any) -> None:
    plan = stack(3, whole=8_000_000)
    script = paged(plan)
    script.happens("pointermove", clientX=script.left + script.width - 1, clientY=150)
    last = plan.held[-1]
    assert script.told.splitlines()[0] == f"{last.total / 1e6:g} MB at work {len(plan.works)}"
    assert "optimizer 12 MB" in script.told.splitlines()


def test_two_plans_are_on_one_axis(paged: Any) -> None:
    plan = stack(6)
    script = paged(plan, taking(plan), beside=stack(4))
    assert len(script.drawn(0)) == len(plan.works)
    assert len(script.drawn(1)) == len(stack(4).works)
    script.happens("wheel", panel=0, deltaY=-800, clientX=100)
    assert len(script.drawn(1)) < len(stack(4).works) / 2


def test_names_are_text_wherever_they_stand(paged: Any) -> None:
    plan = dataclasses.replace(
        NOTHING, name=HOSTILE, works=(Work("compute", HOSTILE, where=HOSTILE),), held=(Held(0, {HOSTILE: 5}),),
        peak=Held(0, {HOSTILE: 5}), mesh={HOSTILE: 2},
    )  # fmt: skip
    script = paged(plan)
    assert [tag for tag, _ in script.page.tags if tag == "b"] == []
    assert "<b" not in script.svg()
    assert json.loads(script.data)[0]["words"].count(HOSTILE) == 1


def test_times_of_another_plan_are_an_error(tmp_path: Path) -> None:
    plan = stack(3)
    for view in (plan.html, plan.save_picture, plan.trace):
        told = refused(partial(view, tmp_path / "x.png", times=At((0.0,) * 17, (1.0,) * 17)), ValueError)
        assert "times of 17 works, but it has 19" in told


# --- the page, in a browser ---

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
ACTS = """<script>
const [{ svg }] = charts, box = svg.getBoundingClientRect(), count = () => svg.querySelectorAll("[data-work]").length;
const send = (name, facts) => svg.dispatchEvent(new (name === "wheel" ? WheelEvent : PointerEvent)(name, facts));
const bar = svg.querySelector("[data-work='0']").getBoundingClientRect();
const seen = { all: count(), wide: svg.querySelector("[data-work]").getBBox().width, opened: performance.now() };
send("pointermove", { clientX: bar.left + bar.width / 2, clientY: bar.top + 5 });
seen.told = document.getElementById("about").innerText;
send("wheel", { deltaY: -1600, clientX: box.left + 600, clientY: box.top + 30 });
seen.zoomed = count();
seen.dark = getComputedStyle(document.body).backgroundColor;
document.body.innerHTML = "<pre id=seen>" + JSON.stringify(seen) + "</pre>";
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed: apt-get install chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_opens_the_page_of_a_large_step_at_once(tmp_path: Path, dark: bool) -> None:
    plan = stack(1260)  # ten micro-batches of 126 layers
    page = tmp_path / "page.html"
    plan.html(page, taking(plan))
    page.write_text(page.read_text().replace("</body>", f"{ACTS}</body>"))
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,800", f"--user-data-dir={tmp_path / 'user'}",
        "--virtual-time-budget=20000", "--dump-dom", *(["--blink-settings=preferredColorScheme=0"] if dark else []),
    ]  # fmt: skip
    out = subprocess.run([str(BROWSER), *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="seen">(.*?)</pre>', out.stdout)
    assert found is not None, out.stdout[-2000:] + out.stderr[-2000:]
    seen = json.loads(found[1].replace("&gt;", ">").replace("&amp;", "&"))
    assert 500 < seen["all"] < 4000
    assert 0 < seen["zoomed"] < seen["all"] / 4
    assert seen["told"].startswith("all_gather over shard: forward of layers.0")
    assert seen["opened"] < 5000  # ms, while other tests run
    assert seen["dark"] == ("rgb(20, 25, 31)" if dark else "rgb(255, 255, 255)")


# --- the picture and the trace ---


def test_a_picture_has_the_lanes_and_the_memory(tmp_path: Path) -> None:
    plan = stack(6)
    lanes, memory = plan.figure(taking(plan)).axes
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["compute", "gathers", "reductions"]
    assert sum(len(drawn.get_paths()) for drawn in lanes.collections) == len(plan.works)
    assert memory.get_xlim() == (0, max(taking(plan).ends))
    assert len(plan.figure(beside=stack(3)).axes) == 4
    plan.save_picture(tmp_path / "plan.png", taking(plan), beside=stack(3))
    assert matplotlib.image.imread(tmp_path / "plan.png").shape[1] > 1000
    assert "names no kind of picture" in refused(lambda: plan.save_picture(tmp_path / "plan.txt"), ValueError)


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printed, "find_spec", lambda name: None)
    assert "pip install '.[examples]'" in refused(stack(2).figure, ModuleNotFoundError)


def test_a_trace_has_streams_as_threads_and_memory_as_a_counter(tmp_path: Path) -> None:
    plan = stack(6)
    times = taking(plan)
    plan.trace(tmp_path / "step.json", times)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    by_kind = {kind: [event for event in events if event["ph"] == kind] for kind in "MXC"}
    assert len(events) == sum(map(len, by_kind.values()))
    named = {e["tid"]: e["args"]["name"] for e in by_kind["M"] if e["name"] == "thread_name"}
    assert named == {0: "compute", 1: "gathers", 2: "reductions"}
    assert [event["ts"] for event in by_kind["X"]] == pytest.approx([t * 1e6 for t in times.begins])
    assert [sum(event["args"].values()) for event in by_kind["C"]] == [one.total for one in plan.held]
    assert {event["pid"] for event in events} == {plan.rank}
    ends: dict[int, float] = {}
    for event in by_kind["X"]:  # a thread's works do not overlap, or viewers would nest them
        assert event["ts"] >= ends.get(event["tid"], 0) - 1e-6
        ends[event["tid"]] = event["ts"] + event["dur"]
