import functools
import json
import warnings

import numpy as np
import pytest

from paceline.coded import Problem, ShiftedExponential, plan, read_plan
from support.commands import assert_refused, paceline

GOOD = "master,worker,u,a\nx,v,1,1\nx,w,2,0.5\nx,z,4,0.25\ny,v,1,1\ny,w,3,0.4\ny,z,2,0.5\n"


run = functools.partial(paceline, "plan")


@pytest.fixture
def workers(tmp_path):
    file = tmp_path / "workers.csv"
    file.write_text(GOOD)
    return file


def test_json_is_the_plan_in_python(workers):
    result = run(workers, "--rows", "100", "--assign", "exact", "--json", "-")
    u = np.array([[1.0, 2, 4], [1, 3, 2]])
    a = np.array([[1, 0.5, 0.25], [1, 0.4, 0.5]])
    problem = Problem(("x", "y"), ("v", "w", "z"), np.array([100.0, 100.0]), ShiftedExponential(u, a))
    assert json.loads(result.stdout) == plan(problem, "exact").to_json()


def test_rows_for_each_master_and_for_the_others(workers):
    result = run(workers, "--rows", "100", "--rows", "y=40", "--json", "-")
    assert [m["rows"] for m in json.loads(result.stdout)["masters"]] == [100, 40]


@pytest.mark.parametrize("assign", ["uniform", "simple", "iterated", "exact", "probabilistic"])
def test_every_assignment_prints_a_table_and_writes_its_file(workers, tmp_path, assign):
    file = tmp_path / "plan.json"
    result = run(workers, "--rows", "100", "--assign", assign, "--json", file)
    assert result.status == 0, result.stderr
    written = json.loads(file.read_text())
    assert f"{written['t_star']:.6g}" in result.stdout
    for master in written["masters"]:
        assert sum(w["rows_assigned"] for w in master["workers"]) >= 100


def test_plan_explains_its_columns(workers):
    coded = run(workers, "--rows", "100", "--assign", "exact").stdout
    assert "t* is the time at which the expected number of finished rows reaches L." in " ".join(
        coded.split()
    )
    assert coded.startswith("Coded plan exact: the last of 2 masters, "), "the answer comes first"
    uncoded = run(workers, "--rows", "90", "--assign", "uniform", "--uncoded").stdout
    assert "t* is the mean time until all workers of a master are done." in " ".join(uncoded.split())
    late = run(workers, "--rows", "100", "--assign", "exact", "--deadline", "200").stdout
    assert "t* is the deadline. L is the number of rows that a master needs." in " ".join(late.split())


def test_uncoded_has_no_redundancy(workers):
    result = run(workers, "--rows", "90", "--assign", "uniform", "--uncoded", "--json", "-")
    for master in json.loads(result.stdout)["masters"]:
        assert master["redundancy"] == pytest.approx(1)
        assert sum(w["rows_assigned"] for w in master["workers"]) == 90


def test_fit_first(tmp_path):
    rng = np.random.default_rng(0)
    file = tmp_path / "times.csv"
    lines = [f"x,{w},50,{50 * (0.5 + rng.exponential(0.5))}" for w in "vw" for _ in range(2000)]
    file.write_text("master,worker,rows,milliseconds\n" + "\n".join(lines) + "\n")
    result = run("--fit", file, "--rows", "100", "--json", "-")
    fitted = json.loads(result.stdout)["t_star"]
    u, a = np.full((1, 2), 2.0), np.full((1, 2), 0.5)
    true = plan(Problem(("x",), ("v", "w"), np.array([100.0]), ShiftedExponential(u, a)))
    assert fitted == pytest.approx(true.t_star[0], rel=0.05)
    assert "±" in run("--fit", file, "--rows", "100").stdout


