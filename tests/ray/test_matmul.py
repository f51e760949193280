"""The coded matrix product on real Ray workers."""

import dataclasses
import itertools
import os
import pickle
import signal
import time

import numpy as np
import pytest

pytest.importorskip("ray")

import ray
from ray import cloudpickle

from paceline import PacelineError
from paceline.coded import Problem, ShiftedExponential, plan, random_problem, read_times, rearrange, stretched
from paceline.ray import CodedMatrix, WorkerPool, measure
from support.commands import python

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray-products")]

NAMES = tuple(f"w{n}" for n in range(5))


def problem_of(masters=1, rows=300, u=None, names=NAMES):
    shape = (masters, len(names))
    u = np.full(shape, 2.0) if u is None else np.broadcast_to(np.asarray(u, float), shape)
    return Problem(tuple("xyz"[:masters]), names, np.full(masters, float(rows)), ShiftedExponential(u, 1 / u))


def matrix(rows=300, columns=20, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns))


def close_to(y, expected):
    return np.linalg.norm(y - expected) <= 1e-10 * np.linalg.norm(expected)


def held(worker):
    """Keys of the matrices with blocks at an actor."""
    return [key for key, mine in worker.blocks.items() if mine]


def answered(pool):
    """Waits until each worker has answered all that it was asked."""
    ray.get([actor.__ray_call__.remote(held) for actor in pool.actors.values()], timeout=400)


def several(coded, x):
    """Products until the news of a death has come."""
    for _ in range(20):
        coded @ x


class Told:
    """The delay that a test has put into a file, if any: workers take a second each to start, so tests share them."""

    def __init__(self, path):
        self.path = path

    def tell(self, delay):
        draft = self.path.with_suffix(".draft")
        draft.write_bytes(cloudpickle.dumps(delay))
        draft.rename(self.path)

    def __call__(self, *product):
        return pickle.loads(self.path.read_bytes())(*product) if self.path.exists() else 0.0


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return Told(tmp_path_factory.mktemp("delay") / "delay")


@pytest.fixture(scope="module")
def pool(cluster, told):
    with WorkerPool(NAMES, delay=told) as made:
        yield made


@pytest.fixture
def slowed(pool, told):
    """Has the workers of the pool take as long as a function says, for one test."""
    yield told.tell
    told.path.unlink()


@pytest.fixture
def frozen(pool):
    """Stops workers of the pool, by name, for one test."""
    yield lambda *names: [os.kill(pool.processes[name], signal.SIGSTOP) for name in names]
    for process in pool.processes.values():
        os.kill(process, signal.SIGCONT)
    answered(pool)


def test_ray_is_imported_only_when_asked_for():
    asked = (
        "import sys, paceline.ray; print('ray' in sys.modules); "
        "paceline.ray.WorkerPool; print('ray' in sys.modules)"
    )
    assert python(asked).stdout.split() == ["False", "True"]


@pytest.mark.parametrize("messages", [1, 3])
def test_products_equal_numpy(pool, messages):
    a = matrix(301)
    with CodedMatrix(a, plan(problem_of(rows=301)), "x", pool, messages=messages) as coded:
        assert coded.shape == (301, 20)
        for seed in range(3):
            x = np.random.default_rng(seed).standard_normal((20, 2) if seed else 20)
            assert close_to(coded @ x, a @ x)
        assert coded.last.blocks <= coded.last.asked


def test_uncoded_and_float32(pool):
    a = matrix().astype(np.float32)
    made = plan(problem_of(), "uniform", coded=False)
    with CodedMatrix(a, made, 0, pool) as coded:
        y = coded @ np.ones(20)
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, a.sum(1), rtol=1e-4, atol=1e-4)
        assert coded.last.blocks == coded.last.asked  # every block is needed


