"""A real browser, where the machine has one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")


@contextmanager
def chromium() -> Iterator[Any]:
    """Chromium, driven by Playwright; skips the test where one of them is not there."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    if not shutil.which(CHROMIUM):
        pytest.skip(f"no browser: {CHROMIUM} is not there")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
