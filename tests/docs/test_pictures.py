"""The pictures of the pages: small, each with its script, and each in light and in dark."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from support.blocks import PAGES, ROOT
from support.colours import contrast, linear

GUARANTEES = (
    "Each picture has a dark twin by the same script, and its lines have 3:1 against their ground.",
)

FOLDER = ROOT / "docs" / "pictures"
PICTURES = sorted(path for path in FOLDER.glob("*.*") if path.suffix in (".png", ".webp"))
LIGHT = [path for path in PICTURES if not path.stem.endswith("-dark")]


def dark(path: Path) -> Path:
    return path.with_stem(f"{path.stem}-dark")


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What the scripts share."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield import_module("common")
    del sys.modules["common"]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_each_picture_is_small_and_has_its_script(picture: Path) -> None:
    assert picture.stat().st_size < (150_000 if picture.suffix == ".png" else 1_000_000)
    script = FOLDER / f"{picture.stem.removesuffix('-dark')}.py"
    command = f"python docs/pictures/{script.name}"
    assert command in script.read_text(encoding="utf-8"), f"{script.name} names its command"


@pytest.mark.parametrize("picture", LIGHT, ids=lambda path: path.name)
def test_each_picture_is_shown_and_has_a_dark_twin(picture: Path) -> None:
    shown = rf"""[("]([\w/]+/)?pictures/{re.escape(picture.name)}[)"]"""
    assert any(re.search(shown, page.read_text(encoding="utf-8")) for page in PAGES), "it is on no page"
    light, twin = Image.open(picture), Image.open(dark(picture))
    assert light.size == twin.size
    assert light.convert("L").getpixel((1, 1)) > 200
    assert twin.convert("L").getpixel((1, 1)) < 60


def test_the_readme_shows_each_picture_in_both() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"docs/pictures/([\w-]+\.(?:png|webp))", readme)
    assert len(shown) >= 4
    for name in shown:
        if "-dark" not in name:
            assert f'media="(prefers-color-scheme: dark)" srcset="docs/pictures/{dark(Path(name))}"' in readme


def test_each_question_has_a_picture() -> None:
    for page in ("training", "within", "forecasts", "backup", "gates", "coded", "simulate"):
        assert f"](pictures/{page}.png)" in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), page


QUESTIONS = {"faster": "How much faster?", "costs": "What does it cost?"}
QUESTIONS |= {"scales": "How does it scale?", "loses": "When does it lose?"}


@pytest.mark.parametrize("picture", QUESTIONS)
def test_each_question_of_the_figures_has_a_chart_one_table_and_commands(
    common: ModuleType, picture: str
) -> None:
    page = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {QUESTIONS[picture]}\n")[1].split("\n## ")[0]
    assert f"](pictures/{picture}.png)" in section
    assert section.count("\n|---|") == 1
    assert section.count("```bash\n") == 1
    head, rows = common.table(QUESTIONS[picture])
    assert len(rows) > 3
    assert {len(row) for row in rows} == {len(head)}
    assert QUESTIONS[picture] in (FOLDER / f"{picture}.py").read_text(encoding="utf-8")


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
    common.save(made, "tried.py")
    drawn = {name: Image.open(tmp_path / f"tried{name}.png").convert("RGB") for name in ("", "-dark")}
    assert drawn[""].size == drawn["-dark"].size
    for name, wanted in (("", common.BLUE), ("-dark", common.DARK[common.BLUE])):
        colours = {each[1] for each in drawn[name].getcolors(100_000)}
        assert tuple(bytes.fromhex(wanted[1:])) in colours, name
    assert drawn["-dark"].getpixel((1, 1)) == tuple(bytes.fromhex(common.DARK["#ffffff"][1:]))


def test_a_colour_without_a_dark_one_is_refused(common: ModuleType) -> None:
    made, axes = common.figure(width=2, height=2)
    axes.plot([0, 1], [0, 1], color="#123456")
    with pytest.raises(KeyError, match="#123456"):
        common.darken(made)
