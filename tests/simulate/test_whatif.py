import numpy as np
import pytest

from paceline import PacelineError, Round, policies, runs, traces
from paceline.costs import Linear
from paceline.rounds import Cluster
from paceline.shares import whole_samples
from paceline.simulate.toml import of_trace
from paceline.simulate.whatif import of_run, paces
from paceline.simulate.whatif import of_trace as answer_of_trace

ROUNDS, BATCH = 30, 96
BEYOND = 0.004  # seconds of each round after its slowest worker


def cluster_paces(seed=0, workers=3):
    rng = np.random.default_rng(seed)
    return np.array([1.0, 2.0, 6.0])[:workers] * 1e-3 * np.exp(0.05 * rng.standard_normal((ROUNDS, workers)))


def record(path, pace, policy="equal", batches=None, overhead=None, extras=None, **config):
    """The record of a run on these paces, as the training engine writes it."""
    rounds, workers = pace.shape
    sizes = batches or [BATCH] * rounds
    made = policies.create(policy, Cluster(workers, BATCH, least=np.ones(workers)))
    plan, state = made.init()
    facts = {"policy": policy, "workers": workers, "global_batch": BATCH} | config
    total = 0.0
    with runs.Recorder.create(path, facts) as recorder:
        for t, batch in enumerate(sizes):
            fixed = np.zeros(workers) if overhead is None else overhead[t]
            loads = whole_samples(plan, batch, np.ones(workers))
            took = Linear(pace[t], fixed).seconds(loads.astype(float))
            wall = took.max() + BEYOND
            total += wall
            recorder.round(
                round=t,
                epoch=0,
                time=total,
                seconds=wall,
                batch=batch,
                loads=loads,
                compute=took,
                overhead=fixed,
                **(extras[t] if extras else {}),
            )
            plan, state = made.step(state, Round(loads / batch, took, batch, fixed))
    return runs.read(path)


def test_the_recorded_policy_is_told_as_it_was(tmp_path):
    sizes = [BATCH] * 9 + [50] + [BATCH] * 10 + [17]  # short last rounds of epochs
    run = record(tmp_path / "run", cluster_paces()[: len(sizes)], batches=sizes)
    answer = of_run(run, ["equal"])
    assert answer.policies["equal"].rounds == pytest.approx(run.seconds)
    assert answer.policies["equal"].seconds == pytest.approx(answer.seconds)
    assert answer.policies["equal"].idle == pytest.approx(answer.idle)
    assert answer.idle == pytest.approx(runs.summarize(run)["idle_share"])
    assert np.array_equal(answer.policies["equal"].loads, run.loads)
    assert answer.best == ""


@pytest.mark.parametrize("name", ["level", "dolbie", "abs:reading=share"])
def test_a_record_of_equal_shares_foretells_the_other_policies(tmp_path, name):
    pace = cluster_paces()
    before = record(tmp_path / "equal", pace)
    after = record(tmp_path / "other", pace, name)
    answer = of_run(before, [name])
    assert answer.policies[name].seconds == pytest.approx(after.seconds.sum(), rel=0.01)
    assert answer.best == name


def test_who_is_to_blame(tmp_path):
    answer = of_run(record(tmp_path / "run", cluster_paces()), ["level"])
    assert answer.blame[:2].sum() == 0  # worker 2 is three times slower than the next
    assert answer.blame[2] == pytest.approx(answer.lost)


def test_overhead_and_pace_come_apart_as_the_run_found_them(tmp_path):
    overhead = np.broadcast_to([0.01, 0.0, 0.02], (ROUNDS, 3))
    run = record(tmp_path / "run", cluster_paces(), "level", overhead=overhead)
    pace, fixed = paces(run)
    assert fixed == pytest.approx(overhead)
    assert pace == pytest.approx(cluster_paces())


def test_rounds_without_load_keep_the_last_pace(tmp_path):
    run = record(tmp_path / "run", cluster_paces())
    run.loads[3:5, 0], run.loads[:2, 1] = 0, 0
    pace, _ = paces(run)
    assert np.all(pace[3:5, 0] == pace[2, 0])
    assert np.all(pace[:2, 1] == pace[2, 1])


def test_a_record_cut_off_in_mid_line_counts_as_far_as_it_is_whole(tmp_path):
    record(tmp_path / "run", cluster_paces())
    file = tmp_path / "run" / "rounds.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    answer = of_run(runs.read(tmp_path / "run"), ["level"])
    assert len(answer.policies["level"].rounds) == ROUNDS - 1
    assert any("cut off" in note for note in answer.notes)


def test_records_that_tell_nothing(tmp_path):
    runs.Recorder.create(tmp_path / "empty", {"policy": "equal", "workers": 2}).close()
    with pytest.raises(PacelineError, match="no finished round"):
        of_run(runs.read(tmp_path / "empty"), ["level"])
    alone = record(tmp_path / "alone", cluster_paces(workers=1))
    with pytest.raises(PacelineError, match="1 worker only"):
        of_run(alone, ["level"])


def test_limits_of_the_run_hold(tmp_path):
    run = record(tmp_path / "run", cluster_paces(), limits=[[None, 40], [None, 40], [10, None]])
    loads = of_run(run, ["level"]).policies["level"].loads
    assert loads[5:, 2].min() >= 16
    assert loads[:, :2].max() <= 40


def test_a_trace_is_compared_with_equal_shares(tmp_path):
    pace = cluster_paces()
    file = traces.write(tmp_path / "t.csv", traces.Trace(pace, np.zeros_like(pace)))
    answer = answer_of_trace(of_trace(file, global_batch=BATCH), ["level", "optimum"])
    assert answer.seconds == pytest.approx((BATCH / 3 * pace).max(1).sum())
    assert list(answer.policies) == ["level", "optimum"]
    assert answer.policies["optimum"].seconds <= answer.policies["level"].seconds < answer.seconds


def test_pieces_cost_what_the_run_measured(tmp_path):
    def seconds(cost):
        rows = [{"at_once": 0.5, "piece_cost": cost, "pieces": [[8], [8], [8]]}] * ROUNDS
        run = record(tmp_path / f"run{cost}", cluster_paces(), extras=rows)
        return of_run(run, ["factoring"]).policies["factoring"].seconds

    assert seconds(0.05) > seconds(0.0005) + 0.5
