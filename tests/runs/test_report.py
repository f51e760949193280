"""The report: one file that asks for nothing, shows what the record says, and stays small."""

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from paceline.errors import PacelineError
from paceline.runs import Recorder, Run, draw, findings, read, report
from paceline.runs.columns import edges, short, thin
from paceline.runs.draw import percent_axis, ticks, time_axis, time_ticks, top
from paceline.runs.words import number
from support.guarantees import guarantee
from support.records import line

SLOW = np.array([0.001, 0.001, 0.001, 0.004])
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that elements close in order; gathers scripts' data, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.words, self.data = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script" and data.startswith("{"):
            self.data.append(json.loads(data, parse_constant=pytest.fail))
        else:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


@pytest.fixture
def run(ran):
    loads = np.tile([24, 24, 24, 6], (60, 1))
    loads[0] = 19, 19, 20, 20
    return ran("run", loads, SLOW, finish={"test_accuracy": 0.9})


def figures(text):
    return re.findall(r"<figure.*?</figure>", text, re.DOTALL)


def big(rounds, workers, tmp_path):
    random = np.random.default_rng(0)
    compute = 0.1 + random.random((rounds, workers)) / 50
    wall = compute.max(axis=1)
    return Run(
        path=tmp_path, config={"policy": "level"}, round=np.arange(rounds), epoch=np.zeros(rounds, int),
        time=np.cumsum(wall), seconds=wall, batch=np.full(rounds, 10.0 * workers), loss=random.random(rounds),
        loads=np.full((rounds, workers), 10.0), compute=compute, overhead=np.zeros((rounds, workers)),
        wait=wall[:, None] - compute, extras={}, summary={}, notes=[],
    )  # fmt: skip


def test_page_is_self_contained_and_well_formed(run):
    text = report.write(run).read_text()
    page = Page(text)
    addresses = [value for _, name, value in page.attributes if name in ("src", "href", "action", "data")]
    assert [address for address in addresses if not address.startswith("data:image/svg+xml;base64,")] == []
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    for picture in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(picture)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


@guarantee(
    "Names that are markup or very long are shown and run nothing; browsers run no foreign script in "
    "`report.html`."
)
def test_nothing_but_the_pages_own_script_may_run(run):
    text = report.render(run)
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    for kind in ("default-src", "connect-src", "base-uri", "form-action"):
        assert f"{kind} 'none'" in policy
    assert text.index("Content-Security-Policy") < text.index("<script")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == policy.count("sha256-") == 1
    digest = hashlib.sha256(scripts[0].encode()).digest()
    assert f"script-src 'sha256-{base64.b64encode(digest).decode()}'" in policy
    assert not re.search(r"<[^>]*\son[a-z]+=", text), "handlers in the markup would not run"


def test_page_has_the_figures_of_the_record(run):
    page = Page(report.render(run))
    assert "level on 4 workers: 96 % of their combined speed" in page.text
    for words in (
        "Worker 3 is 4.0x slower",
        "The loads settled after 1 round at 24, 24, 24 and 6 samples.",
        "90.0 %",
    ):
        assert words in page.text
    titles = "Time per round,Load per worker,Compute and wait,Loss against time,Who was the straggler"
    titles += ",Where the time went,Speed of each worker"
    for title in titles.split(","):
        assert title in page.text
    line, loads, pace, *strips, loss = page.data
    assert line["series"][0]["text"] == ["80 ms"] + ["24 ms"] * 59
    assert line["series"][1]["text"] == ["24 ms"] * 60
    assert [each["name"] for each in loads["series"]] == ["worker 0", "worker 1", "worker 2", "worker 3"]
    assert [each["text"][0] for each in loads["series"]] == ["19", "19", "20", "20"]
    assert loads["series"][0]["at"][59] == "Round 59"
    assert loss["series"][0]["text"][0] == "2"
    assert [strip["at"][0] for strip in strips] == ["Round 0 · 80 ms", "Round 25 · 24 ms", "Round 50 · 24 ms"]
    assert strips[0]["text"][0] == [
        "19 samples, computed 19 ms, waited 61 ms", "19 samples, computed 19 ms, waited 61 ms",
        "20 samples, computed 20 ms, waited 60 ms",
        "20 samples, computed 80 ms, waited 0 s (the straggler)"]  # fmt: skip
    assert pace["series"][3]["text"] == ["4 ms"] * 60


def test_bars_of_the_timeline_lie_where_the_seconds_are(run):
    drawn = draw.gantt(
        ["a", "b"],
        [draw.Bars("r", 1.0, 2.0, *np.array([[1, 2], [0.5, 0], [1, 0]]), 1, ["", ""])],
        time_axis("time", 4.0),
    )
    boxes = dict(re.findall(r'<path class="box (\w+)" d="M([^"]*)"', drawn))
    assert boxes["busy"] == "250.0 70.0h250.0v360.0h-250.0z"
    assert boxes["over"] == "250.0 70.0h125.0v360.0h-125.0z"
    assert boxes["idle"] == "500.0 70.0h250.0v360.0h-250.0z"
    assert boxes["bad"] == "250.0 570.0h500.0v360.0h-500.0z"


