"""What a scrape of the metrics holds does not grow with all jobs and workers that there have ever been."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from paceline.serve import app
from support.calling import Caller, play
from support.served import TOKEN

GUARANTEES = (
    "A scrape of the metrics holds the jobs that exist, and figures of each worker up to 1,000 workers.",
)


async def scraped(call: Caller) -> list[str]:
    answer = await call.http.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200
    return [line for line in answer.text.splitlines() if not line.startswith("#")]


async def a_round(call: Caller, job: str, number: int, workers: str) -> None:
    for name in workers:
        assert (await call.next(name, job=job))[0] == 200
    for name in workers:
        report = {"round": number, "samples": 1, "seconds": 1.0}
        assert (await call.report(name, report, job=job))[0] == 200


def test_a_job_that_is_deleted_leaves_no_figures_behind(tmp_path: Path) -> None:
    async def scenario(call: Caller) -> None:
        sizes = []
        for number in range(6):
            job = f"job-{number}"
            assert (await call.ask("PUT", f"/jobs/{job}", {"batch": 1, "workers": 1}))[0] == 201
            await call.join("w", job=job)
            await a_round(call, job, 0, "w")
            lines = await scraped(call)
            assert any(line.startswith("paceline_round_seconds_count") and job in line for line in lines)
            assert (await call.ask("DELETE", f"/jobs/{job}"))[0] == 204
            lines = await scraped(call)
            assert not [line for line in lines if "job-" in line]
            sizes.append(len(lines))
        assert len(set(sizes[1:])) == 1

    play(tmp_path / "state", scenario, record=False)


def test_paths_that_lead_nowhere_have_no_figures(tmp_path: Path) -> None:
    async def scenario(call: Caller) -> None:
        await call.ask("GET", "/nowhere")
        before = await scraped(call)
        for number in range(20):
            await call.ask("GET", f"/nowhere/{number}")
            await call.ask("PUT", f"/jobs/.{number}", {})
        assert len(await scraped(call)) <= len(before) + 20  # the first PUT has made its route's

    play(tmp_path / "state", scenario, record=False)


def test_workers_have_separate_figures_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "NAMED", 4)  # two are there already

    async def scenario(call: Caller) -> None:
        for job, workers in (("k", "cd"), ("l", "e")):
            assert (await call.ask("PUT", f"/jobs/{job}", {"batch": len(workers), "workers": 2, "start": 1}))[
                0
            ] == 201
            for name in workers:
                await call.join(name, job=job)
            await a_round(call, job, 0, workers)
        named = [line for line in await scraped(call) if line.startswith("paceline_worker_samples")]
        assert [line.partition(" ")[0] for line in named] == [
            'paceline_worker_samples{job="k",worker="c"}',
            'paceline_worker_samples{job="k",worker="d"}',
        ]
        assert 'paceline_workers_present{job="l"} 1.0' in await scraped(call)

    play(tmp_path / "state", scenario, record=False)
