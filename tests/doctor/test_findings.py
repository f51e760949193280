"""Diagnoses of records made by hand, whose truth is known."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from paceline import PacelineError, runs
from paceline.doctor.findings import Diagnosis, diagnose, show, to_json
from paceline.doctor.phases import Phase
from support.guarantees import guarantee

STEPS = 60
LOADER = {"processes": 0, "stream": False, "options": []}


def diagnosis(
    place: Path,
    seconds: dict[Phase, Any],
    exchanging: float = 0.001,
    loader: dict[str, Any] | None = LOADER,
    lines: dict[int, dict[str, str]] | None = None,
    host: str = "",
    backwards: int = 1,
    exchanges: int = 1,
    sure: bool = True,
    compares: bool = False,
) -> Diagnosis:
    """Of 60 steps in which the phases took these seconds of each rank, shape (n,) or (60, n)."""
    ranks = max(np.shape(each)[-1] for each in seconds.values())
    phases = {phase: np.broadcast_to(seconds.get(phase, 0.0), (STEPS, ranks)) for phase in Phase}
    own = sum(phases.values())
    each = {"loader": loader, "host": host, "sure": sure, "compares": compares}
    told = [{"lines": (lines or {}).get(rank, {}), **each} for rank in range(ranks)]
    counts = {"fetches": 0 if loader is None else backwards, "backwards": backwards, "exchanges": exchanges}
    with runs.Recorder.create(
        place / "run", {"policy": "equal", "workers": ranks, "first_step": 2}
    ) as record:
        now = 0.0
        for step in range(STEPS):
            wall = own[step].max() + exchanging
            now += wall
            spent = {phase.name: phases[phase][step] for phase in Phase}
            record.round(
                round=step,
                epoch=0,
                time=now,
                seconds=wall,
                batch=16 * ranks,
                loads=[16] * ranks,
                compute=own[step],
                overhead=phases[Phase.FINISH][step],
                phases=spent | {"REDUCE": wall - own[step]},
                counts={name: [value] * ranks for name, value in counts.items()},
                loop=told if step == STEPS - 1 else None,
            )
    return diagnose(runs.read(place / "run"))


def forward(*seconds: float) -> dict[Phase, Any]:
    return {Phase.FORWARD: np.array(seconds)}


def test_a_rank_that_computes_slowly(tmp_path: Path) -> None:
    found = diagnosis(
        tmp_path,
        {Phase.FETCH: np.full(3, 0.002), Phase.FORWARD: [0.004, 0.004, 0.02], Phase.BACKWARD: [0.006, 0.006, 0.026]},
        exchanging=0.002,
    )  # fmt: skip
    assert found.sentences[:3] == [
        "Rank 2 takes 4.0x the fastest rank's time per sample, from the first step on.",
        "Rank 2 loses its time in computing, the forward and the backward pass (46 ms per step; the other ranks take "
        "10 ms).",
        # Two ranks wait 36 of 50 ms.
        f"Waiting for rank 2 takes {100 * 2 * 36 / 150:.0f} % of all ranks' time: a step takes 50 ms, and a rank "
        "works for 24 ms of it on average.",
    ]
    assert "The exchange of gradients itself takes 2 ms of a step, 4 %." in found.sentences
    assert np.allclose(found.spent.waiting, [0.036, 0.036, 0])
    assert found.spent.exchanging == pytest.approx(0.002)
    imported, made = "+ import paceline.torch", "+ pace = paceline.torch.Pace(ddp, global_batch=48)"
    assert found.lines[:2] == [imported, made]
    # At best all end together: 48 samples at speeds of 16 per 12, 12 and 48 ms, and 2 ms of exchange.
    ideal = STEPS * (48 / (16 / 0.012 * 2 + 16 / 0.048) + 0.002)
    assert found.answer.seconds == pytest.approx(STEPS * 0.05)
    assert ideal < found.answer.policies["level"].seconds < 1.1 * ideal


def test_prose_and_table_have_one_share_of_waiting(tmp_path: Path) -> None:
    """Half of each step is exchange, which is nobody's waiting."""
    found = diagnosis(tmp_path, forward(0.01, 0.01, 0.04), exchanging=0.04)
    share = 2 * 0.03 / (3 * 0.08)
    assert any(each.startswith(f"Waiting for rank 2 takes {100 * share:.0f} %") for each in found.sentences)
    assert found.answer.idle == pytest.approx(share)
    assert found.spent.waiting.sum() / (3 * found.spent.step) == pytest.approx(share)
    assert to_json(found)["answer"].idle == pytest.approx(share)


