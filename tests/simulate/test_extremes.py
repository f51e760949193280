"""Extreme but finite numbers: a figure, quickly, or a sentence; never a hang, an infinity or a warning."""

from __future__ import annotations

import dataclasses
import json
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline import PacelineError, policies
from paceline.costs import Linear
from paceline.data import traces
from paceline.data.traces import Trace
from paceline.simulate import Scenario, WorkerClass, from_trace, run
from paceline.simulate.measures import to_json
from paceline.simulate.timing import MODELS, Constant, Lognormal, Pareto
from paceline.simulate.toml import of_trace
from paceline.simulate.whatif import of_trace as answer
from support.guarantees import guarantee
from support.mutilate import mutilations

GUARANTEES = (
    "Impossible seconds, sizes and timing models are refused; valid ones give finite figures, and shares "
    "sum to 1.",
)

SECONDS = st.sampled_from([1e-12, 1e-9, 1e-3, 0.7, 1.0, 1e3, 1e9]) | st.floats(1e-12, 1e9)
ANY = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, -1.0, 1e-300, 1e9, 1e308])
HEADER = "round,worker,seconds_per_sample,overhead_seconds\n"


def attempt(action):
    """(what the action returns, "") or (None, the sentence by which it refuses)."""
    try:
        return action(), ""
    except PacelineError as refused:
        return None, str(refused)


@st.composite
def clusters(draw):
    shape = draw(st.tuples(st.integers(2, 8), st.integers(2, 4)))
    size = shape[0] * shape[1]
    pace = np.array(draw(st.lists(SECONDS, min_size=size, max_size=size))).reshape(shape)
    overhead = np.array(draw(st.lists(st.just(0.0) | SECONDS, min_size=size, max_size=size))).reshape(shape)
    absent = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size))).reshape(shape)
    absent[:, 0] = False
    if draw(st.booleans()):
        pace[absent] = overhead[absent] = np.nan
    return from_trace(
        Trace(pace, overhead),
        global_batch=draw(st.sampled_from([1, 2, 7, 256, 10**5, 10**9])),
        fractional=draw(st.booleans()),
        known_overhead=draw(st.booleans()),
        decision_delay=draw(st.sampled_from([0, 0, 3, 10**8])),
        piece_seconds=draw(st.sampled_from([1e-12, 1e-3, 1e9])),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(clusters(), st.sampled_from(sorted(set(policies.names()) - {"lbbsp", "lbbsp-cpu", "lbbsp-gpu"})))
def test_any_valid_seconds_are_played(scenario, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome, refused = attempt(lambda: run(scenario, [name]))
    if outcome is None:
        assert "larger pieces" in refused
        return
    played = outcome.policies[name]
    json.dumps(to_json(outcome), allow_nan=False)
    assert np.nansum(played.first_shares, axis=1) == pytest.approx(np.ones(scenario.rounds))
    # Counted again: every worker's seconds from its own load, the slowest of them the round's.
    table, fixed = (
        source.table for source in (scenario.workers[0].seconds_per_sample, scenario.workers[0].overhead)
    )
    here = ~np.isnan(table)
    loads = np.nan_to_num(played.first_shares) * scenario.global_batch
    costs = Linear(np.where(here, table, 1.0), np.where(here, fixed, 0.0))
    if name not in ("factoring", "auto"):
        slowest = np.where(here, costs.seconds(loads), -np.inf).max(1)
        assert played.latency[:, 0] == pytest.approx(slowest, rel=1e-6)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(MODELS)), st.lists(ANY, min_size=4, max_size=4), st.integers(0, 5))
def test_any_timing_model_is_played_or_refused(kind, values, seed):
    names = [field.name for field in dataclasses.fields(MODELS[kind])]

    def played():
        model = MODELS[kind](**dict(zip(names, values, strict=False)))
        scenario = Scenario((WorkerClass(model), WorkerClass(Constant(0.1), model)), rounds=8, seed=seed)
        return run(scenario, ["equal", "level"])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome, refused = attempt(played)
    assert "\n" not in refused
    if outcome is not None:
        json.dumps(to_json(outcome), allow_nan=False)


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (WorkerClass(Lognormal(1.0, sd=500.0)), "seconds_per_sample of worker 0 in round 1 is drawn as"),
        (WorkerClass(Constant(1.0), Pareto(1.0, shape=1e-3)), "overhead of worker 0 in round 1 is drawn as"),
        (WorkerClass(Constant(1e9), noise=2.0), "is drawn as"),
    ],
)
def test_impossible_draws_raise(worker, words):
    with pytest.raises(PacelineError, match=words):
        run(Scenario((worker, WorkerClass(Constant(1.0)))), ["equal"])


def test_pieces_without_number_are_refused(monkeypatch):
    monkeypatch.setattr("paceline.simulate.pieces.CLAIMS", 500)
    scenario = Scenario((WorkerClass(Constant(0.001), count=2),), global_batch=10**9, rounds=2)
    with pytest.raises(PacelineError, match="more than 540 pieces"):
        run(scenario, ["factoring:scheme=self,piece=1"])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(ANY, ANY), min_size=6, max_size=6))
def test_whatif_on_any_trace_answers_or_refuses(tmp_path_factory, cells):
    path = tmp_path_factory.mktemp("t") / "t.csv"
    rows = [f"{k // 2},{k % 2},{pace!r},{over!r}\n" for k, (pace, over) in enumerate(cells)]
    path.write_text(HEADER + "".join(rows))
    _answers_or_refuses(path)


@guarantee(
    "`whatif` names what a record does not know, and refuses a record of single updates (`asp`, `lsp`, "
    "backup workers)."
)
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatif_on_a_mutilated_trace_answers_or_refuses(tmp_path_factory, data):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("t") / "t.csv"
    traces.write(path, Trace(rng.uniform(1e-3, 4e-3, (5, 3)), rng.uniform(0, 0.01, (5, 3))))
    path.write_bytes(data.draw(mutilations(path.read_bytes())))
    _answers_or_refuses(path)


def _answers_or_refuses(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, refused = attempt(lambda: answer(of_trace(path, global_batch=64), ["level", "auto"]))
    if found is None:
        assert str(path) in refused
        assert "\n" not in refused
        return
    assert np.isfinite([found.seconds, found.idle, *(each.seconds for each in found.policies.values())]).all()
    assert all(each.seconds > 0 for each in found.policies.values())
