import numpy as np
import pytest

from paceline import PacelineError, Round, policies, runs
from paceline.costs import Linear
from paceline.data import traces
from paceline.rounds import Cluster
from paceline.runs.findings import findings
from paceline.runs.summary import balanced_seconds
from paceline.shares import whole_samples
from paceline.simulate.toml import of_trace
from paceline.simulate.whatif import of_run, paces
from paceline.simulate.whatif import of_trace as answer_of_trace
from support.records import line

GUARANTEES = (
    "`whatif` names what a record does not know, and refuses a record of single updates (`asp`, `lsp`, "
    "backup workers).",
)

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
            spent = {"compute": took, "overhead": fixed, **(extras[t] if extras else {})}
            line(recorder, t, time=total, seconds=wall, loads=loads, **spent)
            plan, state = made.step(state, Round(loads / batch, took, batch, fixed))
    return runs.read(path)


def test_recorded_policy_keeps_its_seconds(tmp_path):
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


def test_overhead_of_an_often_absent_worker_is_that_of_its_rounds(tmp_path):
    overhead = np.broadcast_to([0.01, 0.0, 0.02], (ROUNDS, 3))
    run = record(tmp_path / "run", cluster_paces(), "level", overhead=overhead)
    run.loads[22:, 2] = run.compute[22:, 2] = run.overhead[22:, 2] = np.nan  # 8 of the later 15 rounds
    pace, fixed = paces(run)
    there = ~np.isnan(run.compute)
    assert fixed[there] == pytest.approx(overhead[there])
    assert pace[there] == pytest.approx(cluster_paces()[there])


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


def test_records_without_information_raise(tmp_path):
    runs.Recorder.create(tmp_path / "empty", {"policy": "equal", "workers": 2}).close()
    with pytest.raises(PacelineError, match="no finished round"):
        of_run(runs.read(tmp_path / "empty"), ["level"])
    alone = record(tmp_path / "alone", cluster_paces(workers=1))
    with pytest.raises(PacelineError, match="only 1 worker"):
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


def test_waiting_in_a_trace_with_gaps_is_that_of_present_workers(tmp_path):
    pace = cluster_paces()
    pace[10:20, 0] = np.nan
    file = traces.write(tmp_path / "t.csv", traces.Trace(pace, np.zeros_like(pace)))
    answer = answer_of_trace(of_trace(file, global_batch=BATCH), ["equal"])
    busy = answer.policies["equal"].loads * pace
    slowest = np.nanmax(busy, axis=1)
    waited = np.nansum(slowest[:, None] - busy)
    assert answer.seconds == pytest.approx(slowest.sum())
    assert answer.lost == pytest.approx(waited)
    assert answer.blame == pytest.approx([0.0, 0.0, waited])  # worker 2 is the slowest in every round
    share = waited / (slowest * np.array([3] * 10 + [2] * 10 + [3] * 10)).sum()
    assert answer.idle == answer.policies["equal"].idle == pytest.approx(share)


def test_pieces_cost_what_the_run_measured(tmp_path):
    def seconds(cost):
        rows = [{"at_once": 0.5, "piece_cost": cost, "pieces": [[8], [8], [8]]}] * ROUNDS
        run = record(tmp_path / f"run{cost}", cluster_paces(), extras=rows)
        return of_run(run, ["factoring"]).policies["factoring"].seconds

    assert seconds(0.05) > seconds(0.0005) + 0.5


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"sync": "asp"}, "was run with sync asp"),
        ({"sync": "lsp:3:5"}, "was run with sync lsp:3:5"),
        ({"backup": "static:2"}, "was run with backup static:2"),
        ({"mode": "pull"}, "was run with mode pull"),
    ],
)
def test_single_updates_raise(tmp_path, config, words):
    with pytest.raises(PacelineError, match=words):
        of_run(record(tmp_path / "run", cluster_paces(), **config), ["level"])
    bulk = record(tmp_path / "bulk", cluster_paces(), sync="bsp", mode="push-wait", backup="everyone")
    assert of_run(bulk, ["level"]).best == "level"


def rounds_of(path, rows, **config):
    """A record of given (loads, compute, further fields), None where absent."""
    with runs.Recorder.create(path, {"policy": "equal", "workers": 3} | config) as recorder:
        for t, (loads, compute, fields) in enumerate(rows):
            spent = [seconds for seconds in compute if seconds is not None]
            given = {"time": t + 1.0, "seconds": max(spent, default=1.0), "loads": loads, "compute": compute}
            line(recorder, t, **given | fields)
    return runs.read(path)


PLAIN = [([16, 16, 16], [0.1, 0.1, 0.4], {})]


