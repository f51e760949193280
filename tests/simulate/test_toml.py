import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from paceline import PacelineError
from paceline.data import traces
from paceline.simulate import dealt, of_trace, read, run, scenario, timing
from paceline.simulate.timing import MODELS, Ar1, Constant, Replay
from support.guarantees import guarantee

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "scenarios").glob("*.toml"))
WORKER = "[[workers]]\nseconds_per_sample = 0.001\n"


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "scenario.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs(path):
    what = dataclasses.replace(read(path), rounds=75, realizations=2)
    if what.samples is not None:
        by_cost = dealt.run(dataclasses.replace(what, rounds=5), ["level"])
        assert by_cost.of_bound("level", "by cost") > by_cost.of_bound("level", "by count")
        return
    outcome = run(what, what.policies)
    for played in outcome.policies.values():
        assert np.all(played.latency >= outcome.oracle * (1 - 1e-9))


def test_the_fields_arrive(file):
    path = file(
        """
        global_batch = 100
        rounds = 7
        fractional = true
        events = [{ round = 3, worker = 1, kind = "freeze", rounds = 2 }]
        [[workers]]
        name = "a"
        count = 2
        seconds_per_sample = { model = "ar1", mean = 0.5, sd = 0.2 }
        overhead = 0.25
        most = 60
        link = { megabytes = 1, mbps = 8, changes = [{ round = 2, mbps = 4 }] }
        [[workers]]
        seconds_per_sample = 1
        """
    )
    what = read(path)
    assert (what.name, what.size, what.global_batch, what.rounds) == ("scenario", 3, 100, 7)
    assert what.workers[0].seconds_per_sample == Ar1(0.5, sd=0.2)
    assert what.workers[0].overhead == Constant(0.25)
    assert what.workers[0].link.seconds(0) == 1.0
    assert what.workers[0].link.seconds(1) == 2.0
    assert what.events[0].rounds == 2
    assert what.cluster().most.tolist() == [60, 60, 100]


def test_traces_of_workers_lie_beside_the_scenario(file, tmp_path):
    pace = np.arange(1.0, 13).reshape(4, 3) / 1000
    traces.write(tmp_path / "t.csv", traces.Trace(pace, pace / 10))
    source = '{ model = "trace", file = "t.csv", workers = [2, 0] }'
    path = file(
        f"rounds = 4\n{WORKER}[[workers]]\ncount = 2\nseconds_per_sample = {source}\noverhead = {source}"
    )
    played = read(path).workers[1]
    assert isinstance(played.seconds_per_sample, Replay)
    assert np.array_equal(played.seconds_per_sample.table, pace[:, [2, 0]])
    assert np.array_equal(played.overhead.table, pace[:, [2, 0]] / 10)


