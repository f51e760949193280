"""The pictures of the pages: small, each with its script, and each in light and in dark."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from PIL import Image

from support import browsers
from support.blocks import ROOT
from support.colours import contrast, linear

GUARANTEES = (
    "Each picture is drawn in light and in dark, with lines of 3:1; the site shows the one that fits "
    "the reader's screen.",
)

FOLDER = ROOT / "docs" / "pictures"
PICTURES = sorted(path for path in FOLDER.glob("*.*") if path.suffix in (".png", ".svg", ".webp"))
QUESTIONS = ("How much faster?", "What does it cost?", "How does it scale?", "When does it lose?")
LIGHT = [path for path in PICTURES if not path.stem.endswith("-dark")]
SCHEME = re.compile(r":root(?::target|:not\(:has\(:target\)\))\{([^}]*)\}")


def dark(path: Path) -> Path:
    return path.with_stem(f"{path.stem}-dark")


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What the scripts share."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield import_module("common")
    del sys.modules["common"]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_each_picture_is_small(picture: Path) -> None:
    largest = {".webp": 1_000_000, ".svg": 80_000, ".png": 150_000}
    assert picture.stat().st_size < largest[picture.suffix]


@pytest.mark.parametrize("picture", LIGHT, ids=lambda path: path.name)
def test_each_picture_is_there_in_light_and_in_dark(common: ModuleType, picture: Path) -> None:
    if picture.suffix == ".svg":
        text = picture.read_text(encoding="utf-8")
        assert not dark(picture).exists()
        assert ElementTree.fromstring(text).get("id") == "only-dark"
        names = dict(re.findall(r"var\((--c\d+),(#\w{6})\)", text))
        schemes = [dict(re.findall(r"(--c\d+):(#\w{6})", each)) for each in SCHEME.findall(text)]
        assert schemes == [{name: common.DARK[light] for name, light in names.items()}] * 2
        return
    light, twin = Image.open(picture), Image.open(dark(picture))
    assert light.size == twin.size
    assert light.convert("L").getpixel((1, 1)) > 200
    assert twin.convert("L").getpixel((1, 1)) < 60


def test_svg_is_light_or_dark_as_its_address_or_the_screen_says(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    svg = (FOLDER / "within.svg").as_uri()
    page.write_text("".join(f'<img src="{svg}{each}">' for each in ("#only-light", "#only-dark", "")))
    with browsers.chromium() as browser:
        for scheme, grounds in (("light", (255, 30, 255)), ("dark", (255, 30, 30))):
            shown = browsers.opened(browser, color_scheme=scheme)
            shown.goto(page.as_uri())
            for place, ground in enumerate(grounds):
                drawn = Image.open(io.BytesIO(shown.locator("img").nth(place).screenshot())).convert("RGB")
                assert drawn.getpixel((5, 5))[0] == ground, (scheme, place)


@pytest.mark.parametrize("question", QUESTIONS)
def test_table_that_a_chart_is_drawn_from_is_whole(common: ModuleType, question: str) -> None:
    head, rows = common.table(question)
    assert len(rows) > 3
    assert {len(row) for row in rows} == {len(head)}


def test_map_has_all_rooms_and_follows_the_imports() -> None:
    code = (
        "import architecture; print(*sorted({*architecture.ACROSS, *architecture.GROUND})); "
        "print(*(f'{a}>{b}' for a, b in architecture.imports()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    rooms, arrows = (line.split() for line in done.stdout.splitlines())
    package = ROOT / "src" / "paceline"
    there = {
        path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert set(rooms) == there - {"__init__", "__main__"}
    assert {"hosts>torch", "policies>balance", "balance>shares"} <= set(arrows)
    assert not {"torch>hosts", "balance>policies"} & set(arrows)


def test_a_cell_that_is_no_number_is_refused(common: ModuleType) -> None:
    assert common.value("1,000") == 1000
    assert common.value("–") != common.value("–")
    with pytest.raises(ValueError, match="much"):
        common.value("much")


def test_lines_are_seen_in_light_and_in_dark(common: ModuleType) -> None:
    white, black = "#ffffff", "#000000"
    for colour in (*common.COLOURS, black):
        assert contrast(linear(colour[1:]), linear(white[1:])) >= 3, colour
        assert contrast(linear(common.DARK[colour][1:]), linear(common.DARK[white][1:])) >= 3, colour
    assert contrast(linear(common.DARK[black][1:]), linear(common.DARK[white][1:])) >= 7


def test_the_dark_picture_is_the_light_one_in_other_colours(
    common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "FOLDER", tmp_path)
    made, axes = common.figure(width=4, height=2)
    axes.plot([0, 1, 2], [0, 2, 1], color=common.BLUE, label="a line", linewidth=4)
    axes.barh([1], [2], color=common.WAIT, edgecolor="white")
    axes.set_title("a title")
    axes.legend(frameon=False)
    common.save(made, "tried.py", ".png")
    drawn = {name: Image.open(tmp_path / f"tried{name}.png").convert("RGB") for name in ("", "-dark")}
    assert drawn[""].size == drawn["-dark"].size
    for name, wanted in (("", common.BLUE), ("-dark", common.DARK[common.BLUE])):
        colours = {each[1] for each in drawn[name].getcolors(100_000)}
        assert tuple(bytes.fromhex(wanted[1:])) in colours, name
    assert drawn["-dark"].getpixel((1, 1)) == tuple(bytes.fromhex(common.DARK["#ffffff"][1:]))


def test_a_colour_without_a_dark_one_is_refused(common: ModuleType, tmp_path: Path) -> None:
    made, axes = common.figure(width=2, height=2)
    axes.plot([0, 1], [0, 1], color="#123456")
    common.FOLDER = tmp_path
    for kind in (".svg", ".png"):
        with pytest.raises(KeyError, match="#123456"):
            common.save(made, "tried.py", kind)


def test_numbers_of_an_svg_are_cut_and_its_words_stay(common: ModuleType) -> None:
    made, axes = common.figure(width=2, height=2)
    axes.plot([0, 1 / 3], [0, 1 / 7], color=common.BLUE)
    axes.set_title("0.123456 s")
    drawn = io.StringIO()
    made.savefig(drawn, format="svg")
    text = common.in_both_schemes(drawn.getvalue())
    assert "0.123456 s</text>" in text
    assert not re.search(r' (?:d|x|y)="[^"]*\.\d{3}', text)