def test_deadline_prints_the_probability(workers):
    result = run(workers, "--rows", "100", "--deadline", "100")
    assert "x: done by 100 ms with probability 0." in result.stdout
    assert_refused(run(workers, "--rows", "100", "--deadline", "-1"), "deadline=-1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "with probability 1" in run(workers, "--rows", "100", "--deadline", "1e99").stdout


def test_a_deadline_that_cannot_be_met_is_refused(workers, tmp_path):
    out = tmp_path / "plan.json"
    assert_refused(run(workers, "--rows", "100", "--deadline", "3", "--json", out), "give a later deadline")
    assert not out.exists()


def test_plan_that_survives_prints_how_many_workers_may_be_lost(tmp_path):
    file, out = tmp_path / "workers.csv", tmp_path / "plan.json"
    file.write_text("master,worker,u,a\n" + "".join(f"x,w{n},{n + 1},{1 / (n + 1)}\n" for n in range(4)))
    arguments = (file, "--rows", "100", "--json", out)
    assert "whichever they are: x 0." in " ".join(run(*arguments).stdout.split())
    shown = run(*arguments, "--redundancy", "2", "--survive", "1").stdout
    assert "whichever they are: x 1." in " ".join(shown.split())
    made = read_plan(out)
    assert made.redundancy[0] >= 2 - 1e-9
    assert made.survive == made.may_lose[0] == 1
    for lost in range(4):
        assert np.delete(made.rows_assigned[0], lost).sum() >= 100
    assert_refused(run(*arguments, "--survive", "4"), "add workers")
    assert_refused(run(*arguments, "--survive", "1", "--deadline", "99"), "leave out --survive")


def test_fewer_rows_than_workers_are_warned_of(workers):
    assert "master 'y' has L = 1 for 2 workers" in run(workers, "--rows", "1", "--assign", "exact").stderr
    assert "warning" not in run(workers, "--rows", "9", "--assign", "exact").stderr


def test_probabilistic_plan_that_may_never_finish_warns(workers):
    shared = run(workers, "--rows", "1000", "--assign", "probabilistic", "--json", "-")
    assert "warning: master 'x' is never done with probability" in shared.stderr
    assert "never" not in run(workers, "--rows", "1000", "--assign", "exact", "--json", "-").stderr


@pytest.mark.parametrize("family", ["weibull", "empirical"])
def test_other_families_are_planned_too(tmp_path, family):
    rng = np.random.default_rng(1)
    file = tmp_path / "times.csv"
    lines = [f"x,{w},50,{50 * (0.5 + rng.weibull(2))}" for w in "vw" for _ in range(200)]
    file.write_text("master,worker,rows,milliseconds\n" + "\n".join(lines) + "\n")
    result = run("--fit", file, "--family", family, "--rows", "100", "--json", "-")
    (master,) = json.loads(result.stdout)["masters"]
    assert sum(w["rows_assigned"] for w in master["workers"]) >= 100
    # both workers alike: each brings half of the rows, and F(z) / z is best near the end of a light tail
    assert 100 * 0.5 * 1.1 / 2 < master["t_star"] < 100 * 2.5 / 2


def test_columns_for_communication(tmp_path):
    file = tmp_path / "workers.csv"
    file.write_text("master,worker,u,a,latency,gamma\nx,v,1,1,0,5\nx,w,2,0.5,10,5\n")
    with_both = json.loads(run(file, "--rows", "100", "--json", "-").stdout)["t_star"]
    file.write_text("master,worker,u,a\nx,v,1,1\nx,w,2,0.5\n")
    assert with_both > json.loads(run(file, "--rows", "100", "--json", "-").stdout)["t_star"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD.replace("y,z,2,0.5\n", ""), "no line for master 'y' and worker 'z'"),
        (GOOD + "x,v,1,1\n", "line 8.*already on line 2"),
        (GOOD.replace("x,w,2", "x,w,0"), "line 3: u is '0'"),
        (GOOD.replace("x,w,2,0.5", "x,w,2,-1"), "line 3: a is '-1'"),
        (GOOD.replace("x,w,2,0.5", "x,w,2,nan"), "line 3: a is 'nan'"),
        (GOOD.replace("x,w,2,0.5", "x,w,2"), "line 3: expected 4 fields"),
        (GOOD.replace("x,w,2,0.5", "x,w,two,0.5"), "line 3: u is 'two'"),
        (GOOD.replace("x,w,", "x,,"), "line 3: the worker has no name"),
        ("master,worker,u,a\n", "no lines below"),
        ("master,worker,u\nx,v,1\n", "has columns master, worker, u: expected"),
        ("", "has columns none"),
        ("master,worker,u,a\nx,v,1,1\ny,v,1,1\n", "1 workers for 2 masters"),
    ],
)
def test_bad_files_raise_and_nothing_is_written(tmp_path, text, says):
    file, out = tmp_path / "workers.csv", tmp_path / "plan.json"
    file.write_text(text)
    result = run(file, "--rows", "100", "--json", out)
    assert_refused(result, says)
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rows", "0"], "0 rows for master"),
        (["--rows", "ten"], "--rows ten"),
        (["--rows", "x=10"], "no rows for master 'y'"),
        (["--rows", "10", "--rows", "q=10"], "'q', which is not among"),
        (["--rows", "10", "--rows", "10"], "given twice"),
        (["--rows", "10", "--assign", "best"], "expected one of"),
        (["--rows", "10", "--assign", "probabilistic", "--uncoded"], "uncoded"),
        (["--rows", "10", "--json", "/no/such/folder/plan.json"], "cannot write"),
        (
            ["--rows", "10", "--family", "shifted-exponential"],
            "is for measured times: expected --fit TIMES.csv",
        ),
        ([], "no rows"),
    ],
)
def test_bad_options_raise_one_error(workers, arguments, says):
    result = run(workers, *arguments)
    assert_refused(result, says)


def test_no_file_a_missing_file_and_two_files():
    for arguments in ([], ["/no/such.csv"], ["a.csv", "--fit", "b.csv"]):
        assert_refused(run(*arguments, "--rows", "10"), "expected|cannot read")