def test_names_cannot_break_the_page(ran):
    evil = "</script><script>alert(\"x\")</script><b onclick='y'>&"
    runs = [ran("run", [4] * 2, 1.0, rounds=5, policy=evil, model=evil, data=evil)]
    runs.append(ran("again", [4] * 2, 1.0, rounds=5, policy=evil))
    for text in (report.render(runs[0]), report.render_comparison(runs)):
        page = Page(text)
        assert "alert" in page.text
        assert not [name for _, name, _ in page.attributes if name.startswith("on")]
        assert text.count("<script>") == 1


def test_a_long_run_of_many_workers_makes_a_small_page(tmp_path):
    text = report.render(big(10_000, 64, tmp_path))
    assert len(text.encode()) < 1_500_000
    assert len(report.render(big(200, 1000, tmp_path)).encode()) < 2_000_000
    assert "64 of the 1,000 workers" in report.render(big(30, 1000, tmp_path))


def test_few_rounds_one_worker_absences_and_no_loss(ran, tmp_path):
    pace = np.ones((25, 3))
    pace[3:9, 1] = np.nan
    for rounds, loads, seconds in ((1, [4], 1.0), (2, [4] * 9, 1.0), (25, 4, pace)):
        page = Page(report.render(ran(f"run-{rounds}", loads, seconds, rounds=rounds, losses=False)))
        assert "Loss against time" not in page.text
        assert "nan" not in page.text
    Recorder.create(tmp_path / "none", {"policy": "level"}).close()
    with pytest.raises(PacelineError, match="holds no round yet"):
        report.render(read(tmp_path / "none"))


def test_several_runs_side_by_side(tmp_path, ran, run):
    equal = ran("equal", 16, SLOW, rounds=30, policy="equal", losses=False)
    page = Page(report.write_comparison([equal, run], tmp_path / "compare.html").read_text())
    assert "Worker 3 is 4.0x slower; an equal split wasted 56 % of the cluster's time;" in page.text
    titles = ("Samples per second", "The last 10 rounds of each")
    for words in (*titles, "equal: 640 ms", "level: 240 ms", "30.8 %"):
        assert words in page.text
    assert findings.labels([run, equal, run]) == ["level (run)", "equal", "level (run)"]


def test_every_axis_has_a_title_with_its_unit(run):
    titles = re.findall(r'<div class="title(?: across)?">(.*?)</div>', report.render(run))
    expected = ["time of a round (ms)", "round", "load (samples)", "round", "time for a sample (ms)", "round"]
    assert titles == [*expected, *["time (ms)"] * 3, "training loss", "time since the start (s)"]


@pytest.mark.parametrize(("first", "last"), [(-9.0, -40.0), (8.0, -16.0), (5.0, 0.5), (0.0, 0.0)])
def test_losses_of_any_sign_lie_where_the_axis_says(run, first, last):
    values = np.linspace(first, last, 60)
    text = report.render(dataclasses.replace(run, loss=values))
    chart = next(each for each in figures(text) if "<h3>Loss against time" in each)
    marks = re.findall(r'<span style="top:(.*?)%">(.*?)</span>', chart)
    at, levels = np.array(marks, float).T
    slope, start = np.polyfit(levels, 10 * at, 1)
    drawn = Page(chart).data[0]["series"][0]["y"]
    assert drawn == pytest.approx(start + slope * values, abs=1)
    assert 0 <= min(drawn) <= max(drawn) <= 1000
    assert slope < 0, "larger values are higher"
    assert 0 in levels


@guarantee(
    "Runs that differ in more than the policy are described one by one; curves leave out rounds of fewer "
    "samples and say how many."
)
def test_rounds_of_fewer_samples_make_no_fence(ran):
    """The last round of each epoch of six has half of the samples: curves leave it out, loads are parts of it."""
    loads = np.tile([24, 24, 24, 6], (60, 1))
    loads[5::6] = 12, 12, 12, 3
    page = Page(report.render(ran("run", loads, SLOW)))
    line, parts, *_ = page.data
    assert line["series"][0]["text"] == ["24 ms"] * 50
    assert "Round 5" not in line["series"][0]["at"]
    assert "10 rounds with fewer samples are left out" in page.text
    for place in (4, 5):
        assert [each["text"][place] for each in parts["series"]] == [*["30.8 %"] * 3, "7.7 %"]
    assert "part of the batch (%)" in page.text


