"""The service's first page: what its table says of each job, and that everybody can read it."""

from __future__ import annotations

import asyncio
import re
from html import unescape

import pytest

pytest.importorskip("fastapi")

from support import browsers
from support.calling import playing
from support.guarantees import guarantee
from support.served import TOKEN


def rows(text):
    """The cells' words, by the job's name."""
    found = {}
    for row in re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)[1:]:
        cells = [
            unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)
        ]
        found[cells[0]] = cells[1:]
    return found


@pytest.fixture
def told(tmp_path):
    """The page before the first round, after five rounds, and after a silence; another job is set aside."""
    texts = []

    async def looked():
        async with playing(tmp_path / "state") as call:
            await call.create("empty", "")
            texts.append(await call.page(f"/?token={TOKEN}"))
            await call.rounds(*range(5), after=2.0)
            texts.append(await call.page(f"/?token={TOKEN}"))
            call.clock.now += 100.0
            call.service.catalog.set_aside("empty", "0", "call 7 of its log failed")
            texts.append(await call.page(f"/?token={TOKEN}"))

    asyncio.run(looked())  # Playwright has an event loop of its own
    return texts


def test_each_job_has_a_row(told):
    before, after, silent = map(rows, told)
    assert before["empty"][:5] == ["waiting no worker is present", "0 of 2", "0", "–", "–"]
    assert before["j"][1:] == ["2 of 2", "0", "–", "–"]
    assert before["j"][0].startswith("waiting")
    state, workers, count, rate, newest = after["j"]
    assert (state.strip(), workers, count) == ("running", "2 of 2", "5")
    assert rate == "6", "12 samples in 2 seconds"
    assert newest == "2 s"
    assert silent["j"][0].startswith("silent no round for 100 s")
    assert "set aside" in silent["empty"][0]
    assert "call 7 of its log failed" in silent["empty"][0]


def test_no_link_carries_the_token_and_nothing_is_loaded(told):
    assert 'href="jobs/j/"' in told[1]
    assert TOKEN not in told[1]
    assert not re.search(r"https?://|@import|url\((?!#)|\bsrc=", told[1])


@guarantee(
    "axe finds nothing serious on the first page of the docs, the report, a comparison, the live page and "
    "the service's page."
)
def test_axe_finds_nothing_serious(told, tmp_path):
    with browsers.chromium() as browser:
        for scheme, width in (("light", 1400), ("dark", 400)):
            page = browsers.opened(browser, viewport={"width": width, "height": 900}, color_scheme=scheme)
            for number in (1, 2):
                (tmp_path / "page.html").write_text(told[number])
                page.goto((tmp_path / "page.html").as_uri())
                assert browsers.barriers(page) == []
                assert page.evaluate("document.documentElement.scrollWidth") == width
                for cell in page.locator(".jobs tbody td").all():
                    box = cell.bounding_box()
                    assert box["x"] >= 0, "nothing is out of sight"
                    assert box["x"] + box["width"] <= width
            page.close()