@pytest.mark.parametrize("assign", ["simple", "probabilistic"])
def test_several_masters_share_a_pool(pool, assign):
    problem = random_problem(2, 5, 300, np.random.default_rng(3))
    made = plan(dataclasses.replace(problem, workers=NAMES, masters=("x", "y")), assign)
    a, b = matrix(seed=1), matrix(seed=2)
    with CodedMatrix(a, made, "x", pool) as first, CodedMatrix(b, made, "y", pool) as second:
        for seed in range(4):
            x = np.random.default_rng(seed).standard_normal(20)
            assert close_to(first @ x, a @ x)
            assert close_to(second @ x, b @ x)


def test_drawn_workers_serve_one_master_a_turn(pool):
    problem = problem_of(2)
    base = plan(problem, "probabilistic")
    halves = dataclasses.replace(base, probability=np.full((2, 5), 0.5), loads=np.full((2, 5), 120.0))
    with (
        CodedMatrix(matrix(), halves, "x", pool) as first,
        CodedMatrix(matrix(), halves, "y", pool) as second,
    ):
        for turn in range(20):
            first.turn = second.turn = turn
            drawn = [{n for n in range(5) if each._drawn(n)} for each in (first, second)]
            assert not drawn[0] & drawn[1]
            assert drawn[0] | drawn[1] == set(range(5))
        assert close_to(first @ np.ones(20), matrix() @ np.ones(20))


def test_a_straggler_is_not_waited_for(pool, slowed):
    slowed(lambda name, master, turn, rows: 3600.0 if name == "w2" else 0.0)
    a = matrix()
    with CodedMatrix(a, plan(problem_of()), 0, pool, patience=60) as coded:
        for seed in range(3):
            x = np.random.default_rng(seed).standard_normal(20)
            assert close_to(coded @ x, a @ x)
            assert coded.last.workers <= 4
        # Called off each time, and noted as such.
        assert not any(finished for _, finished in coded.observations.seen[2])


def test_failed_worker_that_is_not_needed_ends_no_later_product(pool, slowed):
    def fails(name, master, turn, rows):
        if name == "w2" and turn == 0:
            time.sleep(0.5)
            raise OSError("late")
        return 0.0

    slowed(fails)
    with CodedMatrix(matrix(), stretched(plan(problem_of()), 2.0), 0, pool) as coded:
        assert close_to(coded @ np.ones(20), matrix().sum(1))
        ray.wait(coded.behind[2], timeout=30)
        assert close_to(coded @ np.ones(20), matrix().sum(1))


def test_parts_that_arrive_use_the_straggler_too(pool, slowed):
    slowed(lambda name, master, turn, rows: 0.003 * rows * (4 if name == "w0" else 1))
    a, made = matrix(), plan(problem_of())
    with CodedMatrix(a, made, 0, pool, messages=6) as parts:
        assert close_to(parts @ np.ones(20), a.sum(1))
        assert parts.last.workers == 5
        assert parts.last.blocks < parts.last.asked


def test_workers_die_one_after_another(cluster):
    names = (*NAMES, "w5")
    with WorkerPool(names, cpus=0) as mortal:

        def kill(*victims):
            for name in victims:
                os.kill(mortal.processes[name], signal.SIGKILL)

        dead_workers_cost_nothing_until_too_few_are_left(mortal, kill)
        one_lost_while_blocks_are_placed_leaves_nothing_behind(mortal, kill)
        recoding_on_loss_needs_no_one_to_ask(mortal, kill)


def dead_workers_cost_nothing_until_too_few_are_left(mortal, kill):
    a, x = matrix(), np.random.default_rng(0).standard_normal(20)
    with CodedMatrix(a, plan(problem_of()), 0, mortal, patience=20) as coded:
        assert close_to(coded @ x, a @ x)
        kill("w1")
        for _ in range(200):  # enough are left: nobody waits for the news of its death
            assert close_to(coded @ x, a @ x)
            if coded.dead:
                break
        assert coded.dead == {1}
        kill("w3")
        with pytest.raises(PacelineError, match=r"too few workers.*w1, w3"):
            several(coded, x)
        placed = coded.recode()
        assert placed > 0
        assert not coded.layout.owned[1]
        for _ in range(3):
            assert close_to(coded @ x, a @ x)


