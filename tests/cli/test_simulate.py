import json
from pathlib import Path

import numpy as np
import pytest

from paceline import cli
from paceline.cli.output import write_json
from paceline.data import traces
from paceline.runs.words import seconds, times

ROOT = Path(__file__).parents[2]
MIXED = ROOT / "examples" / "scenarios" / "mixed.toml"
FIELDS = {
    "total_seconds",
    "seconds_at",
    "idle_share",
    "oracle_ratio",
    "regret",
    "regret_bound",
    "decide_seconds",
    "latency",
    "shares",
}


@pytest.fixture
def trace(tmp_path):
    pace = np.random.default_rng(0).uniform(0.001, 0.004, (12, 3))
    return traces.write(tmp_path / "speeds.csv", traces.Trace(pace, pace / 2))


def simulate(*arguments):
    return cli.run(["simulate", *map(str, arguments)])


def test_json_has_every_figure_of_every_policy(capsys):
    names = ["equal", "dolbie:alpha=0.001", "abs:window=3,reading=share"]
    asked = [word for name in names for word in ("--policy", name)]
    assert simulate(MIXED, *asked, "--rounds", 40, "--realizations", 3, "--json", "-") == 0
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert list(told["policies"]) == names
    for figures in told["policies"].values():
        assert set(figures) >= FIELDS
        assert list(figures["seconds_at"]) == ["1", "10", "40"]
        assert np.shape(figures["latency"]) == (40,)
        assert np.shape(figures["shares"]) == np.shape(figures["mean_shares"]) == (40, 30)
        assert np.sum(figures["shares"], axis=1) == pytest.approx(1)
        assert figures["oracle_ratio"] >= 1
        assert figures["confidence_95"]["total_seconds"] > 0
    bounds = {name: figures["regret_bound"] for name, figures in told["policies"].items()}
    assert bounds["equal"] is None
    assert bounds["dolbie:alpha=0.001"] > told["policies"]["dolbie:alpha=0.001"]["regret"]
    assert told["seed"] == 0
    assert told["scenario"]["rounds"] == 40
    assert told["version"]
    assert "dolbie" in shown.err  # the table, for people, beside the figures


def one_slow(folder, others=0.001, slow=0.004):
    """A trace of 30 rounds in which the last of three workers is slow."""
    pace = np.tile([others, others, slow], (30, 1))
    return traces.write(folder / "slow.csv", traces.Trace(pace, np.zeros_like(pace)))


def test_the_verdict_comes_first_and_agrees_with_the_figures(tmp_path, capsys):
    trace = one_slow(tmp_path)
    asked = ("--policy", "equal", "--policy", "level", "--policy", "optimum", "--json", "-")
    assert simulate("--trace", trace, "--global-batch", 96, *asked) == 0
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    best, equal = (told["policies"][name]["total_seconds"] for name in ("level", "equal"))
    gain = equal / best
    verdict = (
        f"level is the fastest: it takes {seconds(best)}, which is "
        f"{times(told['policies']['level']['oracle_ratio'])} the least possible time, and is {times(gain)} as fast "
        "as equal."
    )
    assert gain > 1.1
    assert told["verdict"] == verdict
    assert " ".join(shown.err.split()).startswith(verdict)


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        (("level",), "level takes "),
        (("optimum", "level"), "level takes "),
        (("equal", "abs:window=3,reading=share"), "No policy is faster than equal: it takes "),
        (("level", "dolbie"), "level is the fastest: it takes "),
    ],
)
def test_the_verdict_where_there_is_less_to_compare(tmp_path, capsys, policies, said):
    trace = one_slow(tmp_path, slow=0.001 if "equal" in policies else 0.004)
    asked = [word for name in policies for word in ("--policy", name)]
    assert simulate("--trace", trace, "--global-batch", 96, *asked, "--json", "-") == 0
    assert said in json.loads(capsys.readouterr().out)["verdict"]


def test_figures_for_experts_are_shown_on_demand(tmp_path, capsys):
    trace = one_slow(tmp_path)
    assert simulate("--trace", trace, "--global-batch", 96, "--policy", "level") == 0
    shown = capsys.readouterr().out
    head = shown[shown.index("\n\n") : shown.index("───")].splitlines()
    assert {"policy", "total", "possible", "waiting", "round", "1", "10", "(s)"} <= set(
        " ".join(head).split()
    )
    assert "regret" not in shown
    assert len(head[-1].rstrip()) <= 60
    assert simulate("--trace", trace, "--global-batch", 96, "--policy", "level", "--verbose") == 0
    assert "regret" in capsys.readouterr().out


