"""The report: one file that asks for nothing, shows what the record says, and stays small."""

import base64
import hashlib
import json
import re
import struct
import zlib
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from paceline.errors import PacelineError
from paceline.runs import Recorder, Run, comparison, draw, read, report, svg
from paceline.runs.axes import thin, ticks, time_ticks, top

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
def run(tmp_path, write):
    loads = np.tile([24, 24, 24, 6], (60, 1))
    loads[0] = 19, 19, 20, 20
    return read(write(tmp_path / "run", loads, np.tile(SLOW, (60, 1)), finish={"test_accuracy": 0.9}))


def big(rounds, workers, tmp_path):
    random = np.random.default_rng(0)
    compute = 0.1 + random.random((rounds, workers)) / 50
    wall = compute.max(axis=1)
    blank = np.full((rounds, workers), np.nan)
    return Run(
        path=tmp_path, config={"policy": "level"}, round=np.arange(rounds), epoch=np.zeros(rounds, int),
        time=np.cumsum(wall), seconds=wall, batch=np.full(rounds, 10.0 * workers), loss=random.random(rounds),
        loads=np.full((rounds, workers), 10.0), compute=compute, overhead=np.zeros((rounds, workers)),
        wait=wall[:, None] - compute, shares=blank, extras={}, summary={}, notes=[],
    )  # fmt: skip


def test_the_page_stands_alone_and_is_well_formed(run):
    text = report.write(run).read_text()
    page = Page(text)
    addresses = [value for _, name, value in page.attributes if name in ("src", "href", "action", "data")]
    assert [address for address in addresses if not address.startswith("data:image/png;base64,")] == []
    assert not re.search(r"https?://|@import|url\(", text)
    for picture in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(picture)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


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


def test_the_page_says_what_the_record_says(run):
    page = Page(report.render(run))
    assert "level on 4 workers: 96 % of their combined speed" in page.text
    for words in (
        "Worker 3 is 4.0x slower",
        "The loads settled after 1 round at 24, 24, 24 and 6 samples.",
        "90.0 %",
    ):
        assert words in page.text
    titles = "Time per round,Load per worker,Compute and wait,Loss against time,Who was the straggler"
    titles += ",Where the time went,Speed of each worker,Summary,Configuration"
    for title in titles.split(","):
        assert title in page.text
    line, loads, pace, *strips, loss = page.data
    assert line["series"][0]["text"] == ["80 ms"] + ["24 ms"] * 59
    assert line["series"][1]["text"] == ["24 ms"] * 60
    assert loads["names"] == ["worker 0", "worker 1", "worker 2", "worker 3"]
    assert loads["text"][0] == ["19", "19", "20", "20"]
    assert loads["at"][59] == "Round 59"
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
        4.0,
        [0],
        str,
    )
    boxes = dict(re.findall(r'<path class="box (\w+)" d="M([^"]*)"', drawn))
    assert boxes["c0"] == "250.0 70.0h250.0v360.0h-250.0z"
    assert boxes["over"] == "250.0 70.0h125.0v360.0h-125.0z"
    assert boxes["idle"] == "500.0 70.0h250.0v360.0h-250.0z"
    assert boxes["bad"] == "250.0 570.0h500.0v360.0h-500.0z"


def test_names_cannot_break_the_page(tmp_path, write):
    evil = "</script><script>alert(\"x\")</script><b onclick='y'>&"
    folder = write(tmp_path / "run", np.full((5, 2), 4), np.ones((5, 2)), policy=evil, model=evil, data=evil)
    again = write(tmp_path / "again", np.full((5, 2), 4), np.ones((5, 2)), policy=evil)
    for text in (report.render(read(folder)), comparison.render([read(folder), read(again)])):
        page = Page(text)
        assert "alert" in page.text
        assert not [name for _, name, _ in page.attributes if name.startswith("on")]
        assert text.count("<script>") == 1