@guarantee(
    "Damaged images, traces and scenarios are refused with one message, traces with the line's number."
)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no workers"),
        ("workers = []", "no workers"),
        ("rounds = 5", "no workers"),
        ("not toml at all", "is not valid TOML"),
        (f"speed = 1\n{WORKER}", "unknown field 'speed'"),
        (f"{WORKER}colour = 'red'", r"workers\[0\]: unknown field 'colour'"),
        ("[[workers]]\ncount = 2", "seconds_per_sample is missing"),
        ("[[workers]]\nseconds_per_sample = -0.1", "seconds=-0.1: expected 0 to 1e9 seconds"),
        ("[[workers]]\nseconds_per_sample = 0", "seconds_per_sample=0: expected 1e-12 to 1e9"),
        ("[[workers]]\nseconds_per_sample = 1e308", "seconds=1e\\+308: expected 0 to 1e9"),
        (f"[[workers]]\nseconds_per_sample = {10**400}", "a number of 401 digits"),
        (f"[[workers]]\nseconds_per_sample = 1{'0' * 5000}", "is not valid TOML"),
        (f"x = {'[' * 100_000}", "is not valid TOML"),
        ("[[workers]]\nseconds_per_sample = { model = 'pareto', least = 1e308 }", "least=1e\\+308"),
        (f"{WORKER}overhead = 1e10", "seconds=1e\\+10"),
        (f"{WORKER}knee = 1e300", "knee=1e\\+300: expected 0 to 1,000,000,000"),
        (f"{WORKER}noise = 1e300", "noise=1e\\+300"),
        (f"{WORKER}memory = 1e-300", "memory=1e-300"),
        (f"{WORKER}count = {10**9}", "count=1e\\+09: expected 1 to 10,000,000"),
        (f"global_batch = {10**12}\n{WORKER}", "global_batch=1e\\+12"),
        (f"global_batch = -1\n{WORKER}", "global_batch=-1"),
        (f"rounds = {10**8}\nrealizations = 10\n{WORKER}", "1,000,000,000 rounds of realizations"),
        (f"realizations = {10**6}\n{WORKER}count = 100", "100,000,000 workers of realizations"),
        (f"rounds = {10**7}\n{WORKER}count = 100", "1,000,000,000 rounds of workers"),
        (f"decision_delay = {10**12}\n{WORKER}", "decision_delay=1e\\+12"),
        (f"give_up_seconds = 1e300\n{WORKER}", "give_up_seconds=1e\\+300"),
        ("[[workers]]\nseconds_per_sample = nan", "seconds=nan"),
        ("[[workers]]\nseconds_per_sample = 'fast'", "expected seconds, or a table"),
        ("[[workers]]\nseconds_per_sample = { model = 'magic' }", "unknown model 'magic'"),
        ("[[workers]]\nseconds_per_sample = { model = 'ar1', mean = -1 }", "mean=-1"),
        ("[[workers]]\nseconds_per_sample = { model = 'ar1', mean = 1, rho = 1 }", "rho=1"),
        ("[[workers]]\nseconds_per_sample = { model = 'ar1', mean = true }", "expected a number"),
        ("[[workers]]\nseconds_per_sample = { model = 'onoff', seconds = 1, factor = 2, on = 3 }", "on=3"),
        ("[[workers]]\nseconds_per_sample = { model = 'uniform', low = 2, high = 1 }", "no less than low"),
        ("[[workers]]\nseconds_per_sample = { model = 'trace', file = 'gone.csv' }", "cannot read the trace"),
        (f"{WORKER}count = 0", "count=0: expected 1 to 10,000,000"),
        (f"{WORKER}count = 1.5", "expected a whole number"),
        (f"{WORKER}noise = -1", "noise=-1"),
        (f"{WORKER}most = 5\nleast = 9", "most=5"),
        (f"global_batch = 100\n{WORKER}most = 60", "40 short"),
        (f"global_batch = 100\n{WORKER}least = 101", "least 101"),
        (f"draw = 4\n{WORKER}most = 60", "give counts instead"),
        (f"rounds = 0\n{WORKER}", "rounds=0"),
        (f"piece_seconds = 0\n{WORKER}", "piece_seconds=0: expected 1e-12 to 1e9"),
        (f"rounds = true\n{WORKER}", "expected a whole number"),
        (f"seed = -1\n{WORKER}", "seed=-1"),
        (f"fractional = 1\n{WORKER}", "expected true or false"),
        (f"policies = 'level'\n{WORKER}", "expected a list"),
        (f"events = [{{ round = 1, worker = 4, kind = 'die' }}]\n{WORKER}", "there is no worker 4"),
        (f"events = [{{ round = 1, worker = 0, kind = 'nap' }}]\n{WORKER}", "kind='nap'"),
        (f"events = [{{ round = 0, worker = 0, kind = 'die' }}]\n{WORKER}", "round=0"),
        (f"events = [{{ round = 3, worker = 0, kind = 'die' }}]\n{WORKER}", "no worker is left"),
        (f"{WORKER}link = {{ megabytes = 1, mbps = 0 }}", "mbps=0"),
        (f"{WORKER}link = 3", "expected a table"),
    ],
)
def test_mistakes_raise_one_error(file, text, says):
    path = file(text)
    with pytest.raises(PacelineError, match=says) as told:
        read(path)
    assert str(path) in str(told.value) or "gone.csv" in str(told.value)
    assert "\n" not in str(told.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(PacelineError, match="cannot read the scenario"):
        read(tmp_path / "none.toml")
    with pytest.raises(PacelineError, match="cannot read the trace"):
        of_trace(tmp_path / "none.csv")


def test_every_field_and_model_is_documented():
    page = (ROOT / "docs" / "simulate.md").read_text()
    names = ("Scenario", "WorkerClass", "Link", "BandwidthChange", "Event", "Samples")
    for kind in (*(getattr(scenario, name) for name in names), *MODELS.values()):
        for field in dataclasses.fields(kind):
            entry = rf"^ *(\w+, )*{field.name}(, \w+)*: "  # of the docstring, which the page's link leads to
            found = f"`{field.name}`" in page or re.search(entry, kind.__doc__ or "", re.MULTILINE)
            assert found, f"{kind.__name__}.{field.name}"
    for name in (*MODELS, "trace"):
        assert f'`"{name}"`' in page
    assert timing.MODELS