@pytest.mark.parametrize(
    "empty",
    [([0, 0, 0], [0.0, 0.0, 0.0], {}), ([None] * 3, [None] * 3, {}), ([0, 0, None], [0.3, 0.3, None], {})],
)
def test_rounds_without_samples_are_left_out_with_a_note(tmp_path, empty):
    whole = of_run(rounds_of(tmp_path / "whole", PLAIN * 10), ["level"])
    found = of_run(rounds_of(tmp_path / "gaps", PLAIN * 5 + [empty] + PLAIN * 5), ["level"])
    assert found.policies["level"].seconds == whole.policies["level"].seconds
    assert found.seconds == pytest.approx(whole.seconds)
    assert found.notes == ["Left out: 1 round without samples."]
    with pytest.raises(PacelineError, match="no round in which a worker ran a sample"):
        of_run(rounds_of(tmp_path / "none", [empty] * 3), ["level"])


def test_nothing_is_promised_of_a_worker_that_never_ran_a_sample(tmp_path):
    run = rounds_of(tmp_path / "run", [([24, 24, 0], [0.2, 0.2, 0.0], {})] * 10)
    found = of_run(run, ["equal", "level"])
    assert found.policies["level"].seconds == pytest.approx(found.seconds)
    assert "The speed of worker 2" in found.notes[0]


@pytest.mark.parametrize(
    "lost", [([16, 16, 16], [0.1, 0.2, None], {}), ([16, 16, None], [0.1, 0.2, 0.9], {"seconds": 0.2})]
)
def test_samples_without_seconds_count_for_no_worker(tmp_path, lost):
    """Its part was lost in that round, so that the others had theirs, as recorded."""
    found = of_run(rounds_of(tmp_path / "run", [lost] * 10), ["equal"])
    assert found.policies["equal"].loads[-1][:2].tolist() == [16, 16]
    assert found.policies["equal"].seconds == pytest.approx(10 * 0.2)


def test_a_worker_that_appears_in_mid_run(tmp_path):
    rows = [([24, 24], [0.15, 0.15], {})] * 10 + PLAIN * 10
    found = of_run(rounds_of(tmp_path / "run", rows), ["equal"])
    loads = found.policies["equal"].loads
    assert np.isnan(loads[:10, 2]).all()
    assert loads[12:].tolist() == [[16, 16, 16]] * 8
    assert found.policies["equal"].rounds[12:] == pytest.approx([0.4] * 8)


def test_oddities_of_a_record_are_reported(tmp_path):
    early = rounds_of(tmp_path / "early", [([16, 16, 16], [0.1, 0.1, 0.4], {"seconds": 0.2})] * 3)
    assert of_run(early, ["equal"]).notes == [
        "3 rounds ended before the slowest worker was done; here, policies wait for that worker."
    ]
    limited = rounds_of(tmp_path / "limited", PLAIN, limits=[[1, 10]])
    assert of_run(limited, ["equal"]).notes == [
        "run.json has limits of 1 worker, not of 3; they are ignored."
    ]
    narrow = rounds_of(tmp_path / "narrow", PLAIN, limits=[[1, 10]] * 3)
    with pytest.raises(PacelineError, match=r"narrow: the workers' most loads sum to 30"):
        of_run(narrow, ["equal"])
    parts = rounds_of(tmp_path / "parts", [([0.5, 0.5, 1.0], [0.1, 0.1, 0.4], {})])
    with pytest.raises(PacelineError, match="fractions of samples"):
        of_run(parts, ["equal"])


@pytest.mark.parametrize("beyond", [0.0, 0.004, 20.0])
def test_report_and_whatif_agree_on_what_loads_by_speed_bring(tmp_path, monkeypatch, beyond):
    """Both add the seconds beyond the slowest worker: with a long exchange, neither recommends other loads."""
    monkeypatch.setitem(globals(), "BEYOND", beyond)
    overhead = np.full((ROUNDS, 3), 0.03)
    found = record(tmp_path / "run", cluster_paces(), overhead=overhead)
    answer = of_run(found, ["level"])
    assert balanced_seconds(found) == pytest.approx(answer.policies["level"].seconds, rel=0.02)
    said = any("With loads by measured speed" in each for each in findings(found))
    assert said == bool(answer.best) == (beyond < 20)


@pytest.mark.parametrize(("loop", "able"), [("whole", False), ("round", True), (None, False)])
def test_auto_is_recommended_only_where_the_loop_can_run_it(tmp_path, loop, able):
    found = record(tmp_path / "run", cluster_paces(), **({"loop": loop} if loop else {}))
    answer = of_run(found, ["auto"])
    assert answer.best == ("auto" if able else "")
