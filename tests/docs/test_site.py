"""The site builds without a warning, needs nothing from elsewhere, and has every public symbol."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import zlib
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import TypeVar
from urllib.parse import urlparse

import griffe
import pytest

import paceline
from support.blocks import PAGES, ROOT, document, name

pytestmark = pytest.mark.xdist_group("site")

PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.png"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; links and anchors that lead nowhere end the build (unless it is --quiet: then nothing does)."""
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return place


class Loads(HTMLParser):
    """What a page makes the browser fetch by itself, and where its links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        if tag in ("script", "img", "iframe", "source") and "src" in given:
            self.fetched.append(given["src"])
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.append(given.get("href", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


def pages(site: Path) -> dict[str, Loads]:
    """Each page's own markup."""
    read = {}
    for path in site.rglob("*.html"):
        loads = Loads()
        loads.feed(path.read_text(encoding="utf-8"))
        read[path.relative_to(site).as_posix()] = loads
    return read


def test_the_site_needs_nothing_from_elsewhere(site: Path) -> None:
    for page, loads in pages(site).items():
        assert not [url for url in loads.fetched if urlparse(url).netloc], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_links_elsewhere_are_well_formed(site: Path) -> None:
    for page, loads in pages(site).items():
        for url in loads.links:
            parts = urlparse(url)
            if parts.scheme or parts.netloc:
                assert parts.scheme == "https", f"{page}: {url}"
                assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), f"{page}: {url}"


def test_each_page_of_the_docs_is_on_the_site(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page


# -- the reference ---------------------------------------------------------------------------------------


def _modules() -> list[ModuleType]:
    """Modules that list what is public, and those that a page's or an example's code imports from."""
    names = {module.name for module in pkgutil.walk_packages(paceline.__path__, "paceline.")} | {"paceline"}
    public = set()
    code = [block.parsed for page in PAGES for block in document(page)]
    code += [path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")]
    for text in code:
        public |= set(re.findall(r"^\s*(?:from|import) (paceline[\w.]*)", text, flags=re.MULTILINE))
        for home, imported in re.findall(r"^\s*from (paceline[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
            source = importlib.import_module(home)
            public |= {
                f"{home}.{part.strip()}"
                for part in imported.split(",")
                if inspect.ismodule(getattr(source, part.strip().split(" ")[0], None))
            }
    for module in names - {"paceline.__main__"}:
        source = inspect.getsource(importlib.import_module(module))
        if re.search(r"^__all__\b", source, flags=re.MULTILINE):
            public.add(module)
    return [importlib.import_module(module) for module in sorted(public)]


def _symbols(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return [str(each) for each in listed if not each.startswith("__")]
    return [
        each
        for each, value in vars(module).items()
        if not each.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
        and not isinstance(value, TypeVar)
    ]


def _home(module: ModuleType, symbol: str) -> str:
    """Where a symbol is defined; one named like its module is listed there."""
    value = getattr(module, symbol, None)
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


@pytest.fixture(scope="module")
def package() -> griffe.Object:
    return griffe.load("paceline", search_paths=[ROOT / "src"])


def test_every_public_symbol_is_in_the_reference(site: Path) -> None:
    header_end = 4
    inventory = (site / "objects.inv").read_bytes().split(b"\n", header_end)[header_end]
    known = {line.split(" ", 1)[0] for line in zlib.decompress(inventory).decode().splitlines()}
    missing = []
    for module in _modules():
        if not (site / "reference" / f"{module.__name__}.html").is_file():
            missing.append(module.__name__)
        missing += [
            f"{module.__name__}.{symbol}"
            for symbol in _symbols(module)
            if not {f"{module.__name__}.{symbol}", _home(module, symbol)} & known
        ]
    assert not missing, f"not in the reference (docs/mkdocs_hooks.py): {missing}"


def test_every_public_symbol_has_a_docstring(package: griffe.Object) -> None:
    without = []
    for module in _modules():
        if not module.__doc__:
            without.append(module.__name__)
        for symbol in _symbols(module):
            found = package[f"{module.__name__}.{symbol}".removeprefix("paceline.")]
            found = found.final_target if found.is_alias else found
            if not found.has_docstring:
                without.append(f"{module.__name__}.{symbol}")
            value = getattr(module, symbol)
            if inspect.isclass(value):
                without += [f"{module.__name__}.{symbol}.{method}" for method in _undocumented(value)]
    assert not without, "\n".join(without)


@cache
def _promised() -> set[str]:
    """Methods that a protocol documents for all who follow it: the package's, and what torch's checkpoints ask."""
    found = {"state_dict", "load_state_dict"}
    for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
        if module.name == "paceline.__main__":
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(value) and getattr(value, "_is_protocol", False):
                found |= {name for name, method in vars(value).items() if inspect.getdoc(method)}
    return found


def _undocumented(kind: type) -> list[str]:
    """Public methods of a class that neither they nor a protocol documents."""
    return [
        method
        for method, value in vars(kind).items()
        if not method.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
        and not inspect.getdoc(getattr(kind, method))
        and method not in _promised()
    ]


# -- pictures and commands -------------------------------------------------------------------------------


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_each_picture_is_small_and_has_its_script(picture: Path) -> None:
    assert picture.stat().st_size < 150_000
    script = picture.with_name(f"{picture.stem.split('-')[0]}.py")  # live-dark.png is one of live.py's
    command = f"python docs/pictures/{script.name}"
    assert command in script.read_text(encoding="utf-8"), f"{script.name} names its command"
    shown = [page for page in PAGES if f"pictures/{picture.name})" in page.read_text(encoding="utf-8")]
    assert shown, f"{picture.name} is on no page"


def test_each_question_has_a_picture() -> None:
    for page in ("training", "within", "forecasts", "backup", "gates", "coded", "simulate"):
        assert f"](pictures/{page}.png)" in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), page


def test_each_command_that_the_papers_page_quotes_exists() -> None:
    from paceline.papers import experiments

    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    quoted = re.findall(r"paceline reproduce (\w+)(?: (\w+))?", text)
    assert len(quoted) > 5
    for paper, experiment in quoted:
        assert not experiment or experiment == "NAME" or experiment in experiments(paper), (paper, experiment)
        assert experiments(paper)


def test_each_benchmark_that_is_quoted_exists() -> None:
    for page in PAGES:
        for quoted in re.findall(r"benchmarks/\w+\.py", page.read_text(encoding="utf-8")):
            assert (ROOT / quoted).is_file(), f"{name(page)}: {quoted}"