def test_rounds_of_any_size_are_not_left_out():
    assert not short(np.array([3.0, 5, 7, 9, 11, 13, 15, 17])).any()
    assert not short(np.full(9, 256.0)).any()
    assert short(np.array([256.0, 220, 256, 220])).tolist() == [False, True, False, True]
    assert short(np.tile([256.0, 256, 100], 5)).sum() == 5
    assert not short(np.array([9.0, 1, 1, 1, 1])).any()


def test_a_table_is_behind_each_picture(ran, run):
    other = ran("equal", 16, SLOW, rounds=30, policy="equal")
    for text in (report.render(run), report.render_comparison([other, run])):
        assert len(figures(text)) >= 7
        assert [figure for figure in figures(text) if "<tbody>" not in figure] == []
    times = next(each for each in figures(text) if "<h3>Time per round" in each)
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>.*?</tr>", times)]
    assert rows[1] == ["Round 0", "64 ms", "80 ms"]
    assert rows[-1] == ["Round 59", "–", "24 ms"], "the shorter run has ended"
    losses = next(each for each in figures(text) if "<h3>Loss against time" in each)
    heads = ["time since the start (s)", "equal", "level"]
    assert re.findall(r"<th scope=\"col\">(.*?)</th>", losses) == heads
    last = re.findall(r"<td>(.*?)</td>", losses)[-3:]
    assert last == ["after 1.92 s", number(2 / 30), "–"]
    beside = next(each for each in figures(text) if "The last 10 rounds of each" in each)
    assert "overhead" not in beside
    row = ["equal", "20", "64 ms", "worker 3", "112 ms", "144 ms"]
    assert re.findall(r"<td>(.*?)</td>", beside)[:6] == row


def test_overhead_has_its_colours_name_in_a_comparison_too(tmp_path, run):
    with Recorder.create(tmp_path / "more", {"policy": "equal", "workers": 4}) as recorder:
        for t in range(12):
            spent = {"compute": [0.08] * 4, "overhead": [0.01] * 4}
            line(recorder, t, seconds=0.1, loads=[16] * 4, shares=[0.25] * 4, **spent)
    text = report.render_comparison([run, read(tmp_path / "more")])
    beside = next(each for each in figures(text) if "rounds of each" in each)
    assert '<i class="over"></i>overhead' in beside


def test_waiting_is_hatched_alike_everywhere_and_nothing_else_is(ran, run):
    other = ran("equal", 16, SLOW, rounds=30, policy="equal")
    text = report.render_comparison([other, run])
    body = text[text.index("<body>") : text.index("<footer>")]
    assert body.count('<pattern id="waiting"') == 1
    assert "plain" not in body
    for boxes in re.findall(r'<path class="box idle".*?</svg>', body):
        name = re.search(r'clip-path="url\(#(boxes-\w+)\)"', boxes)[1]
        assert f'<clipPath id="{name}"' in body
    assert re.findall(r'<i class="idle"></i>(\w+)', body) == ["waiting"] * body.count('<i class="idle"></i>')
    rates = next(each for each in figures(body) if "<h3>Samples per" in each)
    assert "idle" not in rates


def test_thin_keeps_means_and_extremes():
    values = np.random.default_rng(0).random(1003)
    values[:5] = np.nan
    at = edges(0, 1003, 100)
    thinned = thin(values, at)
    assert len(thinned.mean) == 84
    assert set(np.diff(at[:-1])) == {12}
    assert (at[0], at[-1]) == (0, 1003)
    for i in (0, 1, 57, 83):
        part = values[at[i] : at[i + 1]]
        assert thinned.mean[i] == pytest.approx(np.nanmean(part))
        assert thinned.low[i] == np.nanmin(part)
        assert thinned.high[i] == np.nanmax(part)
    assert np.array_equal(thin(values[:7], edges(0, 7, 300)).mean, values[:7], equal_nan=True)
    assert np.isnan(thin(np.full(3, np.nan), edges(0, 3, 1)).low).all()


def test_scales():
    assert ticks(256) == [0, 100, 200]
    assert ticks(0.0043) == pytest.approx([0, 0.002, 0.004])
    assert ticks(3, 5, whole=True) == [0, 1, 2, 3]
    assert ticks(0) == [0]
    assert time_axis("time", 0.26)[0] == "time (ms)"
    assert [text for _, text in time_axis("time", 0.26).ticks] == ["0", "100", "200"]
    axis = time_axis("time", 1826.0)
    assert axis.title == "time (min)"
    assert axis.ticks == [(0, "0"), (600, "10"), (1200, "20"), (1800, "30")]
    assert time_axis("time", 40_000.0).ticks[-1] == (28800, "8")
    assert percent_axis("part", 1.0).ticks[-1] == (1.0, "100")
    assert time_ticks(1826) == [0, 600, 1200, 1800]
    assert time_ticks(2e6, 5) == [i * 432000 for i in range(5)]
    flat = np.full(200, 2.0)
    assert top(flat) == pytest.approx(2.1)
    flat[3] = 100
    assert top(flat) == pytest.approx(2.8)
