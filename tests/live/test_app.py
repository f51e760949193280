"""The page's endpoints without a browser: mounted, and asked for what is not there."""

import asyncio
import base64
import hashlib
import json
import re

import pytest

from support.growing import go_on, start

pytest.importorskip("starlette", reason="the page needs paceline[serve]")
pytest.importorskip("httpx", reason="the test client needs httpx")
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from paceline.live import app
from paceline.live.pages import Follower, stream


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
    for path in ("", "events", "figures"):
        answer = client.get(f"/runs/other/live/{path}")
        assert answer.status_code == 404
        assert "no run of that name" in answer.json()["error"]


def test_other_paths_are_refused_in_a_sentence(run_dir):
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
        assert "expected a round's number" in answer.json()["error"]


def test_a_run_without_rounds_has_no_figures_yet(tmp_path):
    start(tmp_path / "run").close()
    assert TestClient(app(tmp_path / "run")).get("/figures").json()["charts"] == []
    gone = TestClient(app(tmp_path / "nowhere"))
    assert gone.get("/").status_code == 200
    assert gone.get("/figures").json()["rounds"] == 0


def take(stream, count):
    """The first events of a stream: (id, kind, data)."""

    async def run():
        found = []
        async for text in stream:
            fields = dict(line.split(": ", 1) for line in text.strip("\n").split("\n"))
            if "event" in fields:
                found.append((fields.get("id"), fields["event"], fields["data"]))
            if len(found) == count:
                break
        return found

    return asyncio.run(run())


def test_events_have_ids_by_which_a_page_goes_on(run_dir, monkeypatch):
    monkeypatch.setattr("paceline.live.pages.BEAT", 0.1)
    [(first, kind, data)] = take(stream(Follower(run_dir).shot, "", lambda: False), 1)
    assert kind == "panel"
    assert json.loads(data)["rounds"] == 1000
    # Another server, the same record: nothing is sent again, the line is kept alive.
    again = take(stream(Follower(run_dir).shot, first, lambda: False), 2)
    assert [kind for _, kind, _ in again] == ["beat", "beat"]
    (run_dir / "rounds.jsonl").write_bytes(b"".join((run_dir / "rounds.jsonl").open("rb").readlines()[:7]))
    [(second, kind, data)] = take(stream(Follower(run_dir).shot, first, lambda: False), 1)
    assert second != first
    assert json.loads(data)["rounds"] == 7


def test_a_server_that_ends_ends_its_streams(run_dir):
    assert take(stream(Follower(run_dir).shot, "", lambda: True), 1) == []