def test_several_scenarios_are_played_one_after_another(tmp_path, capsys):
    short = ("--rounds", 6, "--realizations", 2, "--policy", "equal", "--policy", "level")
    gpus = MIXED.with_name("gpus.toml")
    assert simulate(MIXED, gpus, *short, "--plot", tmp_path / "p", "--json", tmp_path / "both.json") == 0
    told = json.loads((tmp_path / "both.json").read_text())
    assert [each["scenario"]["name"] for each in told] == ["mixed", "GPUs"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"mixed: {told[0]['verdict']}"
    assert lines[1] == f"GPUs: {told[1]['verdict']}"
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["1-mixed", "2-GPUs"]
    assert simulate(MIXED, gpus, "--learn") == 2
    assert "2 scenarios were given; expected one with --learn" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_figures(tmp_path):
    told = []
    for seed in (1, 1, 2):
        file = tmp_path / "out.json"
        assert simulate(MIXED, "--policy", "level", "--rounds", 9, "--seed", seed, "--json", file) == 0
        figures = json.loads(file.read_text())["policies"]["level"]
        told.append({name: figures[name] for name in ("latency", "shares", "total_seconds")})
    assert told[0] == told[1] != told[2]


def test_a_trace_is_played_whole_or_in_part(trace, tmp_path):
    file = tmp_path / "out.json"
    assert simulate("--trace", trace, "--policy", "equal", "--global-batch", 30, "--json", file) == 0
    told = json.loads(file.read_text())
    assert told["scenario"]["rounds"] == 12
    pace, overhead = traces.read(trace)
    assert told["policies"]["equal"]["latency"] == pytest.approx((overhead + 10 * pace).max(1))
    assert simulate("--trace", trace, "--rounds", 5, "--json", file) == 0
    assert json.loads(file.read_text())["scenario"]["rounds"] == 5


def test_pictures(trace, tmp_path):
    pytest.importorskip("matplotlib")
    assert simulate("--trace", trace, "--plot", tmp_path / "p") == 0
    made = sorted(path.name for path in (tmp_path / "p").iterdir())
    assert made == ["latency.png", "regret.png", "shares.png", "total.png"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "expected one of the two"),
        ([MIXED, "--trace", "x.csv"], "expected one of the two"),
        (["nowhere.toml"], "cannot read the scenario"),
        ([MIXED, "--policy", "nobody"], "'nobody' is unknown"),
        ([MIXED, "--policy", "dolbie:alpha=2"], "alpha=2"),
        ([MIXED, "--rounds", "0"], "rounds=0"),
        ([MIXED, "--seed", "-3"], "seed=-3"),
        ([MIXED, "--global-batch", "0"], "global_batch=0"),
        ([MIXED, "--json", "/nowhere/x.json", "--rounds", "2"], "cannot write"),
        ([MIXED, "--plot", MIXED], "it is a file; choose a place"),
    ],
)
def test_mistakes_exit_with_2(capsys, arguments, says):
    assert simulate(*arguments) == 2
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("round,worker,seconds_per_sample\n0,0,1\n", "no column overhead_seconds"),
        ("round,worker,seconds_per_sample,overhead_seconds\n0,0,1,0\n1,0,1,0\n", "only 1 worker"),
        ("round,worker,seconds_per_sample,overhead_seconds\n0,0,nan,0\n0,1,nan,0\n", "no worker"),
    ],
)
def test_bad_traces_exit_with_2(capsys, tmp_path, rows, says):
    file = tmp_path / "t.csv"
    file.write_text(rows)
    assert simulate("--trace", file) == 2
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told
    assert str(file) in told


def test_more_rounds_than_the_trace_has(capsys, trace):
    assert simulate("--trace", trace, "--rounds", 13) == 2
    assert "the trace has 12" in capsys.readouterr().err


def test_figures_that_json_has_no_numbers_for_are_null(capsys):
    write_json(
        "-", {"a": float("inf"), "b": [float("nan"), 1.5], "c": {"d": (-float("inf"), "inf", None, 2)}}
    )
    assert json.loads(capsys.readouterr().out) == {
        "a": None,
        "b": [None, 1.5],
        "c": {"d": [None, "inf", None, 2]},
    }


def test_one_policy_is_learned_with(capsys):
    assert simulate(MIXED, "--learn", "--policy", "level", "--policy", "equal") == 2
    assert "--policy was given 2 times; expected it once with --learn" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [("--realizations", 2), ("--whole",), ("--fractional",), ("--decision-delay", 1), ("--verbose",)],
)
def test_option_that_learning_does_not_heed_is_refused(capsys, option):
    assert simulate(MIXED, "--learn", *option) == 2
    assert f"{option[0]} is for rounds that are played, and --learn trains for" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "said"), [("--rounds", "rounds=0: expected"), ("--seed", "")])
def test_error_about_an_option_does_not_name_the_file(capsys, option, said):
    value = 2**70 if option == "--seed" else 0
    assert simulate(MIXED, "--realizations", 1, "--policy", "equal", option, value) == (2 if said else 0)
    assert capsys.readouterr().err.startswith(f"paceline: {said}" if said else "")