def one_lost_while_blocks_are_placed_leaves_nothing_behind(mortal, kill):
    kill("w4")
    with pytest.raises(PacelineError, match="'w4' was lost while"):
        CodedMatrix(matrix(), plan(problem_of(names=("w0", "w2", "w4", "w5"))), 0, mortal, patience=20)
    answers = [mortal.actors[name].__ray_call__.remote(held) for name in ("w0", "w2", "w5")]
    assert list(itertools.chain(*ray.get(answers))) == []


def recoding_on_loss_needs_no_one_to_ask(mortal, kill):
    a, x = matrix(), np.random.default_rng(0).standard_normal(20)
    made = plan(problem_of(names=("w0", "w2", "w5")), "uniform", coded=False)
    with CodedMatrix(a, made, 0, mortal, on_loss="recode", patience=20) as coded:
        kill("w5")
        for _ in range(3):
            assert close_to(coded @ x, a @ x)
        kill("w0", "w2")
        with pytest.raises(PacelineError, match="none of the workers"):
            several(coded, x)
        with pytest.raises(PacelineError, match=r"none of the workers.*pool\.replace"):
            coded.recode()
        mortal.replace("w2")
        assert close_to(coded @ x, a @ x)


def test_a_frozen_worker_costs_nothing_and_comes_back(pool, frozen):
    a, x = matrix(), np.random.default_rng(0).standard_normal(20)
    with CodedMatrix(a, plan(problem_of()), 0, pool, patience=20) as coded:
        assert close_to(coded @ x, a @ x)
        frozen("w0")
        for _ in range(4):
            assert close_to(coded @ x, a @ x)
        assert coded.last.asked < coded.layout.code.n  # by now it is not even asked
        os.kill(pool.processes["w0"], signal.SIGCONT)
        for _ in range(200):
            assert close_to(coded @ x, a @ x)
            if coded.last.asked == coded.layout.code.n:
                break
        assert coded.last.asked == coded.layout.code.n


def test_too_many_frozen_workers_are_an_error_after_the_patience(pool, frozen):
    with CodedMatrix(matrix(), plan(problem_of()), 0, pool, patience=3) as coded:
        frozen("w0", "w1", "w2")
        with pytest.raises(PacelineError, match="too few workers"):
            coded @ np.ones(20)
        assert coded.recode() > 0
        assert close_to(coded @ np.ones(20), matrix().sum(1))


def test_replanning_learns_the_paces_and_moves_only_what_changes(pool, slowed):
    speed = {"w0": 1.0, "w1": 1.0, "w2": 2.0, "w3": 4.0, "w4": 4.0}  # rows per ms, planned as all alike

    def delay(name, master, turn, rows):
        draw = np.random.default_rng([int(name[1]), turn]).exponential()
        return 2e-3 * rows * (1 + 0.3 * draw) / speed[name]

    slowed(delay)
    a, x = matrix(), np.random.default_rng(0).standard_normal(20)
    with CodedMatrix(a, plan(problem_of()), 0, pool) as coded:
        for _ in range(25):
            assert close_to(coded @ x, a @ x)
        answered(pool)  # a worker that the machine holds up would be planned without rows
        before = coded.layout
        moved = coded.replan()
        kept = sum(
            len(set(old) & set(new)) for old, new in zip(before.owned, coded.layout.owned, strict=True)
        )
        assert moved == coded.layout.code.n - kept or moved == sum(map(len, coded.layout.owned)) - kept
        assert kept > 0.4 * before.code.n
        counts = [len(owned) for owned in coded.layout.owned]
        assert min(counts[3:]) > 1.5 * max(counts[:2])
        assert close_to(coded @ x, a @ x)


def test_replanning_keeps_the_redundancy_that_was_asked_for(pool):
    made = stretched(plan(problem_of()), 2.0)
    with CodedMatrix(matrix(), made, 0, pool, messages=3) as coded:
        for _ in range(8):
            assert close_to(coded @ np.ones(20), matrix().sum(1))
        coded.replan()
        # Theorem 1's own redundancy depends on what was fitted; twice as much is kept in proportion
        assert coded.layout.code.n >= 1.3 * coded.layout.code.k
        before = coded.layout.owned
        assert coded.replan() == 0  # nothing more was observed
        assert coded.layout.owned == before
        assert close_to(coded @ np.ones(20), matrix().sum(1))