@pytest.mark.parametrize(
    ("phase", "where"),
    [
        (Phase.FETCH, "in fetching the loader's next batch"),
        (Phase.PREPARE, "in preparing, the script's own code before the forward pass"),
        (Phase.MOVE, "in moving the batch to the device"),
        (Phase.FORWARD, "in the forward pass"),
        (Phase.BETWEEN, "between the forward and the backward pass, in the loss or the script's own code"),
        (Phase.BACKWARD, "in the backward pass"),
        (Phase.FINISH, "between the exchange and the end of the optimizer's step"),
    ],
)  # fmt: skip
def test_what_a_rank_loses_its_time_in(tmp_path: Path, phase: Phase, where: str) -> None:
    work = {Phase.FORWARD: np.full(3, 0.01)} | ({phase: [0.002, 0.03, 0.002]})
    found = diagnosis(tmp_path, work, lines={1: {phase.name: "train.py, line 7: work()"}})
    assert found.sentences[1].startswith(
        f"Rank 1 loses its time {where} (30 ms per step; the other ranks take 2 ms)."
    )
    assert found.sentences[2] == "Most of that time goes into train.py, line 7: work()"
    text = " ".join(found.sentences)
    assert ("num_workers" in text) == (phase is Phase.FETCH), "only a loader is told to have more processes"


def test_two_losses_are_both_named(tmp_path: Path) -> None:
    found = diagnosis(tmp_path, {Phase.FETCH: [0.002, 0.02], Phase.BACKWARD: [0.01, 0.03]})
    assert found.sentences[1] == (
        "Rank 1 loses its time in the backward pass (30 ms per step; the other ranks take 10 ms) and in fetching the "
        "loader's next batch (20 ms per step; the other ranks take 2 ms)."
    )


def test_what_helps_a_loader_goes_by_its_processes(tmp_path: Path) -> None:
    work = {Phase.FETCH: [0.002, 0.03], Phase.FORWARD: [0.01, 0.01]}
    none = diagnosis(tmp_path / "0", work, lines={1: {"FETCH": "set.py, line 3: read()"}})
    assert "Most of that time goes into set.py, line 3: read()" in none.sentences
    assert "num_workers=0" in " ".join(none.sentences)
    some = diagnosis(tmp_path / "4", work, loader=LOADER | {"processes": 4})
    assert "The loader's 4 processes cannot keep up" in " ".join(some.sentences)


def test_loading_that_slows_all_ranks_is_reported(tmp_path: Path) -> None:
    found = diagnosis(tmp_path, {Phase.FETCH: np.full(3, 0.03), Phase.FORWARD: np.full(3, 0.01)})
    text = " ".join(found.sentences)
    assert "No rank is slow" in text
    assert (
        "The ranks spend 73 % of a step in fetching. The training waits while the loader makes each" in text
    )
    assert found.lines == []


def test_a_rank_that_becomes_slow_is_dated(tmp_path: Path) -> None:
    computing = np.full((STEPS, 2), 0.01)
    computing[30:, 0] = 0.03
    found = diagnosis(tmp_path, {Phase.BACKWARD: computing})
    # 30 steps of 11 ms, and one more that is over when its end is noted; the first two were left out.
    assert found.sentences[0] == (
        "Rank 0 takes 3.0x the fastest rank's time per sample, since step 32, 350 ms after the watch began."
    )
    assert found.spent.steps == 30, "the table is of the steps since then"
    assert found.spent.waiting.tolist() == pytest.approx([0, 0.02])


def test_slow_rank_is_named_first_beside_other_changes(tmp_path: Path) -> None:
    computing = np.full((STEPS, 3), 0.01)
    computing[:, 2] = 0.036
    computing[:30, 1] = 0.05
    found = diagnosis(tmp_path, {Phase.BACKWARD: computing})
    assert found.sentences[:2] == [
        "Rank 2 takes 3.6x the fastest rank's time per sample, from the first step on.",
        "Rank 1 became 5.0x faster at step 32, 1.52 s after the watch began.",
    ]
    computing[:30, 1] = 0.02  # it never was the slowest: nobody's step depended on it
    found = diagnosis(tmp_path / "other", {Phase.BACKWARD: computing})
    assert not any(each.startswith("Rank 1") for each in found.sentences)


def test_script_without_a_loader_gets_advice(tmp_path: Path) -> None:
    words = "make an indexed data set of the samples and use pace.loader(dataset, shuffle=False)"
    work = {Phase.PREPARE: np.full(2, 0.01), Phase.FORWARD: [0.01, 0.04]}
    own = diagnosis(tmp_path / "own", work, loader=None)
    assert words in own.sentences[-1]
    assert "+ for size in pace.sizes(steps):" in own.lines
    for name, others in {"loader": LOADER, "host": None}.items():
        found = diagnosis(tmp_path / name, work, loader=others, host="fabric" if name == "host" else "")
        assert words not in " ".join(found.sentences)
    even = diagnosis(tmp_path / "even", {Phase.FORWARD: np.full(2, 0.01)}, loader=None)
    assert words not in " ".join(even.sentences), "there is no change to make"


def test_even_ranks_are_left_alone(tmp_path: Path) -> None:
    found = diagnosis(tmp_path, forward(0.01, 0.01, 0.01))
    text = " ".join(found.sentences)
    assert "No rank is slow" in text
    assert "leave the script as it is" in text
    assert found.lines == []
    assert to_json(found)["take"] is None


