"""What is said of a run, on records whose story is known."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline.runs import Recorder, read, report, trace
from paceline.runs.events import Costs
from paceline.runs.findings import compare, findings
from paceline.runs.summary import ChangePoint, changes, settled, slowness, straggler_share, summarize
from paceline.runs.words import listing, number, percent, plural, seconds, times
from support.guarantees import guarantee
from support.records import line

SLOW = np.array([0.001, 0.001, 0.001, 0.004])


def said(run):
    return " ".join(findings(run))


def test_demo_has_one_finding(tmp_path, write):
    pace = np.tile(SLOW, (40, 1))
    equal = write(
        tmp_path / "equal", np.full((40, 4), 16), pace, policy="equal", finish={"test_accuracy": 0.9}
    )
    balanced = np.tile([20, 20, 20, 5], (40, 1))
    balanced[0] = 16, 16, 16, 16
    level = write("level", balanced, pace, finish={"test_accuracy": 0.9})
    runs = [read(equal), read(level)]
    # 40 rounds of 64 ms for 2560 samples; then one of 64 and 39 of 20 ms for 2599.
    gain = (2599 / (0.064 + 39 * 0.020)) / (2560 / (40 * 0.064))
    assert compare(runs)[0] == (
        f"Worker 3 is 4.0x slower; an equal split wasted 56 % of the cluster's time; with level, "
        f"samples were processed {gain:.1f}x as fast."
    )
    assert "an equal split" not in compare(runs)[1]
    assert f"{gain:.1f}x the speed of an equal split" in compare(runs)[2]


def test_the_same_model_is_only_claimed_where_it_is(ran):
    equal, loads = ran("equal", 13, SLOW, policy="equal"), [16, 16, 16, 4]
    level = ran("level", loads, SLOW)
    assert compare([equal, level])[0].endswith("with level, the same model was trained 3.2x as fast.")
    other = ran("other", loads, SLOW, seed=1)
    assert compare([equal, other])[0].endswith("with level, samples were processed 3.2x as fast.")
    assert compare([level, equal])[0] == compare([equal, level])[0]
    again = ran("again", loads, SLOW, policy="dolbie")
    assert "with level or dolbie, the same model" in compare([equal, level, again])[0]


def test_report_warns_that_local_steps_train_another_model(ran):
    loads, local = [16, 16, 16, 4], {"loop": "local", "every": "8"}
    equal = ran("equal", 13, SLOW, policy="equal", **local)
    level = ran("level", loads, SLOW, **local)
    assert "this model is not the one that a single process would have trained" in findings(level)[0]
    assert compare([equal, level])[0].endswith("with level, samples were processed 3.2x as fast.")
    rounds = ran("rounds", loads, SLOW, loop="round")
    assert "another model" not in findings(rounds)[0]
    said = compare([equal, rounds])[0]
    assert said.startswith(
        "These runs differ in the kind of steps between two exchanges (local steps and rounds)"
    )
    older = ran("older", 13, SLOW, policy="equal")
    assert "the same model" in compare([older, rounds])[0], "a record that does not tell is of rounds"


@guarantee(
    "Runs that differ in more than the policy are described one by one; curves leave out rounds of fewer "
    "samples and say how many."
)
def test_what_differs_beside_the_policy_is_not_put_down_to_it(ran):
    equal = ran("equal", 16, SLOW, policy="equal")
    twice = ran("twice", 8, np.tile(SLOW, 2))
    said = compare([equal, twice])
    assert said[0] == (
        "These runs differ in the number of workers (4 and 8), so they do not show which policy is faster."
    )
    assert not any("of an equal split" in line for line in said)
    assert said[0] in report.render_comparison([equal, twice])
    other = ran("other", 32, SLOW, model="lenet5", global_batch=128)
    assert compare([equal, other])[0].startswith(
        "These runs differ in the global batch (64 and 128) and the model (mlp and lenet5),"
    )


def test_runs_of_one_policy_go_by_their_places(ran, tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
    found = compare([ran(place, 16, SLOW) for place in ("one", "a/two", "b/two")])
    names = ["level (one)", f"level ({tmp_path}/a/two)", f"level ({tmp_path}/b/two)"]
    assert [line.split(": ")[0] for line in found[1:]] == names


def test_plain_baseline_that_wins_is_reported(ran):
    equal = ran("equal", [16] * 4, 0.001, policy="equal")
    bad = ran("bad", [28, 12, 12, 12], 0.001)
    said = "An equal split wasted 0 % of the cluster's time; no other policy was faster."
    assert compare([bad, equal])[0] == said


def test_one_slow_worker(ran):
    run = ran("run", 16, SLOW)
    assert slowness(run) == pytest.approx([1, 1, 1, 4])
    assert straggler_share(run).tolist() == [0, 0, 0, 1]
    sentences = findings(run)
    assert sentences[0] == "Worker 3 is 4.0x slower per sample than the others."
    assert sentences[1] == (
        "Worker 3 was last in every round. The median worker finished at 25 % of the slowest worker's time."
    )
    assert sentences[2] == (
        "The workers spent 56 % of their time waiting. The run processed 1,000 samples/s, which is 31 % of the "
        "workers' combined speed of 3,250 samples/s. With loads by measured speed, it would have taken 832 ms "
        "instead of 2.56 s."
    )
    assert "Every round was split equally." in sentences


def test_what_was_dropped_is_part_of_the_split(ran):
    """A rank that leaves out another number of samples in each round was given as many as the others."""
    left_out = np.zeros((40, 4), int)
    left_out[1:, 3] = 3 + np.arange(39) % 5
    left_out[7, 2] = 1  # never as many as in the first round, and once fewer of another worker
    left_out[0, 3] = 2
    run = ran("run", 16 - left_out, SLOW)
    run = replace(run, extras={"dropped_loads": left_out.tolist()})
    assert "Every round was split equally." in findings(run)
    assert summarize(run)["final_batches"] == (16 - left_out[-1]).tolist()


def test_overhead_is_not_taken_for_slowness(tmp_path, config):
    """Two equal workers of 1 ms a sample and 50 ms a round, one with few samples."""
    with Recorder.create(tmp_path / "run", config | {"workers": 2}) as recorder:
        for t in range(20):
            line(recorder, t, seconds=0.14, loads=[90, 10], compute=[0.14, 0.06], overhead=[0.05, 0.05])
    assert slowness(read(tmp_path / "run")) == pytest.approx([1, 1])
    assert "about equally fast" in said(read(tmp_path / "run"))


def test_a_worker_with_too_little_to_do(ran):
    run = ran("run", [20, 20, 20, 2], SLOW)
    assert "Worker 3 could have taken more samples: it waited 60 % of the time." in findings(run)
    equal = ran("equal", 16, SLOW)
    assert "could have taken more" not in said(equal)


def test_ties_go_to_the_lowest_rank(ran):
    run = ran("run", [16] * 4, 0.001)
    assert straggler_share(run).tolist() == [1, 0, 0, 0]
    assert "equally fast: the slowest takes 1.00x the time of the others per sample." in said(run)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_lasting_changes_are_found_and_spikes_are_not(ran, noise):
    random = np.random.default_rng(4)
    pace = np.full((120, 4), 0.001)
    pace[40:, 2] *= 4
    pace[80:, 2] /= 4
    pace[60, 0] *= 50  # a spike
    pace[100:103, 1] *= 10  # a short one
    pace *= np.exp(noise * random.standard_normal(pace.shape))
    found = changes(ran("run", 16, pace))
    assert [change.worker for change in found] == [2, 2]
    assert [change.round for change in found] == pytest.approx([40, 80], abs=0 if noise < 0.1 else 2)
    assert [np.log(change.ratio) for change in found] == pytest.approx(
        [np.log(4), -np.log(4)], abs=1.5 * noise + 1e-9
    )


@pytest.mark.parametrize("kind", ["normal", "exponential", "two-valued", "spikes"])
def test_noise_alone_is_no_change(ran, kind):
    random = np.random.default_rng(7)
    pace = {
        "normal": np.exp(0.4 * random.standard_normal((400, 8))),
        "exponential": random.exponential(size=(400, 8)) + 1e-3,
        "two-valued": 1.0 + 2 * (random.random((400, 8)) < 0.4),
        "spikes": 1.0 + 10 * (random.random((400, 8)) < 0.05),
    }[kind]
    assert changes(ran("run", 16, 0.001 * pace)) == []


def test_changes_in_words(ran):
    pace = np.full((120, 4), 0.001)
    pace[40:, 2] *= 4
    pace[80:, 2] /= 4
    run = ran("run", 16, pace)
    assert changes(run) == [ChangePoint(40, 2, pytest.approx(4)), ChangePoint(80, 2, pytest.approx(1 / 4))]
    sentences = findings(run)
    assert sentences[0] == "From round 40 on, worker 2 was 4.0x slower per sample than before."
    assert sentences[1] == "From round 80 on, worker 2 was 4.0x faster per sample than before."


def test_when_the_loads_settled(ran):
    loads = np.tile([24, 24, 24, 6], (60, 1))
    loads[:5] = [[19, 19, 20, 20], [20, 20, 20, 18], [21, 21, 20, 16], [22, 22, 22, 12], [23, 23, 23, 9]]
    run = ran("run", loads, SLOW)
    assert settled(run) == 5  # 9 of 78 samples are still 3.8 % of the batch away from 6
    assert "The loads settled after 5 rounds at 24, 24, 24 and 6 samples." in findings(run)
    moving = np.tile(np.arange(60)[:, None], (1, 4)) * [1, 1, 1, -3] + 200
    run = ran("moving", moving, SLOW)
    assert settled(run) is None
    assert "The loads never settled: the split was still changing when the run ended." in findings(run)


@pytest.mark.parametrize(
    ("late", "said"),
    [
        ((0, 0), "The split adapted to each change of speed at once."),
        ((1, 3), "The split adapted to each change of speed within 3 rounds (median 2)."),
        ((0,), "The split adapted to the change of speed at once."),
        ((2,), "The split adapted to the change of speed within 2 rounds."),
    ],
)
def test_how_soon_the_split_follows_a_change_of_speed(ran, late, said):
    """Worker 2, then worker 1 becomes four times slower; the split follows so many rounds later."""
    rounds = 40 * (len(late) + 1)
    pace, loads = np.full((rounds, 4), 0.001), np.tile([20, 20, 20, 20], (rounds, 1))
    for k, (who, after) in enumerate(zip((2, 1), late, strict=False)):
        pace[40 * (k + 1) : 40 * (k + 2), who] = 0.004
        loads[40 * (k + 1) + after : 40 * (k + 2) + after] = 25
        loads[40 * (k + 1) + after : 40 * (k + 2) + after, who] = 5
    found = [s for s in findings(ran("run", loads, pace)) if "adapted" in s]
    assert found == [said]


def test_a_change_that_the_split_never_followed_is_not_counted(ran):
    pace, loads = np.full((80, 4), 0.001), np.tile([20, 20, 20, 20], (80, 1))
    pace[40:, 2] = 0.004
    loads[40:, 2] -= np.arange(40) // 2
    loads[40:, 0] += np.arange(40) // 2
    found = findings(ran("run", loads, pace))
    assert not any("adapted" in sentence for sentence in found)


def test_the_loss_at_the_end_is_that_of_the_curve_and_the_mean_is_labelled(ran):
    run = ran("run", [16] * 4, 0.001, rounds=20, finish={"test_accuracy": 0.9})
    mean = np.mean(2 / np.arange(11, 21))
    assert findings(run)[-2:] == [
        f"The training loss fell from 2 in the first round to 0.1 in the last round, in 320 ms; its mean over the "
        f"last epoch is {mean:.3f}.",
        "The test accuracy is 90.0 %.",
    ]
    shown = " ".join(report.render(run).split())
    assert f"{mean:.3f}" in shown
    assert "training loss, mean of the last epoch; 0.1 in the last round" in shown


def test_odd_rounds_absences_and_a_resumed_run(write):
    pace = np.full((40, 4), 0.001)
    pace[17, 1] = 0.009
    pace[20:25, 3] = np.nan
    folder = write("run", 16, pace)
    with Recorder.create(folder, {}, resume=40):
        pass
    text = said(read(folder))
    assert "1 round took more than 3 times the median of 16 ms. The longest was round 17 with 144 ms." in text
    assert "Worker 3 was absent from 5 rounds, for the first time in round 20." in text
    assert "The run was resumed after 40 rounds." in text


def test_short_records_make_a_report(ran, tmp_path, config):
    Recorder.create(tmp_path / "none", config).close()
    assert findings(read(tmp_path / "none")) == ["No round was recorded."]
    for rounds, workers in ((1, 1), (1, 4), (3, 2), (30, 1)):
        run = ran(f"{rounds}-{workers}", [4] * workers, 1.0, rounds=rounds, losses=False)
        assert findings(run)
        assert changes(run) == []
    with Recorder.create(tmp_path / "absent", config) as recorder:
        for t in range(20):
            line(recorder, t, seconds=0, loads=[0] * 4, compute=[None] * 4)
    findings(read(tmp_path / "absent"))


def test_words():
    assert [number(x) for x in (0, 1234.5, 0.012345, 2.5, 99.95, 1e6, None, float("nan"))] == [
        "0", "1,230", "0.0123", "2.5", "100", "1,000,000", "–", "–"]  # fmt: skip
    assert [seconds(x) for x in (0, 2e-6, 0.064, 0.9996, 1.25, 119.4, 119.6, 200, 7500, None)] == [
        "0 s", "2 µs", "64 ms", "1 s", "1.25 s", "119 s", "2 min", "3 min 20 s", "2 h 5 min", "–"]  # fmt: skip
    assert [percent(x) for x in (0, 0.001, 0.5625, 0.997, 0.9999, 1, None)] == [
        "0 %", "under 1 %", "56 %", "99.7 %", "almost 100 %", "100 %", "–"]  # fmt: skip
    assert [times(x) for x in (1.25, 4, 9.99, 1234)] == ["1.25x", "4.0x", "10x", "1,234x"]
    assert [listing([]), listing([1]), listing([1, 2, 3])] == ["none", "1", "1, 2 and 3"]
    assert [plural(1, "round"), plural(1200, "round")] == ["1 round", "1,200 rounds"]


def test_all_of_the_package_writes_per_cent_in_one_form():
    """ "31 %" as ``percent`` writes it, never "31%", which a format such as ``:.0%`` would give."""
    formats = [
        f"{path}:{node.lineno}"
        for path in Path(paceline.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None
        and ast.unparse(node.format_spec).rstrip("'\"").endswith("%")
    ]  # fmt: skip
    assert formats == []


def test_slow_worker_is_named_beside_another_s_change(ran):
    pace = np.tile(SLOW, (120, 1))
    pace[40:, 1] *= 2
    run = ran("run", 16, pace)
    sentences = findings(run)
    # The median of the others is 1 ms in the first 40 rounds and 1, 1 and 2 ms after them.
    assert sentences[0] == "Worker 3 is 4.0x slower per sample than the others."
    assert sentences[1] == "From round 40 on, worker 1 was 2.0x slower per sample than before."
    moved = np.full((120, 4), 0.001)
    moved[:60, 0] = moved[60:, 2] = 0.004
    run = ran("moved", 16, moved)
    assert "slower per sample than the others" not in said(run), "nobody was slow all the time"


def test_a_worker_that_was_slow_in_a_part_of_a_short_run_is_not_called_equally_fast(ran):
    speeds = np.full((6, 4), 0.001)
    speeds[:4, 3] = 0.004
    run = ran("run", 16, speeds)
    assert slowness(run)[3] == pytest.approx(4.0)
    assert "equally fast" not in said(run)


def test_cost_of_an_event_is_beyond_the_median_of_20_rounds_without_events():
    costs = Costs()
    assert costs.of(3.0, ["worker 1 joined"]) == [{"what": "worker 1 joined", "seconds_lost": 0.0}]
    for length in (9.0, 9.0, *range(1, 21)):  # the newest 20 have the median 10.5
        assert costs.of(length, []) == []
    for _ in range(2):  # rounds with events do not count as usual
        assert [each["seconds_lost"] for each in costs.of(30.0, ["one", "other"])] == [19.5, 19.5]
    assert costs.of(10.0, ["one"])[0]["seconds_lost"] == 0.0


def lossy(folder, many=1):
    """A run of three workers that loses worker 1 in round 10 and gets it back in round 14, ``many`` times."""
    told = {}
    for first in range(10, 10 + 20 * many, 20):
        told[first] = [{"what": "worker 1 was killed by SIGKILL", "seconds_lost": 0.09}]
        told[first + 4] = [{"what": "worker 1 joined", "seconds_lost": 0.01}]
    away = {t for first in told for t in range(first, first + 4) if first + 4 in told}
    with Recorder.create(folder, {"policy": "level", "workers": 3, "global_batch": 60}) as recorder:
        for t in range(10 + 20 * many):
            loads = [30, 0, 30] if t in away else [20, 20, 20]
            compute = [0.03, None, 0.03] if t in away else [0.02, 0.02, 0.02]
            events = {"events": told[t]} if t in told else {}
            line(recorder, t, seconds=0.05, loads=loads, compute=compute, **events)
    return read(folder)


def test_names_of_workers_stand_in_sentences_after_their_numbers(tmp_path):
    lost = replace(lossy(tmp_path / "lost"), names={0: "gpu-a", 1: "gpu-b"})
    assert (
        "Worker 1 (gpu-b) was killed by SIGKILL in round 10; this cost 90 ms and no sample: workers 0 (gpu-a) and 2 "
        "ran all samples of the round." in findings(lost)
    )
    with Recorder.create(tmp_path / "slow", {"policy": "equal", "workers": 2, "global_batch": 2}) as recorder:
        for t in range(20):
            names = {"names": [None, ["old", "new"][t // 10]]} if t in (0, 10) else {}
            line(recorder, t, seconds=4.0, loads=[1, 1], compute=[1, 4], **names)
    assert findings(read(tmp_path / "slow"))[:2] == [
        "Worker 1 (new) is 4.0x slower per sample than the other.",
        "Worker 1 (new) was last in every round. The median worker finished at 62 % of the slowest worker's time.",
    ]


def test_seconds_between_rounds_are_in_one_sentence_of_their_own(tmp_path):
    with Recorder.create(tmp_path / "run", {"policy": "equal", "workers": 2, "global_batch": 2}) as recorder:
        for t in range(20):
            pause = 0.5 * (t // 10)  # an evaluation after the first ten rounds
            when = {"epoch": t // 10, "time": 0.1 * (t + 1) + pause, "seconds": 0.1}
            line(recorder, t, **when, loads=[1, 1], compute=[0.1, 0.1], loss=2 - t / 20)
    run = read(tmp_path / "run")
    assert summarize(run)["seconds"] == pytest.approx(2.0)
    assert "in 2 s;" in said(run)
    assert (
        "The run spent another 500 ms between its rounds, for example on evaluation and checkpoints; its time and "
        "its samples/s leave that out." in findings(run)
    )
    assert "2.5 s" not in said(run)
    assert "between its rounds" not in said(replace(run, time=np.cumsum(run.seconds)))


@guarantee(
    "The live page, the report, a comparison and the trace name lost workers, their rounds and what they "
    "cost."
)
def test_lost_workers_are_in_findings_charts_comparisons_and_the_trace(tmp_path):
    run, many = lossy(tmp_path / "one"), lossy(tmp_path / "many", 7)
    assert (
        "Worker 1 was killed by SIGKILL in round 10; this cost 90 ms and no sample: workers 0 and 2 ran all "
        "samples of the round." in findings(run)
    )
    assert (
        "7 workers were lost or left during the run: 630 ms lost in all, 90 ms of it in round 10; no sample was lost."
        in (findings(many))
    )
    one = "1 worker was lost or left during the run: 90 ms lost in round 10."
    assert [line.endswith(one) for line in compare([run, many])[1:]] == [True, False]
    page = report.render_comparison([run, many])
    assert page.count('class="lost"') == 2
    assert "vertical lines: workers were lost or left in round 10, 30, 50, 70, 90, 110 and 130" in page
    assert page.count("was killed by SIGKILL in round 10") == 1  # of the other run, there are too many
    names = {event["name"] for event in trace_of(run)}
    assert {"worker 1 was killed by SIGKILL, 0.09 s lost", "worker 1 joined, 0.01 s lost"} <= names


def trace_of(run):
    return json.loads(trace.write(run).read_text())["traceEvents"]


def test_workers_that_ran_out_of_memory_are_named(ran):
    run = ran("run", 16, SLOW, rounds=3)
    run.extras["ran_out"] = [[0, 2, 0, 0], None, [0, 1, 0, 1]]
    assert "Worker 1 ran out of memory 3 times, and ran those samples again in halves." in said(run)
    assert "Worker 3 ran out of memory 1 time," in said(run)