def test_a_second_master_arrives_and_few_workers_move(pool):
    both = dataclasses.replace(
        random_problem(2, 5, 300, np.random.default_rng(4)), workers=NAMES, masters=("x", "y")
    )
    alone = Problem(("x",), NAMES, both.rows[:1], both.delay.take(slice(0, 1)))
    a, b, x = matrix(seed=1), matrix(seed=2), np.ones(20)
    made = plan(alone, "exact")
    with CodedMatrix(a, made, "x", pool) as first:
        assert close_to(first @ x, a @ x)
        changed = rearrange(made, both, within=0.1)
        first.follow(changed.plan)
        for name in changed.moved:
            assert not first.layout.owned[NAMES.index(name)]
        with CodedMatrix(b, changed.plan, "y", pool) as second:
            assert close_to(first @ x, a @ x)
            assert close_to(second @ x, b @ x)


def test_following_a_plan_with_other_loads(pool):
    problem = problem_of()
    a = matrix()
    with CodedMatrix(a, plan(problem), 0, pool) as coded:
        faster = plan(problem_of(u=[[1.0, 1, 1, 4, 4]]))
        assert coded.follow(faster) > 0
        assert coded.follow(faster) == 0
        assert close_to(coded @ np.ones(20), a.sum(1))
        with pytest.raises(PacelineError, match="rows for this matrix"):
            coded.follow(plan(problem_of(rows=200)))


def test_followed_plan_that_survives_two_workers_keeps_enough_blocks(pool):
    made = plan(problem_of())
    with CodedMatrix(matrix(), made, 0, pool) as coded:
        coded.follow(stretched(made, survive=2))
        assert all(coded.layout.enough(left) for left in itertools.combinations(range(5), 3))


def test_refused_plan_leaves_the_matrix_with_its_own_master(pool):
    both = dataclasses.replace(random_problem(2, 5, 300, np.random.default_rng(4)), workers=NAMES)
    made = plan(both, "exact")
    renamed = dataclasses.replace(both, masters=both.masters[::-1], rows=np.array([200.0, 300.0]))
    with CodedMatrix(matrix(), made, both.masters[1], pool) as coded:
        with pytest.raises(PacelineError, match="200 rows for this matrix of 300"):
            coded.follow(plan(renamed, "exact"))
        assert coded.recode() == 0  # the loads of the other master would move blocks


@pytest.mark.parametrize(
    ("a", "options", "says"),
    [
        (np.full((300, 20), np.nan), {}, "not finite"),
        (matrix(299), {}, "299 rows for master 'x'"),
        (np.ones(300), {}, "two dimensions"),
        (np.full((300, 2), "a"), {}, "dimensions of numbers"),
        (matrix(), {"master": "q"}, "not in the plan"),
        (matrix(), {"on_loss": "cry"}, "on_loss"),
        (matrix(), {"messages": 0}, "messages=0"),
    ],
)
def test_bad_matrices_are_refused_before_anything_is_placed(pool, a, options, says):
    with pytest.raises(PacelineError, match=says):
        CodedMatrix(a, plan(problem_of()), pool=pool, **options)


def test_bad_vectors_and_closed_matrices_are_refused(pool):
    coded = CodedMatrix(matrix(), plan(problem_of()), 0, pool)
    for x in (np.ones(19), np.ones((20, 2, 2)), np.float64(3)):
        with pytest.raises(PacelineError, match="expected 20 entries"):
            coded @ x
    with pytest.raises(PacelineError, match="not finite"):
        coded @ np.full(20, np.inf)
    coded.close()
    with pytest.raises(PacelineError, match="closed"):
        coded @ np.ones(20)


