"""The service's pages in a real browser: the token is asked for once, and the pages follow the jobs by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from support import browsers, served
from support.served import TOKEN

WIDTHS = (400, 1280)


def a_round(service: served.Process, number: int, secrets: dict[str, str]) -> None:
    for name, secret in secrets.items():
        path = f"/v1/jobs/default/workers/{name}"
        part = service.ask("GET", f"{path}/next", secret=secret)
        assert part.status == 200, part
        took = 0.1 if name == "gpu-a" else 0.3
        content = {"round": number, "samples": part.content["samples"], "seconds": took}
        assert service.ask("POST", f"{path}/reports", content, secret=secret).status == 200


def fits(page: Any, width: int) -> None:
    """Nothing is wider than the window, but for what scrolls by itself."""
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert browsers.barriers(page) == []


@pytest.mark.processes
def test_token_is_sent_once_and_the_pages_follow_the_job(tmp_path: Path) -> None:
    with served.process(tmp_path / "state", "--batch", 24, "--workers", 2) as service:
        secrets = {}
        for name in ("gpu-a", "gpu-b"):
            secrets[name] = service.ask("POST", "/v1/jobs/default/workers", {"name": name}).content["secret"]
        a_round(service, 0, secrets)
        with browsers.chromium() as browser:
            for width in WIDTHS:
                context = browser.new_context(viewport={"width": width, "height": 900})
                page = browsers.opened(context)
                page.goto(service.url + "/jobs/default/")
                assert page.locator("h1").inner_text() == "This service asks for its token"
                fits(page, width)
                page.screenshot(path=tmp_path / f"token-{width}.png")
                page.get_by_label("Token").fill(TOKEN)
                page.get_by_role("button", name="Open").click()
                page.wait_for_url(service.url + "/jobs/default/")  # without the token
                page.locator("#workers b", has_text="gpu-b").wait_for()
                assert page.locator("#workers b").all_inner_texts()[0].startswith("worker 0, gpu-a")
                page.locator("#charts figure").first.wait_for()
                fits(page, width)
                page.screenshot(path=tmp_path / f"job-{width}.png", full_page=True)
                page.goto(service.url + "/")
                row = page.locator(".jobs tbody tr")
                rounds = row.locator("td").nth(2)
                before = int(rounds.inner_text())
                a_round(service, before, secrets)
                page.wait_for_function(
                    "before => +document.querySelectorAll('.jobs tbody td')[2].innerText > before", arg=before
                )
                assert page.locator("#lost").is_hidden()
                fits(page, width)
                page.screenshot(path=tmp_path / f"jobs-{width}.png")
                row.get_by_role("link").click()
                page.wait_for_url(service.url + "/jobs/default/")
                context.close()
