"""The page's endpoints without a browser: mounted, and asked for what is not there."""

import base64
import hashlib
import re

import pytest

from support.growing import go_on, start

pytest.importorskip("httpx")
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from paceline.live import app


@pytest.fixture
def run_dir(tmp_path):
    with start(tmp_path / "run") as recorder:
        go_on(recorder, 0, 1000)
    return tmp_path / "run"


def test_the_page_asks_for_nothing_but_its_own(run_dir):
    answer = TestClient(app(run_dir)).get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert policy.endswith("frame-ancestors 'none'")
    for script in re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL):
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert not re.search(r"https?://|@import|url\((?!#)|\bsrc=|href=\"(?!data:)", answer.text)


def test_mounted_under_names(run_dir):
    runs = Mount(
        "/runs/{name}/live",
        app(lambda request: run_dir if request.path_params["name"] == "first" else None),
    )
    client = TestClient(Starlette(routes=[runs]))
    assert client.get("/runs/first/live/").status_code == 200
    assert client.get("/runs/first/live/figures").json()["rounds"] == 1000
    for path in ("", "panel", "figures"):
        answer = client.get(f"/runs/other/live/{path}")
        assert answer.status_code == 404
        assert "no run with this name" in answer.json()["error"]


def test_other_paths_are_refused(run_dir):
    client = TestClient(app(run_dir))
    assert client.get("/nope").status_code == 404
    assert client.get("/nope").json()["error"].startswith("not found: expected GET of the run's page")
    assert client.post("/").json()["error"].startswith("method not allowed")


def test_figures_of_any_stretch_have_a_bounded_size(run_dir):
    client = TestClient(app(run_dir))
    for query, span in (
        ("", [0, 1000]),
        ("?from=100&to=200", [100, 200]),
        ("?newest=50", [950, 1000]),
        ("?from=990&to=5000", [990, 1000]),
        ("?from=5000", [999, 1000]),
        ("?from=20&to=10", [20, 21]),
    ):
        answer = client.get(f"/figures{query}")
        assert answer.json()["span"] == span
        assert len(answer.content) < 250_000
    for query in (
        "?from=x",
        "?to=-1",
        "?newest=nan",
        "?from=1e9",
        f"?to={'9' * 400}",
        "?from=²",
        "?to=.",
        "?to=",
    ):
        answer = client.get(f"/figures{query}")
        assert answer.status_code == 400
        assert "expected a round number" in answer.json()["error"]


def test_a_run_without_rounds_has_no_figures_yet(tmp_path):
    start(tmp_path / "run").close()
    assert TestClient(app(tmp_path / "run")).get("/figures").json()["charts"] == []
    gone = TestClient(app(tmp_path / "nowhere"))
    assert gone.get("/").status_code == 200
    assert gone.get("/figures").json()["rounds"] == 0


def test_a_page_is_sent_the_panel_only_if_it_is_another_one_than_it_has(run_dir):
    first = TestClient(app(run_dir)).get("/panel")
    assert first.json()["rounds"] == 1000
    # Another server, the same record: nothing is sent again.
    mine = {"If-None-Match": first.headers["etag"]}
    again = TestClient(app(run_dir)).get("/panel", headers=mine)
    assert (again.status_code, again.content) == (304, b"")
    (run_dir / "rounds.jsonl").write_bytes(b"".join((run_dir / "rounds.jsonl").open("rb").readlines()[:7]))
    second = TestClient(app(run_dir)).get("/panel", headers=mine)
    assert second.headers["etag"] != first.headers["etag"]
    assert second.json()["rounds"] == 7
