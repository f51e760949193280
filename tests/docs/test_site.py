"""The site builds without a warning, needs nothing from elsewhere, and has every public symbol."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlparse

import pytest

import paceline
from support import browsers, forks
from support.blocks import ROOT
from support.guarantees import guarantee

pytestmark = pytest.mark.xdist_group("site")

FACE = (
    *("torch", "ray", "simulate", "doctor", "client"),
    *(f"hosts.{host}" for host in ("accelerate", "fabric", "lightning", "ray_train", "transformers")),
    *("balance", "backup", "sync", "coded", "forecast"),
)

MKDOCS = (
    "import gc; gc.disable(); from mkdocs.__main__ import cli; cli()"  # a fifth of its time is for garbage
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; links and anchors that lead nowhere end the build (unless it is --quiet: then nothing does)."""
    place = tmp_path_factory.mktemp("site")
    with forks.warm():  # the hooks load the package's commands, and those PyTorch
        done = subprocess.run(
            [sys.executable, "-c", MKDOCS, "build", "--strict", "--site-dir", str(place)],
            cwd=ROOT, capture_output=True, text=True, timeout=500, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return place


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsers.chromium() as browser:
        yield browser


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


@guarantee("The search of the site works from disk, without a server or network.")
@pytest.mark.parametrize(
    ("typed", "found"),
    [
        pytest.param("backup workers", "Backup workers", marks=pytest.mark.nightly),
        ("eq. (17)", "The five papers, line by line\nDBW"),
    ],
)
def test_the_search_works_on_pages_opened_from_disk(site: Path, browser: Any, typed: str, found: str) -> None:
    page = browsers.opened(browser)
    page.goto((site / "index.html").as_uri())
    # The theme reads what was typed when a key is released, and not when the text is put there at once.
    page.locator("input.md-search__input").press_sequentially(typed)
    first = page.locator(".md-search-result__item").first
    first.wait_for(state="visible")
    assert found in first.inner_text()


@guarantee(
    "axe finds nothing serious on the first page of the docs, the report, a comparison, the live page and "
    "the service's page."
)
def test_axe_finds_nothing_serious_on_the_first_page(site: Path, browser: Any) -> None:
    for scheme, width in (("light", 1400), ("dark", 400)):
        page = browsers.opened(browser, viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.goto((site / "index.html").as_uri())
        assert browsers.barriers(page) == []


@guarantee(
    "Each picture is drawn in light and in dark, with lines of 3:1; the site shows the one that fits "
    "the reader's screen."
)
def test_each_picture_is_shown_in_light_and_in_dark(site: Path, browser: Any) -> None:
    within = (site / "within.html").read_text(encoding="utf-8")
    assert within.count('src="pictures/within.svg#only-light"') == 1
    assert within.count('src="pictures/within.svg#only-dark"') == 1
    for scheme, width in (("light", 1400), ("dark", 400)):
        page = browsers.opened(browser, viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.goto((site / "within.html").as_uri())
        seen = [each for each in page.locator("article img").all() if each.is_visible()]
        assert len(seen) == within.count("#only-light")
        for each in seen:
            assert each.get_attribute("src").endswith(f"#only-{scheme}")
            assert each.evaluate("image => image.complete && image.naturalWidth > 0")


def test_the_reference_begins_with_what_users_call(site: Path) -> None:
    page = (site / "reference" / "paceline.torch.html").read_text(encoding="utf-8")
    anchors = re.findall(r'id="paceline\.torch\.([\w.]+)"', page)
    assert [each for each in anchors if "." not in each][:3] == ["ElasticLocalSGD", "ElasticPace", "LocalSGD"]
    assert {"Pace.loader", "Pace.backward", "Pace.round", "Pace.step"} <= set(anchors)
    assert not {"Pace.stepped", "Pace.backward_done", "Pace.in_round", "Pace.failed"} & set(anchors), (
        "for hosts"
    )


def test_links_elsewhere_are_well_formed(site: Path) -> None:
    for page, loads in pages(site).items():
        for url in loads.links:
            parts = urlparse(url)
            if parts.scheme or parts.netloc:
                assert parts.scheme == "https", f"{page}: {url}"
                assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), f"{page}: {url}"


# -- the reference ---------------------------------------------------------------------------------------


def _modules() -> list[ModuleType]:
    """Modules that say what is public."""
    names = {module.name for module in pkgutil.walk_packages(paceline.__path__, "paceline.")} | {"paceline"}
    modules = [importlib.import_module(name) for name in sorted(names - {"paceline.__main__"})]
    return [module for module in modules if hasattr(module, "__all__")]


def _symbols(module: ModuleType) -> list[str]:
    return [str(each) for each in module.__all__ if not each.startswith("__")]


def _home(module: ModuleType, symbol: str) -> str:
    """Where a symbol is defined; one named like its module is listed there."""
    value = getattr(module, symbol, None)
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


def test_public_packages_have_all() -> None:
    assert {"paceline", *(f"paceline.{part}" for part in FACE)} <= {module.__name__ for module in _modules()}


def test_every_public_symbol_is_in_the_reference_and_no_other_module_is(site: Path) -> None:
    pages = {path.stem for path in (site / "reference").glob("paceline*.html")}
    assert pages == {module.__name__ for module in _modules()}
    header_end = 4
    inventory = (site / "objects.inv").read_bytes().split(b"\n", header_end)[header_end]
    known = {line.split(" ", 1)[0] for line in zlib.decompress(inventory).decode().splitlines()}
    missing = []
    for module in _modules():
        missing += [
            f"{module.__name__}.{symbol}"
            for symbol in _symbols(module)
            if not {f"{module.__name__}.{symbol}", _home(module, symbol)} & known
        ]
    assert not missing, f"not in the reference (docs/mkdocs_hooks.py): {missing}"


# -- commands --------------------------------------------------------------------------------------------


def test_each_command_that_the_papers_page_quotes_exists() -> None:
    from paceline.papers import experiments

    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    quoted = re.findall(r"paceline reproduce (\w+)(?: (\w+))?", text)
    assert len(quoted) > 5
    for paper, experiment in quoted:
        assert not experiment or experiment == "NAME" or experiment in experiments(paper), (paper, experiment)
        assert experiments(paper)