def test_a_slow_exchange_is_not_blamed_on_a_rank(tmp_path: Path) -> None:
    found = diagnosis(tmp_path, forward(0.01, 0.01, 0.01), exchanging=0.03)
    text = " ".join(found.sentences)
    assert "The exchange of gradients itself takes 30 ms of a step, 75 %. No division of the batch" in text
    assert found.lines == []


def test_long_exchange_names_local_steps_and_their_cost(tmp_path: Path) -> None:
    work = forward(0.01, 0.01, 0.04)
    found = diagnosis(tmp_path / "slow", work, exchanging=0.26)
    text = " ".join(found.sentences)
    assert "of a step, 87 %. No division of the batch shortens it" in text
    # 48 samples at speeds of 16 per 10, 10 and 40 ms, and 0.26 s in every 2.3 + 0.26
    assert f"{1e3 * 48 / 3600 * 2.56 / 2.3:.1f}" == "14.8"
    assert "LocalSGD(model, ..., every='2.3 s') would take about 14.8 ms for as many samples" in text
    assert "This trains another model than DDP does" in text
    assert "LocalSGD" not in " ".join(diagnosis(tmp_path / "quick", work, exchanging=0.03).sentences)
    assert "LocalSGD" not in " ".join(
        diagnosis(tmp_path / "host", work, exchanging=0.26, host="lightning").sentences
    )


def test_changing_stragglers_are_distinguished_from_a_lasting_one(tmp_path: Path) -> None:
    computing = 0.02 * np.exp(np.random.default_rng(0).normal(0, 0.5, (STEPS, 3)))
    found = diagnosis(tmp_path, {Phase.FORWARD: computing})
    assert found.sentences[0].startswith(
        "No rank is slow all the time, but different ranks are slow in different steps: rank "
    )
    assert "Waiting for each other takes" in " ".join(found.sentences)


@guarantee(
    "The doctor names the rank that is last in most steps, and what part of the waiting is due to long "
    "samples, if it can be known."
)
def test_a_rank_that_is_mostly_last_is_named_however_its_speed_varies(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    computing = 0.02 + 0.001 * rng.random((STEPS, 3))
    computing[:, 1] += np.where(np.arange(STEPS) < 40, 0.02 * rng.random(STEPS), 0.0012)
    found = diagnosis(tmp_path, {Phase.FORWARD: computing})
    text = " ".join(found.sentences)
    assert found.sentences[0].startswith("Rank 1 "), text
    assert "different ranks" not in text
    assert "Waiting for rank 1 takes" in text


def test_what_an_optimizer_takes_does_not_grow_with_the_samples(tmp_path: Path) -> None:
    found = diagnosis(tmp_path, {Phase.FORWARD: np.full(2, 0.01), Phase.FINISH: [0.001, 0.04]})
    assert "so no division of the batch shortens it." in " ".join(found.sentences)
    # The other rank can take over all of 10 ms, but nothing of the 40.
    assert found.answer.policies["level"].seconds > STEPS * 0.04


def test_exchanges_that_could_be_saved_are_counted(tmp_path: Path) -> None:
    work = forward(0.01, 0.04)
    found = diagnosis(tmp_path / "each", work, backwards=4, exchanges=4)
    assert "Each of the 4 backward passes of a step exchanges the gradients" in " ".join(found.sentences)
    found = diagnosis(tmp_path / "last", work, backwards=4, exchanges=1)
    assert "backward passes of a step exchanges" not in " ".join(found.sentences)


def test_another_record_is_refused(tmp_path: Path) -> None:
    with runs.Recorder.create(tmp_path / "run", {"policy": "equal", "workers": 2}) as record:
        record.round(round=0, epoch=0, time=1, seconds=1, batch=8, loads=[4, 4], compute=[1, 0.5])
    with pytest.raises(PacelineError, match="no record of the doctor"):
        diagnose(runs.read(tmp_path / "run"))


def test_table_of_ranks_fits_60_columns(tmp_path: Path) -> None:
    phases = {Phase.FETCH: [0.01] * 3, Phase.PREPARE: [0.000222] * 3}
    phases |= {Phase.FORWARD: [0.012, 0.012, 0.048], Phase.FINISH: [0.000313] * 3}
    out = io.StringIO()
    show(diagnosis(tmp_path, phases, exchanging=0.002), Console(file=out, width=80, soft_wrap=True))
    lines = out.getvalue().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("rank"))
    assert " ".join(lines[start].split()) == "rank samples fetch prepare compute update wait slower"
    assert max(len(line.rstrip()) for line in lines[start : start + 5]) <= 60
    assert "in ms (medians of 60 steps; the exchange takes 2)" in lines[start - 1]


@pytest.mark.parametrize(("whole", "host", "said"), [(True, "", 1), (False, "", 0), (True, "lightning", 0)])
def test_loader_that_draws_the_whole_data_set_on_each_rank_is_named(
    whole: bool, host: str, said: int, tmp_path: Path
) -> None:
    found = diagnosis(tmp_path, forward(0.01, 0.04), loader=LOADER | {"whole": whole}, host=host)
    words = "Each rank reads the whole data set, as the loader has no DistributedSampler. With the change"
    assert sum(words in each and "2 epochs have as many steps" in each for each in found.sentences) == said
