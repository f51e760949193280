"""Problems of masters and workers by hand: what they hold, and the CSV files that they are read from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import PacelineError
from paceline.coded import (
    Empirical,
    Problem,
    ShiftedExponential,
    Transmitted,
    Weibull,
    random_problem,
    read_times,
)
from paceline.coded.problem import Observations, problem_from_json, read_problem, read_table, rows_for

PAIRS = "master,worker,u,a\none,x,2,0.5\none,y,4,0.25\ntwo,x,1,1\ntwo,y,3,0.3\n"


def write(folder: Path, text: str | bytes) -> Path:
    file = folder / "pairs.csv"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def test_problem_is_read_from_a_table_of_pairs(tmp_path: Path) -> None:
    problem = read_problem(write(tmp_path, PAIRS), {"one": 10, "": 20})
    assert (problem.masters, problem.workers, problem.shape) == (("one", "two"), ("x", "y"), (2, 2))
    assert problem.rows.tolist() == [10.0, 20.0]
    assert isinstance(problem.delay, ShiftedExponential)
    assert (problem.delay.u.tolist(), problem.delay.a.tolist()) == ([[2, 4], [1, 3]], [[0.5, 0.25], [1, 0.3]])
    assert problem.latency is None
    assert problem.wait.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_latency_and_transmission_are_read_where_the_table_has_them(tmp_path: Path) -> None:
    text = "\ufeffmaster, worker, u, a, latency, gamma\none, x, 2, 0.5, 0, 8\n\none, y, 4, 0.25, 3, 9\n"
    problem = read_problem(write(tmp_path, text), 10)
    assert isinstance(problem.delay, Transmitted)
    assert problem.delay.gamma.tolist() == [[8, 9]]
    assert problem.latency is not None
    assert problem.latency.tolist() == problem.wait.tolist() == [[0.0, 3.0]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"master,worker,u,a\n\xff\xfe", "cannot read .*; give a CSV file with master, worker, u, a"),
        ("", "has columns none: expected master, worker, u, a and, if known, latency, gamma"),
        ("master,worker,u\none,x,2\n", "has columns master, worker, u: expected master, worker, u, a"),
        ("master,worker,u,a\n", "has no lines below its header"),
        ("master,worker,u,a\none,x,2\n", "line 2: expected 4 fields, as many as the header has"),
        ("master,worker,u,a\none,x,2,3,4\n", "line 2: expected 4 fields"),
        ("master,worker,u,a\none,x,2,0\n", "line 2: a is '0', expected a positive, finite number"),
        ("master,worker,u,a\none,x,inf,1\n", "line 2: u is 'inf', expected a positive"),
        ("master,worker,u,a\none,x,b,1\n", "line 2: u is 'b', expected a positive"),
        (
            "master,worker,u,a,latency\none,x,1,1,-1\n",
            "latency is '-1', expected a finite number of 0 or more",
        ),
        ("master,worker,u,a\none, ,2,1\n", "line 2: the worker has no name"),
        (
            "master,worker,u,a\none,x,2,1\none,x,3,1\n",
            "line 3: master 'one' and worker 'x' are already on line 2",
        ),
        (
            "master,worker,u,a\none,x,2,1\ntwo,y,3,1\n",
            "no line for master 'one' and worker 'y': expected one for",
        ),
    ],
)
def test_table_that_is_no_problem_raises(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        read_problem(write(tmp_path, text), 10)
    with pytest.raises(
        PacelineError, match=r"cannot read .*none\.csv: No such file or directory; give a CSV"
    ):
        read_problem(tmp_path / "none.csv", 10)


def test_lines_of_a_table_keep_their_numbers(tmp_path: Path) -> None:
    lines = read_table(write(tmp_path, "a,b\n1,2\n\n3,4\n"), ("a",))
    assert lines == [{"a": "1", "b": "2", "line": "2"}, {"a": "3", "b": "4", "line": "4"}]


def test_rows_are_one_number_or_one_for_each_name() -> None:
    assert rows_for(("a", "b"), 5).tolist() == [5.0, 5.0]
    assert rows_for(("a", "b"), {"b": 7, "": 5}).tolist() == [5.0, 7.0]
    with pytest.raises(PacelineError, match="rows for master 'c', which is not among a, b"):
        rows_for(("a", "b"), {"c": 7, "": 5})
    with pytest.raises(PacelineError, match="no rows for master 'b': give --rows b=L"):
        rows_for(("a", "b"), {"a": 7})


def delay(masters: int, workers: int) -> ShiftedExponential:
    return ShiftedExponential(np.ones((masters, workers)), np.ones((masters, workers)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"masters": ()}, "no masters: expected at least one"),
        ({"workers": ()}, "no workers: expected at least one"),
        ({"workers": ("x", "x")}, "worker 'x' is named twice"),
        ({"masters": ("a", "a")}, "master 'a' is named twice"),
        ({"workers": ("x", "y", "z")}, r"delay parameters of shape \(2, 2\): expected 2 masters x 3 workers"),
        ({"workers": ("x",), "delay": delay(2, 1)}, "1 workers for 2 masters: .*; add 1"),
        ({"rows": np.ones(3)}, r"rows of shape \(3,\): expected one number for each of the 2 masters"),
        ({"rows": np.array([1.0, 0.0])}, "0 rows for master 'b': expected a whole number of at least 1"),
        ({"rows": np.array([1.5, 1.0])}, "1.5 rows for master 'a'"),
        ({"rows": np.array([1.0, np.inf])}, "inf rows for master 'b'"),
        ({"delay": delay(1, 2)}, r"delay parameters of shape \(1, 2\): expected 2 masters x 2 workers"),
        ({"latency": np.ones((1, 2))}, "latency: expected 2 x 2 finite milliseconds"),
        ({"latency": np.full((2, 2), -1.0)}, "latency: expected 2 x 2 finite milliseconds"),
        ({"latency": np.full((2, 2), np.nan)}, "latency: expected 2 x 2 finite milliseconds"),
    ],
)
def test_parts_that_do_not_fit_together_raise(change: dict[str, Any], words: str) -> None:
    right: dict[str, Any] = {
        "masters": ("a", "b"),
        "workers": ("x", "y"),
        "rows": np.ones(2),
        "delay": delay(2, 2),
    }
    assert Problem(**right, latency=np.zeros((2, 2))).wait.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    with pytest.raises(PacelineError, match=words):
        Problem(**(right | change))


def test_problem_comes_back_from_json() -> None:
    times = np.empty((1, 2), object)
    times[0, 0], times[0, 1] = np.array([1.0, 2.0]), np.array([3.0])
    numbers = np.array([[1.0, 2.0]])
    three = (kind(numbers, numbers, numbers) for kind in (Weibull, Transmitted))
    for each in (ShiftedExponential(numbers, numbers), *three, Empirical(times)):
        for latency in (None, np.array([[0.5, 0.0]])):
            problem = Problem(("a",), ("x", "y"), np.array([7.0]), each, latency)
            found = problem_from_json(json.loads(json.dumps(problem.to_json())))
            assert type(found.delay) is type(each)
            assert found.to_json() == problem.to_json()


def test_random_problem_is_that_of_the_paper() -> None:
    """Of each pair u is uniform from 1 to 5, and a = 1 / u."""
    problem = random_problem(2, 3000, 70, np.random.default_rng(0))
    assert isinstance(problem.delay, ShiftedExponential)
    u = problem.delay.u
    assert (u >= 1).all()
    assert (u <= 5).all()
    assert (u.min(), u.max(), u.mean()) == pytest.approx((1, 5, 3), abs=0.05)
    np.testing.assert_array_equal(problem.delay.a, 1 / u)
    assert (problem.masters, problem.workers[1]) == (("master0", "master1"), "worker1")
    assert problem.rows.tolist() == [70, 70]
    chosen = random_problem(1, 30, 70, np.random.default_rng(0), speeds=[2, 4])
    assert set(chosen.delay.u.ravel()) == {2.0, 4.0}  # type: ignore[attr-defined]


def test_times_that_do_not_differ_raise_unless_they_are_drawn_from(tmp_path: Path) -> None:
    header = "master,worker,rows,milliseconds\n"
    same = write(tmp_path, header + "one,x,2,4\none,x,3,6\n")
    with pytest.raises(
        PacelineError, match="has 2 times for master 'one' and worker 'x': expected at least two"
    ):
        read_times(same, 10)
    assert read_times(same, 10, "empirical")[0].delay.mean().tolist() == [[2.0]]
    problem, found = read_times(write(tmp_path, header + "one,x,2,4\none,x,2,8\n"), 10)
    assert isinstance(problem.delay, ShiftedExponential)
    assert (problem.delay.a.item(), problem.delay.u.item()) == (2.0, 1.0)  # 2 ms and 4 ms a row
    assert found.delay is problem.delay


def test_observed_times_replace_parameters_from_five_finished_products_on() -> None:
    problem = Problem(("a", "b"), ("x", "y"), np.ones(2), delay(2, 2))
    seen = Observations(2)
    for milliseconds in (20.0, 30.0, 40.0, 50.0):
        seen.add(0, milliseconds, 10, True)
    seen.add(0, 60.0, 10, False)
    np.testing.assert_array_equal(seen.fitted(problem, 1).delay.u, np.ones((2, 2)))  # type: ignore[attr-defined]
    seen.add(0, 60.0, 10, True)
    for _ in range(6):
        seen.add(1, 10.0, 10, True)  # they do not differ
    fitted = seen.fitted(problem, 1).delay
    assert isinstance(fitted, ShiftedExponential)
    np.testing.assert_array_equal(fitted.a, [[1, 1], [2, 1]])
    # Five finished ones; beyond 2 ms, the six took 0, 1, 2, 3, 4 and more than 4 ms.
    np.testing.assert_allclose(fitted.u, [[1, 1], [5 / 14, 1]])
    other = Problem(("a",), ("x",), np.ones(1), Weibull(*np.ones((3, 1, 1))))
    with pytest.raises(PacelineError, match="fitted by shifted exponentials"):
        Observations(1).fitted(other, 0)