def test_a_long_run_of_many_workers_makes_a_small_page(tmp_path):
    text = report.render(big(10_000, 64, tmp_path))
    assert len(text.encode()) < 1_500_000
    assert len(report.render(big(200, 1000, tmp_path)).encode()) < 2_000_000
    assert "64 of the 1,000 workers" in report.render(big(30, 1000, tmp_path))


def test_few_rounds_one_worker_absences_and_no_loss(tmp_path, write):
    pace = np.ones((25, 3))
    pace[3:9, 1] = np.nan
    for name, loads, seconds in (
        ("one", np.full((1, 1), 4), np.ones((1, 1))),
        ("two", np.full((2, 9), 4), np.ones((2, 9))),
        ("absent", np.full((25, 3), 4), pace),
    ):
        run = read(write(tmp_path / name, loads, seconds, losses=False))
        page = Page(report.render(run))
        assert "Loss against time" not in page.text
        assert "nan" not in page.text
    Recorder.create(tmp_path / "none", {"policy": "level"}).close()
    with pytest.raises(PacelineError, match="holds no round yet"):
        report.render(read(tmp_path / "none"))


def test_several_runs_side_by_side(tmp_path, write, run):
    equal = read(
        write(tmp_path / "equal", np.full((30, 4), 16), np.tile(SLOW, (30, 1)), policy="equal", losses=False)
    )
    page = Page(report.write_comparison([equal, run], tmp_path / "compare.html").read_text())
    assert "Worker 3 is 4.0x slower; an equal split wasted 56 % of the cluster's time;" in page.text
    for words in (
        "Samples per second",
        "The last 10 rounds of each",
        "equal: 640 ms",
        "level: 240 ms",
        "30.8 %",
    ):
        assert words in page.text
    assert comparison.labels([run, equal, run]) == ["level (run)", "equal", "level (run)"]


def test_thin_keeps_means_and_extremes():
    random = np.random.default_rng(0)
    values = random.random((1003, 2))
    values[:5, 0] = np.nan
    thinned = thin(values, 100)
    assert len(thinned.mean) == 84
    assert set(np.diff(thinned.edges[:-1])) == {12}
    assert (thinned.edges[0], thinned.edges[-1]) == (0, 1003)
    for i in (0, 1, 57, 83):
        part = values[thinned.edges[i] : thinned.edges[i + 1]]
        assert thinned.mean[i] == pytest.approx(np.nanmean(part, axis=0))
        assert np.array_equal(thinned.low[i], np.nanmin(part, axis=0))
        assert np.array_equal(thinned.high[i], np.nanmax(part, axis=0))
    assert np.array_equal(thin(values[:7]).mean, values[:7], equal_nan=True)
    assert np.isnan(thin(np.full(3, np.nan)).low).all()


def test_scales():
    assert ticks(256) == [0, 100, 200]
    assert ticks(0.0043) == pytest.approx([0, 0.002, 0.004])
    assert ticks(3, 5, whole=True) == [0, 1, 2, 3]
    assert ticks(0) == [0]
    assert time_ticks(1826) == [0, 600, 1200, 1800]
    assert time_ticks(2e6, 5) == [i * 432000 for i in range(5)]
    flat = np.full(200, 2.0)
    assert top(flat) == pytest.approx(2.1)
    flat[3] = 100
    assert top(flat) == pytest.approx(2.8)


def test_the_png_is_what_was_drawn():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 3)).astype(np.uint8)
    content = svg.png(pixels)
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    place, chunks = 8, {}
    while place < len(content):
        length, kind = struct.unpack(">I4s", content[place : place + 8])
        body = content[place + 8 : place + 8 + length]
        assert struct.unpack(">I", content[place + 8 + length :][:4])[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        place += 12 + length
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (5, 3)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(3, 16)
    assert (rows[:, 0] == 0).all()
    assert np.array_equal(rows[:, 1:].reshape(3, 5, 3), pixels)
