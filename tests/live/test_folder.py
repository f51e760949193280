"""The live pages of a directory that is not there yet, and then holds several runs."""

import os

import pytest

from support.growing import go_on, start

pytest.importorskip("httpx")
from starlette.testclient import TestClient

from paceline.live.pages import folder_app
from paceline.runs.run import runs_in

GUARANTEES = (
    "`watch` of a directory that is not there yet, or of a folder of runs, waits and shows the newest run.",
)


def begin(run_dir, rounds, started, **config):
    with start(run_dir, **config) as recorder:
        go_on(recorder, 0, rounds)
    os.utime(run_dir / "run.json", (started, started))


def panel(client, path):
    """What the page at this address shows."""
    return client.get(f"{path}panel").json()


def test_a_folder_that_fills_with_runs(tmp_path):
    folder = tmp_path / "both"
    client = TestClient(folder_app(folder))
    waiting = panel(client, "/")
    assert waiting["state"] == "waiting"
    assert waiting["says"] == f"Waiting for a run to start in {folder}."
    assert client.get("/").status_code == 200
    assert client.get("/others").json() == []

    begin(folder / "zeta", 12, 1000, policy="equal")
    assert panel(client, "/")["rounds"] == 12
    begin(folder / "alpha", 5, 2000)
    assert [run.name for run in runs_in(folder)] == ["zeta", "alpha"], "in the order of their start"
    newest = panel(client, "/")
    assert (newest["rounds"], newest["title"]) == (5, "level on 4 workers"), "the newest one is shown"
    assert panel(client, "/runs/zeta/")["title"] == "equal on 4 workers"
    assert client.get("/runs/zeta/figures").json()["rounds"] == 12
    assert client.get("/runs/zeta/others").json() == [
        {"name": "zeta", "href": "../zeta/", "current": True},
        {"name": "alpha", "href": "../alpha/", "current": False},
    ]
    assert client.get("/others").json()[1] == {"name": "alpha", "href": "runs/alpha/", "current": True}
    assert client.get("/runs/none/").status_code == 404


def test_page_without_a_script_names_what_it_needs(tmp_path):
    page = TestClient(folder_app(tmp_path)).get("/").text
    assert "<noscript>" in page
    assert "needs JavaScript" in page
