"""Names that are markup, leave attributes, read from right to left or never end: pages show them, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.runs import Recorder, read, report

GUARANTEES = (
    "Names that are markup or very long are shown and run nothing; browsers run no foreign script in "
    "`report.html`.",
)

SCRIPT = "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"
QUOTES = '"\'><svg onload="window.harmed=1">`${window.harmed=1}`&quot;&#39;'
RIGHT_TO_LEFT = "\u202egpj.neddih\u2066\u0627\u0644\u0639\u0631\u0628\u064a\u0629"
LONG = "x" * 10_000
NAMES = {"script": SCRIPT, "quotes": QUOTES, "right to left": RIGHT_TO_LEFT, "long": LONG}
WORDS = ("policy", "data", "model", "engine", "version", "git", "host")


def hostile(folder, name):
    """A run all of whose words are this name, and that lost a worker of that name."""
    with Recorder.create(
        folder, dict.fromkeys(WORDS, name) | {"workers": 2, "global_batch": 8, "seed": 0}
    ) as run:
        for t in range(12):
            events = [{"what": f"worker 1 {name}", "seconds_lost": 0.5}] if t == 5 else None
            loads = np.array([6, 2])
            run.round(
                round=t, epoch=0, time=t + 1.0, seconds=1.0, batch=8, loads=loads, compute=0.1 * loads, loss=1.0,
                events=events,
            )  # fmt: skip
        run.finish(test_accuracy=0.5)
    return folder


def unharmed(page, width):
    """Nothing of a name was run, and the page is no wider than the window."""
    assert page.evaluate("window.harmed") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", NAMES)
def test_a_report_and_a_comparison_of_hostile_names(tab, tmp_path, name):
    for folder, text in (("one", NAMES[name]), ("two", NAMES[name][::-1])):
        hostile(tmp_path / folder, text)
    runs = [read(tmp_path / folder) for folder in ("one", "two")]
    for kind, text in (("report", report.render(runs[0])), ("comparison", report.render_comparison(runs))):
        (tmp_path / f"{kind}.html").write_text(text)
        page = tab((tmp_path / f"{kind}.html").as_uri(), width=1000)
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        unharmed(page, 1000)


@pytest.mark.parametrize("name", NAMES)
def test_the_live_page_of_hostile_names(tab, watched, tmp_path, name):
    for place in ("a", NAMES[name].replace("/", "\\")[:120]):
        hostile(tmp_path / "runs" / place, NAMES[name])
    page = tab(watched(tmp_path / "runs").url, width=1000)
    page.wait_for_selector(".charts figure svg")
    unharmed(page, 1000)
