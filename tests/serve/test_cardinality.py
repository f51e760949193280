"""What a scrape of the metrics holds does not grow with all jobs and workers that there have ever been."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from paceline.serve import app
from support.calling import Caller, playing

pytestmark = pytest.mark.anyio
GUARANTEES = (
    "A scrape of the metrics holds the jobs that exist, and figures of each worker up to 1,000 workers.",
)


async def scraped(call: Caller) -> list[str]:
    return [line for line in (await call.page("/metrics")).splitlines() if not line.startswith("#")]


async def test_a_job_that_is_deleted_leaves_no_figures_behind(tmp_path: Path) -> None:
    sizes = []
    async with playing(tmp_path, record=False) as call:
        for number in range(6):
            job = f"job-{number}"
            await call.create(job, "w", start=1)
            await call.rounds(0, names="w", job=job)
            lines = await scraped(call)
            assert any(line.startswith("paceline_round_seconds_count") and job in line for line in lines)
            assert (await call.ask("DELETE", f"/jobs/{job}"))[0] == 204
            lines = await scraped(call)
            assert not [line for line in lines if "job-" in line]
            sizes.append(len(lines))
    assert len(set(sizes[1:])) == 1


async def test_paths_that_lead_nowhere_have_no_figures(call: Caller) -> None:
    await call.ask("GET", "/nowhere")
    before = await scraped(call)
    for number in range(20):
        await call.ask("GET", f"/nowhere/{number}")
        await call.ask("PUT", f"/jobs/.{number}", {})
    assert len(await scraped(call)) <= len(before) + 20  # the first PUT has made its route's


async def test_workers_have_separate_figures_up_to_a_limit(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "NAMED", 4)  # two are there already
    for job, workers in (("k", "cd"), ("l", "e")):
        await call.create(job, workers, start=1)
        await call.rounds(0, names=workers, job=job)
    lines = await scraped(call)
    assert [line.partition(" ")[0] for line in lines if line.startswith("paceline_worker_samples")] == [
        'paceline_worker_samples{job="k",worker="c"}',
        'paceline_worker_samples{job="k",worker="d"}',
    ]
    assert 'paceline_workers_present{job="l"} 1.0' in lines
