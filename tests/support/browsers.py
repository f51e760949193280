"""A real browser, where the machine has one, and what axe finds on a page in it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")


@contextmanager
def chromium() -> Iterator[Any]:
    """Chromium, driven by Playwright; skips the test where one of them is not there.

    Where CHROMIUM or AXE says where something is, and nothing is there, the test fails.
    """
    sync_api = pytest.importorskip("playwright.sync_api")
    if not shutil.which(CHROMIUM):
        _missing("CHROMIUM", f"no browser: {CHROMIUM} is not there; set CHROMIUM to where it is")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def opened(place: Any, **options: Any) -> Any:
    """A new page of a browser (with its options) or of a context; it waits long, as the cores may be busy."""
    page = place.new_page(**options)
    page.set_default_timeout(120_000)
    return page


def axe() -> str:
    """The script of axe-core: of the file that AXE names, or of axe-playwright-python; skips the test without."""
    path = Path(os.environ.get("AXE", ""))
    package = importlib.util.find_spec("axe_playwright_python")
    if not path.is_file() and package is not None and package.origin is not None:
        path = Path(package.origin).with_name("axe.min.js")
    if not path.is_file():
        _missing("AXE", "no axe-core: pip install axe-playwright-python, or set AXE to where axe.min.js is")
    return path.read_text(encoding="utf-8")


def _missing(variable: str, why: str) -> None:
    """Skip the test, or fail it where the environment promised what it needs."""
    if variable in os.environ:
        pytest.fail(why)
    pytest.skip(why)


def barriers(page: Any) -> list[str]:
    """What axe finds on a page as serious or critical: the rule, where, and what of it."""
    page.evaluate(axe())
    found = page.evaluate("axe.run({ resultTypes: ['violations'] })")
    assert found["passes"] or found["inapplicable"], "nothing was checked"
    return [
        f"{rule['id']} ({rule['impact']}): {node['target']}: {node['failureSummary']}"
        for rule in found["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]