def test_bad_pools_are_refused(cluster, pool):
    with pytest.raises(PacelineError, match="different names"):
        WorkerPool(["w", "w"])
    with pytest.raises(PacelineError, match="cpus='2': expected CPUs of each worker, 0 or more"):
        WorkerPool(["w"], cpus="2")
    with pytest.raises(PacelineError, match="Ray has"):
        WorkerPool([f"v{n}" for n in range(50)])
    strangers = dataclasses.replace(problem_of(), workers=("w0", "w1", "w2", "w3", "stranger"))
    with pytest.raises(PacelineError, match="'stranger' of the plan is not in the pool"):
        CodedMatrix(matrix(), plan(strangers), 0, pool)


def test_complex_and_empty_products_equal_numpy(pool):
    rng = np.random.default_rng(0)
    a = matrix()
    with CodedMatrix(a, plan(problem_of()), 0, pool) as coded:
        x = rng.standard_normal(20) + 1j * rng.standard_normal(20)
        assert close_to(coded @ x, a @ x)
        assert (coded @ np.ones((20, 0))).shape == (300, 0)
        assert close_to(coded @ np.arange(20), a @ np.arange(20))
        with pytest.raises(PacelineError, match="expected numbers"):
            coded @ np.array(["a"] * 20)
    b = a + 1j * matrix(seed=1)
    with CodedMatrix(b, plan(problem_of()), 0, pool) as coded:
        assert coded.dtype == complex
        assert close_to(coded @ x, b @ x)
        assert close_to(coded @ np.ones((20, 2)), b @ np.ones((20, 2)))


def test_rows_of_very_different_sizes_are_each_accurate(pool, slowed):
    slowed(lambda name, master, turn, rows: 3600.0 if name == "w0" else 0.0)
    a = matrix() * np.where(np.arange(300) % 2, 1.0, 1e12)[:, None]
    with CodedMatrix(a, plan(problem_of()), 0, pool) as coded:
        y = coded @ np.ones(20)
    np.testing.assert_allclose(y, a.sum(1), rtol=1e-7)


def test_float32_waits_for_blocks_until_the_answer_is_accurate(pool):
    a = matrix().astype(np.float32)
    with CodedMatrix(a, stretched(plan(problem_of()), 2.0), 0, pool, messages=6) as coded:
        for seed in range(30):
            x = np.random.default_rng(seed).standard_normal(20).astype(np.float32)
            y, right = coded @ x, a.astype(float) @ x
            assert np.linalg.norm(y - right) <= 3 * coded.last.error * np.linalg.norm(right)
            assert coded.last.error < 1e-5


def test_killed_worker_is_replaced_while_cg_solves(cluster):
    sparse = pytest.importorskip("scipy.sparse.linalg")
    b = matrix(120, 120)
    a = b @ b.T / 120 + np.eye(120)
    right = np.random.default_rng(1).standard_normal(120)
    with (
        WorkerPool(("w0", "w1", "w2"), cpus=0, options={"w1": {"resources": {}}}) as mortal,
        CodedMatrix(
            a, stretched(plan(problem_of(rows=120, names=("w0", "w1", "w2"))), 2.0, 1), 0, mortal, messages=6
        ) as coded,
    ):
        first, steps = mortal.processes["w1"], []

        def step(x):
            steps.append(x)
            if len(steps) == 3:
                os.kill(first, signal.SIGKILL)
            if len(steps) == 6:
                mortal.replace("w1")

        x, info = sparse.cg(sparse.aslinearoperator(coded), right, rtol=1e-10, maxiter=400, callback=step)
        assert info == 0
        assert len(steps) > 6
        assert mortal.processes["w1"] != first
        np.testing.assert_allclose(x, np.linalg.solve(a, right), rtol=1e-6, atol=1e-9)
        assert ray.get(mortal.actors["w1"].__ray_call__.remote(held)) == [coded.key]
        with pytest.raises(PacelineError, match="not in the pool"):
            mortal.replace("w9")


def test_measured_times_make_a_plan(pool, tmp_path):
    measure(pool, {"x": matrix(), "y": matrix(seed=1)}, tmp_path / "times.csv", products=3)
    problem, _ = read_times(tmp_path / "times.csv", 300)
    assert problem.masters == ("x", "y")
    assert problem.workers == NAMES
    assert plan(problem).t_star.max() > 0
