"""What the papers print, derived once more from their texts alone, against what Paceline computes.

Each test derives its quantity in a few lines of plain numpy, or by a general solver or Monte Carlo, and shares no
code with what it checks. ``docs/equations.md`` says which line of which paper each of them is about.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy import optimize, special, stats

from paceline import policies, sync
from paceline.backup import arrival_times
from paceline.backup.dbw import Dbw, Gain, estimate, no_gain, update_gain
from paceline.backup.protocol import Iteration, Timings
from paceline.balance.dolbie import play_round, start_peers
from paceline.coded import CodedPlan, Problem, ShiftedExponential, plan, random_problem, simulate
from paceline.coded.assign import iterated, simple
from paceline.costs import Increasing, Linear, Saturating
from paceline.data.traces import Trace
from paceline.forecast import create, series
from paceline.forecast.networks import Perceptron
from paceline.forecast.protocol import Reading
from paceline.papers import coded, dbw, dolbie, lbbsp, lbbsp_clusters
from paceline.paramserver.aggregate import Parameters, WorkerGradient, aggregate
from paceline.rounds import Array, Cluster, Plan, Round
from paceline.shares import whole_samples
from paceline.simulate import from_trace, measures, run
from paceline.sync.protocol import Apply, Release
from support.experiments import ran
from support.problems import problem_of
from support.programmes import soonest

N, BATCH = 6, 256.0


def systems(rounds: int, seed: int, workers: int = N) -> list[tuple[Array, Array]]:
    """Speeds gamma and communication times f^C of each round."""
    rng = np.random.default_rng(seed)
    gamma = rng.choice([3000.0, 1700.0, 1000.0, 90.0, 45.0], workers)
    return [
        (gamma * np.exp(0.1 * rng.standard_normal(workers)), rng.uniform(0.01, 0.04, workers))
        for _ in range(rounds)
    ]


def told(x: Array, gamma: Array, comm: Array) -> Round:
    return Round(x, x * BATCH / gamma + comm, int(BATCH), comm, costs=Linear(1 / gamma, comm))


# DOLBIE


def acceptable(x: Array, gamma: Array, comm: Array) -> tuple[Array, int]:
    """x' of eq. (4), in the form of section VI-A, and the straggler."""
    seconds = x * BATCH / gamma + comm
    s = int(np.argmax(seconds))
    possible = np.minimum(1.0, (seconds[s] - comm) * gamma / BATCH)
    possible[s] = x[s]
    return possible, s


def listing(x: Array, alpha: float, gamma: Array, comm: Array) -> tuple[Array, float]:
    """A round of Algorithm 1: eqs. (4) to (7)."""
    possible, s = acceptable(x, gamma, comm)
    new = x - alpha * (x - possible)
    new[s] = 1 - (new.sum() - new[s])
    return new, min(alpha, new[s] / (len(x) - 2 + new[s]))


@pytest.mark.parametrize("seed", range(5))
def test_dolbie_starts_from_any_partition(seed: int) -> None:
    """DOLBIE, Alg. 1, line 1, Alg. 2, line 1, section IV-B."""
    x = np.random.default_rng(seed).dirichlet(np.ones(N))
    start = "/".join(f"{7 * each!r}" for each in x.tolist())
    policy = policies.create(f"dolbie:floor=0,start={start}", Cluster(N, int(BATCH)))
    made, state = policy.init()
    peers = start_peers(N, floor=0.0, start=start)
    alpha = x.min() / (N - 2 + x.min())
    assert alpha < 0.9 / (N - 1) ** 2  # below that of equal shares
    for gamma, comm in systems(40, seed):
        np.testing.assert_allclose(made.shares, x, rtol=0, atol=1e-12)
        np.testing.assert_allclose([peer.share for peer in peers], x, rtol=0, atol=1e-12)
        made, state = policy.step(state, told(np.asarray(made.shares), gamma, comm))
        peers, _ = play_round(peers, Linear(1 / gamma, comm), int(BATCH))
        x, alpha = listing(x, alpha, gamma, comm)
    assert x.min() >= 0


def test_dolbie_ties_go_to_the_first_of_the_list() -> None:
    """DOLBIE, Alg. 1, lines 9 to 16, Alg. 2, lines 5 to 10: stragglers of exactly the same seconds."""
    gamma, comm = np.array([400.0, 100.0, 300.0, 100.0, 100.0]), np.full(5, 0.01)
    policy = policies.create("dolbie:alpha=0.01,floor=0", Cluster(5, int(BATCH)))
    made, state = policy.init()
    peers = start_peers(5, 0.01)
    x, alpha, given = np.full(5, 0.2), 0.01, []
    for _ in range(6):
        seconds = x * BATCH / gamma + comm
        s = next(i for i in range(5) if seconds[i] == seconds.max())
        given.append(s)
        made, state = policy.step(state, told(np.asarray(made.shares), gamma, comm))
        peers, _ = play_round(peers, Linear(1 / gamma, comm), int(BATCH))
        x, alpha = listing(x, alpha, gamma, comm)
        np.testing.assert_allclose(made.shares, x, rtol=0, atol=1e-13)
        np.testing.assert_allclose([peer.share for peer in peers], x, rtol=0, atol=1e-13)
    assert given[:3] == [1, 3, 4]  # each of them as slow as the others before it gave


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("alpha", [0.001, 0.04, 0.5])
def test_dolbie_without_a_master(seed: int, alpha: float) -> None:
    """DOLBIE, eq. (8), section IV-B, Alg. 2, lines 1 to 13."""
    peers = start_peers(N, alpha)
    # Algorithm 2 with eq. (8): each has a step size of its own, at first at most 1 / (N - 1)^2.
    x, local = (np.full(N, 1 / N), np.full(N, min(alpha, 1 / (N - 1) ** 2)))
    for gamma, comm in systems(60, seed):
        peers, _ = play_round(peers, Linear(1 / gamma, comm), int(BATCH))
        possible, s = acceptable(x, gamma, comm)
        new = x - local.min() * (x - possible)
        new[s] = 1 - (new.sum() - new[s])
        local[s] = min(local[s], new[s] / (N - 2 + new[s]))
        x = new
        np.testing.assert_allclose([peer.share for peer in peers], x, rtol=0, atol=1e-12)
        np.testing.assert_allclose([peer.alpha for peer in peers], local, rtol=1e-9)


def best_division(gamma: Array, comm: Array) -> tuple[Array, float]:
    """x* and its seconds: min T subject to x B / gamma + c <= T, by a general solver."""
    return soonest(BATCH / gamma, comm, 1.0)


def test_dolbie_lemmas_with_the_constant_put_right() -> None:
    """DOLBIE, eqs. (9), (10), Lemma 1, Lemma 2."""
    for seed in range(30):
        x = np.random.default_rng(seed).dirichlet(np.ones(N))
        gamma, comm = systems(1, seed)[0]
        possible, s = acceptable(x, gamma, comm)
        best, level = best_division(gamma, comm)
        others = np.arange(N) != s
        assert x[s] >= best[s] - 1e-9  # i
        assert np.all(possible >= x)  # ii
        assert np.all(possible >= best - 1e-9)  # iii
        g = np.where(others, x - possible, (possible - x)[others].sum())  # G_t of eq. (9)
        lipschitz = float((BATCH / gamma).max())
        seconds = float((x * BATCH / gamma + comm).max())
        constant = min((N - 1) / 4, 1.0)
        assert ((seconds - level) / lipschitz) ** 2 <= constant + g @ (x - best) + 1e-9  # eq. (10)
        assert g @ g <= N * (N - 1) + 1e-9  # "N" in the proof

    # iv prints -1/4: ten workers that can do all of it, and ten that hold it all, as quick however much they do
    gamma = np.repeat([1000.0, 1e9, 1e9], [10, 10, 1])
    comm = np.repeat([0.01, 0.0356, 0.0357], [10, 10, 1])
    x, best = np.repeat([1e-4, 0.0998, 1e-3], [10, 10, 1]), np.repeat([0.1, 0.0, 0.0], [10, 10, 1])
    assert x.sum() == pytest.approx(1)
    assert (best * BATCH / gamma + comm).max() == pytest.approx(best_division(gamma, comm)[1])
    possible, s = acceptable(x, gamma, comm)
    assert s == 20
    assert -1 < float(((x - possible) * (x - best))[:20].sum()) < -0.7


def test_dolbie_distance_to_the_minimizer_after_a_step() -> None:
    """DOLBIE, eqs. (9), (11): the update in one formula, and the square of what is left to the minimizer."""
    policy = policies.create("dolbie:alpha=0.03,floor=0", Cluster(N, int(BATCH)))
    made, state = policy.init()
    for gamma, comm in systems(40, 11):
        x, alpha = np.asarray(made.shares), float(np.asarray(state.alpha).item())  # type: ignore[attr-defined]
        possible, s = acceptable(x, gamma, comm)
        best, _ = best_division(gamma, comm)
        g = x - possible
        g[s] = -(g.sum() - g[s])
        made, state = policy.step(state, told(x, gamma, comm))
        after = np.asarray(made.shares)
        np.testing.assert_allclose(after, x - alpha * g, rtol=0, atol=1e-12)  # eq. (9)
        left = ((x - best) ** 2).sum() + alpha**2 * (g @ g) - 2 * alpha * g @ (x - best)
        assert ((after - best) ** 2).sum() == pytest.approx(left, abs=1e-12)  # eq. (11)
        moved = ((x - best) ** 2).sum() - ((after - best) ** 2).sum()  # step (b) of the proof
        assert moved == pytest.approx(x @ x - after @ after + 2 * (after - x) @ best, abs=1e-12)


@pytest.mark.parametrize("power", [1.0, 1.7, 3.0])
def test_dolbie_ogd_steps_down_the_subgradient_and_projects(power: float) -> None:
    """DOLBIE, baseline OGD."""
    policy = policies.create("ogd:rate=0.001", Cluster(N, int(BATCH)))
    made, state = policy.init()
    for gamma, comm in systems(20, 3):

        def seconds(x: Array, gamma: Array = gamma, comm: Array = comm) -> Array:
            return comm + BATCH / gamma * x**power

        x = np.asarray(made.shares)
        cost = Linear(1 / gamma, comm)
        if power > 1:
            cost = Increasing(lambda b, seconds=seconds: seconds(b / BATCH), np.full(N, BATCH))  # type: ignore[assignment]
        made, state = policy.step(state, Round(x, seconds(x), int(BATCH), comm, costs=cost))
        slope = np.zeros(N)
        for i in range(N):  # the subgradient by finite differences
            moved, back = x.copy(), x.copy()
            moved[i] += 1e-6
            back[i] -= 1e-6
            slope[i] = (seconds(moved).max() - seconds(back).max()) / 2e-6
        aim = x - 0.001 * slope
        near = optimize.minimize(
            lambda y, aim=aim: ((y - aim) ** 2).sum(), x, jac=lambda y, aim=aim: 2 * (y - aim), method="SLSQP",
            bounds=[(0, 1)] * N, constraints={"type": "eq", "fun": lambda y: y.sum() - 1}, options={"ftol": 1e-15},
        )  # fmt: skip
        np.testing.assert_allclose(made.shares, near.x, atol=2e-6)


@pytest.mark.parametrize("text", ["abs", "abs:window=5"])
def test_dolbie_abs_divides_by_the_mean_seconds_of_five_rounds(text: str) -> None:
    """DOLBIE, baseline ABS."""
    policy = policies.create(text, Cluster(N, int(BATCH)))
    made, state = policy.init()
    x, window = np.full(N, 1 / N), []
    for gamma, comm in systems(25, 5):
        np.testing.assert_allclose(made.shares, x, atol=1e-12)
        made, state = policy.step(state, told(x, gamma, comm))
        window.append(x * BATCH / gamma + comm)
        if len(window) == 5:
            inverse = 1 / np.mean(window, axis=0)
            x, window = inverse / inverse.sum(), []


@pytest.mark.parametrize("reading", ["loose", "strict"])
def test_dolbie_lbbsp_counts_rounds_in_a_row(reading: str) -> None:
    """DOLBIE, baseline LB-BSP: five rounds with the same order, and none without between them."""
    policy = policies.create(f"lbbsp:delta=5,rounds=5,reading={reading}", Cluster(3, int(BATCH)))
    made, state = policy.init()
    rng = np.random.default_rng(12)
    x, fastest, begun, moves = np.full(3, 1 / 3), list[int](), 0, 0  # fastest: -1 if all take equally long
    for t in range(400):
        seconds = np.full(3, 1.0) if rng.random() < 0.1 else rng.permutation([0.9, 1.0, 1.1])
        if rng.random() < 0.7:
            seconds = np.sort(seconds)
        made, state = policy.step(state, Round(x, seconds, int(BATCH)))
        fastest.append(-1 if np.ptp(seconds) == 0 else int(np.argmin(seconds)))
        row = fastest[max(begun, t - 4) :]
        same = -1 not in row if reading == "loose" else set(row) == {row[0]} and row[0] >= 0
        if len(row) == 5 and same:
            slow = int(np.argmax(seconds))
            moved = min(5 / BATCH, x[slow])
            x = x + moved * ((np.arange(3) == row[-1]).astype(float) - (np.arange(3) == slow))
            begun, moves = t + 1, moves + 1
        np.testing.assert_allclose(made.shares, x, atol=1e-12)
    assert 10 < moves < 70


# LB-BSP


def test_lbbsp_gpus_run_at_least_the_knee() -> None:
    """LB-BSP, eq. (5): x_i is at least x^s where a slow worker would get less."""
    rng = np.random.default_rng(13)
    for _ in range(10):
        m, b = rng.permutation([1e-3, 1.3e-3, 1.5e-3, 2e-3, 2.5e-3, 0.1]), rng.uniform(0.02, 0.1, N)
        knee = int(rng.integers(8, 24))
        policy = policies.create(f"lbbsp-gpu:forecast=last,knee={knee}", Cluster(N, int(BATCH)))
        made, state = policy.init()
        made, _ = policy.step(state, told(np.asarray(made.shares), 1 / m, b))
        loads = np.asarray(made.shares) * BATCH
        cost = Saturating(m, b, np.full(N, float(knee)), np.full(N, BATCH))
        for x in range(1, int(BATCH)):  # m x + b, and below the knee that of the knee
            np.testing.assert_allclose(cost.seconds(np.full(N, float(x))), m * max(x, knee) + b)
        assert loads[np.argmax(m)] == pytest.approx(knee)
        assert loads.min() >= knee - 1e-9
        assert (m * loads + b).max() == pytest.approx(soonest(m, b, BATCH, knee, BATCH)[1], rel=1e-9)


def test_lbbsp_gpus_get_whole_samples_that_end_soonest() -> None:
    """LB-BSP, eq. (3): of all divisions into whole samples, those of the plan end first."""
    rng = np.random.default_rng(14)
    by_shares = 0
    for _ in range(20):
        m, b = rng.uniform(0.5, 6.0, 3), rng.uniform(0.0, 20.0, 3)
        policy = policies.create("lbbsp-gpu:forecast=last", Cluster(3, 24))
        made, state = policy.init()
        x = np.asarray(made.shares)
        made, _ = policy.step(state, Round(x, m * x * 24 + b, 24, b))
        best = min(
            max(m * np.array(each) + b) for each in itertools.product(range(25), repeat=3) if sum(each) == 24
        )
        assert max(m * whole_samples(made, 24) + b) == pytest.approx(best, rel=1e-12)
        by_shares += max(m * whole_samples(Plan(made.shares), 24) + b) > best * (1 + 1e-9)
    assert by_shares > 3


def test_lbbsp_cluster_b_has_the_machines_of_table_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LB-BSP, Table 2."""
    arrow = pytest.importorskip("pyarrow")
    (tmp_path / "traces").mkdir()
    machine, sample = np.divmod(np.arange(40 * 288), 288)
    columns = {"vm": machine, "t": sample, "cpu_pct": sample % 90.0, "mem_pct": sample % 50.0}
    path = tmp_path / "traces" / "google2011_vm_cpu_mem.parquet"
    importlib.import_module("pyarrow.parquet").write_table(arrow.table(columns), path)
    seen: list[Array] = []
    contend = series._contend
    monkeypatch.setattr(series, "_contend", lambda rng, base, *rest, **more: seen.append(base) or contend(
        rng, base, *rest, **more))  # fmt: skip
    series.google2011(tmp_path, np.random.default_rng(0))
    printed = {"m4.2xlarge": (8, 17), "c5.2xlarge": (8, 10), "r4.2xlarge": (8, 2), "m4.4xlarge": (16, 2)}
    printed["m4.xlarge"] = (4, 1)
    # Ten samples a second for each core; c5 is of a faster kind.
    wanted = [
        110.0 if kind[0] == "c" else 10.0 * cores for kind, (cores, n) in printed.items() for _ in range(n)
    ]
    assert sorted(seen[0].tolist()) == sorted(wanted)


# Eq. (4) with windows of 2, read in both ways.
@pytest.mark.parametrize(("inputs", "hidden"), [(6, 2), (8, 1)])
def test_lbbsp_narx_has_one_hidden_layer_and_fewer_than_20_parameters(inputs: int, hidden: int) -> None:
    """LB-BSP, eq. (4)."""
    network = Perceptron(inputs, hidden)
    rng = np.random.default_rng(11)
    parameters, x = network.draw(rng), rng.standard_normal((5, inputs))
    assert parameters.shape[-1] == (inputs + 2) * hidden + 1 < 20
    # By finite differences: the output is linear in tanh of linear functions, so it is bounded as x grows.
    far = network.forward(parameters, 1e6 * x)
    further = network.forward(parameters, 2e6 * x)
    np.testing.assert_allclose(far, further, rtol=1e-6)


@pytest.mark.parametrize("inputs", [6, 8])
def test_lbbsp_narx_predicts_from_two_speeds_and_the_resources_of_the_round(inputs: int) -> None:
    """LB-BSP, eq. (4)."""
    rng, rounds = np.random.default_rng(15), 160
    speed, cpu, memory = rng.uniform(60, 100, (rounds, 2)), *rng.uniform(0.2, 1.0, (2, rounds, 2))
    forecast = create(f"narx:inputs={inputs},warmup=0,fallback=no")
    state, compared = forecast.init((2,)), 0
    for k in range(1, rounds):
        weights = np.asarray(state.parameters)
        predicted, state = forecast.step(state, Reading(speed[k - 1], cpu[k], memory[k]))
        state = forecast.train(state)
        if k < 130:
            continue
        read = [speed[:k], np.vstack([cpu[1], cpu[1:k]]), np.vstack([memory[1], memory[1:k]])]
        for i in range(2):
            mean = [each[:, i].mean() for each in read]
            spread = [
                max(each[:, i].std(), least)
                for each, least in zip(read, (0.01 * mean[0], 0.02, 0.02), strict=True)
            ]
            v, c, m = ((each[:, i] - mean[j]) / spread[j] for j, each in enumerate((speed, cpu, memory)))
            past = range(k, k - (3 if inputs == 8 else 2), -1)  # c^k, c^{k-1}, and with 8 inputs c^{k-2}
            x = [v[k - 1], v[k - 2], *(c[t] for t in past), *(m[t] for t in past)]
            hidden = 1 if inputs == 8 else 2
            output = weights[-1]  # w . tanh(W x + b) + c
            for h in range(hidden):
                row = weights[h * inputs : (h + 1) * inputs]
                bias, factor = weights[hidden * inputs + h], weights[hidden * (inputs + 1) + h]
                output += factor * np.tanh(row @ x + bias)
            assert predicted[i] == pytest.approx(mean[0] + spread[0] * output, rel=1e-9)
            compared += 1
    assert compared == 60


def test_lbbsp_arima_predicts_by_its_difference_equation() -> None:
    """LB-BSP, Table 3 (ARIMA): (2, 2, 1), one number at a time."""
    rng, rounds = np.random.default_rng(16), 120
    noise = rng.standard_normal(rounds)
    speed = 100 + 5 * np.sin(np.arange(rounds) / 9) + noise + 0.8 * np.append(0, noise[:-1])
    forecast = create("arima:refit=1000")
    state = forecast.init((1,))
    predictions = []
    for value in speed:
        predicted, state = forecast.step(state, Reading(np.array([value])))
        state = forecast.train(state)  # once, after 30 rounds
        predictions.append(float(predicted[0]))
    (first,), (second,), (theta,) = *np.asarray(state.ar), np.asarray(state.ma)
    assert abs(theta) > 0.1
    e = 0.0
    for k in range(4, rounds):  # z^k is the second difference of round k
        z = {t: speed[t] - 2 * speed[t - 1] + speed[t - 2] for t in (k - 2, k - 1, k)}
        expected = first * z[k - 1] + second * z[k - 2] + theta * e
        if k > 30:
            assert predictions[k - 1] == pytest.approx(expected + 2 * speed[k - 1] - speed[k - 2], rel=1e-9)
        e = z[k] - expected


def test_lbbsp_recurrent_networks_read_two_speeds_oldest_first() -> None:
    """LB-BSP, Table 3 (SimpleRNN, LSTM)."""
    rng, rounds = np.random.default_rng(17), 150
    speed = rng.uniform(60, 100, (rounds, 1))
    forecast = create("recurrent:warmup=0")
    state = forecast.init((1,))
    for k in range(1, rounds):
        weights = np.asarray(state.parameters)
        predicted, state = forecast.step(state, Reading(speed[k - 1]))
        state = forecast.train(state)
        if k < 130:
            continue
        mean, spread = speed[:k].mean(), speed[:k].std()
        enter, repeat, bias, out = weights[:4], weights[4:20].reshape(4, 4), weights[20:24], weights[24:28]
        hidden = np.zeros(4)
        for v in (speed[k - 2, 0], speed[k - 1, 0]):
            hidden = np.tanh(enter * (v - mean) / spread + repeat @ hidden + bias)
        assert predicted[0] == pytest.approx(mean + spread * (out @ hidden + weights[28]), rel=1e-9)


# DBW


NOTHING = Timings(*(np.zeros(0, np.int64),) * 2, np.zeros(0), np.zeros(0, np.int64), np.zeros(0))


def test_dbw_gain_is_the_expected_decrease_of_a_quadratic() -> None:
    """F(w) = L |w|^2 / 2: the lower bound (6) is then an equality, so E[F(w) - F(w - eta g)] is eq. (9).

    DBW, eqs. (5) to (9).
    """
    rng = np.random.default_rng(12)
    smooth, eta, sd, w = 3.0, 0.2, 1.5, rng.standard_normal(5)
    for k in (1, 4, 16):
        g = smooth * w + sd * rng.standard_normal((200_000, k, 5)).mean(1) if k < 16 else None
        if g is None:
            g = smooth * w + sd / 4 * rng.standard_normal((200_000, 5))
        decrease = smooth / 2 * (w @ w - ((w - eta * g) ** 2).sum(1))
        estimate = Gain(variance=5 * sd**2, norm2=smooth**2 * float(w @ w), smoothness=smooth)
        error = 5 * decrease.std() / np.sqrt(len(g))
        assert estimate.of(np.array([float(k)]), eta)[0] == pytest.approx(decrease.mean(), abs=error)


def quadratic_run(rounds: int, noise: float, seed: int) -> list[Iteration]:
    """Gradient descent on F(w) = L |w|^2 / 2 with L = 2 and k = 4 gradients each; losses are exact."""
    rng, w, eta, k = np.random.default_rng(seed), np.full(50, 1.0), 0.05, 4
    happened = []
    for _ in range(rounds):
        gradients = 2.0 * w + noise * rng.standard_normal((k, 50))
        g = gradients.mean(0)
        variance = float(gradients.var(axis=0, ddof=1).sum())
        happened.append(Iteration(k, 8, 0.0, float(w @ w), float(g @ g), variance, eta, NOTHING))
        w = w - eta * g
    return happened


def test_dbw_smoothness_of_a_quadratic_is_found() -> None:
    """DBW, eq. (12)."""
    state = no_gain(5)
    for each in quadratic_run(12, 0.0, 0):
        state = update_gain(state, each)
    assert estimate(state).smoothness == pytest.approx(2.0, rel=1e-9)  # eq. (12) without noise
    found = []
    for seed in range(200):
        state = no_gain(5)
        for each in quadratic_run(7, 0.2, seed):
            state = update_gain(state, each)
        found.append(estimate(state).smoothness)
    assert np.mean(found) == pytest.approx(2.0, abs=0.3)


@pytest.mark.parametrize("seed", range(6))
def test_dbw_averages_the_last_five(seed: int) -> None:
    """DBW, eqs. (13) to (15)."""
    rng = np.random.default_rng(seed)
    happened = [each._replace(loss=each.loss + rng.normal(0, 4.0)) for each in quadratic_run(9, 0.3, seed)]
    state = no_gain(Dbw(N).depth)
    variance, norm2, smooth = [], [], []
    for t, each in enumerate(happened):
        state = update_gain(state, each)
        variance.append(each.variance)
        norm2.append(max(each.norm2 - each.variance / each.quorum, 0.0))
        if t:
            before, eta = happened[t - 1], each.rate
            top = 2 * (eta * norm2[t - 1] - (before.loss - each.loss))
            smooth.append(top / (eta**2 * (norm2[t - 1] + before.variance / before.quorum)))
    assert min(smooth) < 0 < max(smooth)
    found = estimate(state)
    assert found.variance == pytest.approx(np.mean(variance[-5:]))  # eq. (13)
    assert found.norm2 == pytest.approx(np.mean(norm2[-5:]))  # eq. (14)
    assert found.smoothness == pytest.approx(max(np.mean(smooth[-5:]), 0.0))  # eqs. (12) and (15), at least 0


def sampled(n: int, seed: int, per_cell: int = 3) -> tuple[Timings, dict[tuple[int, int], list[float]]]:
    """Samples of each cell: as many on average as ``per_cell``, more of some than of others."""
    rng, counts = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    cells = {
        (h, k): rng.uniform(0.5, 3.0, counts.integers(1, 2 * per_cell)).tolist()
        for h, k in itertools.product(range(1, n + 1), range(1, n + 1))
    }
    rows = np.array([(h, k, y, 0, y) for (h, k), values in cells.items() for y in values])
    columns = rows.T
    return Timings(
        columns[0].astype(int), columns[1].astype(int), columns[2], columns[3].astype(int), columns[4]
    ), cells


@pytest.mark.parametrize("seed", range(4))
def test_dbw_times_solve_the_quadratic_programme(seed: int) -> None:
    """DBW, eq. (17)."""
    n = 3
    timings, cells = sampled(n, seed)
    names = list(cells)
    place = {name: i for i, name in enumerate(names)}

    def wrong(x: Array) -> float:
        return sum(((np.array(cells[name]) - x[place[name]]) ** 2).sum() for name in names)

    rules = []
    for h, k in names:
        if k < n:
            rules.append((place[h, k + 1], place[h, k]))
        if h < n:
            rules.append((place[h, k], place[h + 1, k]))
        if h == k < n:
            rules.append((place[k + 1, k + 1], place[k, k]))
    found = optimize.minimize(
        wrong, np.full(len(names), 1.5), method="SLSQP", options={"ftol": 1e-14, "maxiter": 500},
        constraints=[{"type": "ineq", "fun": lambda x, a=a, b=b: x[a] - x[b]} for a, b in rules],
    )  # fmt: skip
    ours = arrival_times.constrained(arrival_times.update(arrival_times.start(n), timings))
    np.testing.assert_allclose(ours, [found.x[place[k, k]] for k in range(1, n + 1)], atol=1e-4)


def test_dbw_chooses_the_most_gain_a_second_and_never_less_while_the_loss_rises() -> None:
    """DBW, eqs. (16), (18), (19): after updates from any number of gradients."""
    n, eta = 4, 0.05
    policy = Dbw(n)
    k, state = policy.init()
    assert k == n
    rng, loss, estimates, times = np.random.default_rng(14), 9.0, no_gain(5), arrival_times.start(n)
    raised = free = calm = cautious = 0
    for t in range(120):
        timings, _ = sampled(n, 100 + t, 1)
        timings = timings._replace(seconds=timings.seconds * (1 + timings.place))
        k, before = int(rng.integers(1, n + 1)), loss
        norm2, variance = float(rng.uniform(2, 4)), float(rng.uniform(1, 9)) if k > 1 else np.nan
        rises = 1.011 if t % 2 else 1.009
        loss = before * rises if t % 3 == 2 else before - 1.2 * eta * norm2
        happened = Iteration(k, n, float(t), loss, norm2, variance, eta, timings)
        estimates = update_gain(estimates, happened)
        times = arrival_times.update(times, timings)
        chosen, state = policy.step(state, happened)
        if t < 2:
            continue
        found = estimate(estimates)
        bend = found.smoothness * eta**2 / 2
        worth = np.array(
            [(eta - bend) * found.norm2 - bend * found.variance / j for j in range(1, n + 1)]
        )  # eq. (16)
        speed = worth / arrival_times.constrained(times)  # of equal ones the largest k
        best = max(j + 1 for j in range(n) if np.isclose(speed[j], speed.max(), rtol=1e-9, atol=0))
        if worth.max() <= 0:
            cautious, best = cautious + 1, n
        if loss > 1.01 * before:  # eq. (19), beta = 1.01
            raised += best <= k < n
            free += best < k == n  # where the indicator is 0
            best = max(best, (k + 1) * (k < n))
        elif loss > before:
            calm += best <= k < n
        assert chosen == best, t
    assert min(raised, free, calm, cautious) > 0, (raised, free, calm, cautious)


# Coded computation


def cluster(masters: int, workers: int, seed: int, rows: float = 1e4) -> tuple[Problem, Array]:
    u = np.random.default_rng(seed).uniform(1, 5, (masters, workers))
    return problem_of(u, rows=rows), u


def test_coded_processing_times_are_shifted_exponential() -> None:
    """Sun et al., eq. (1)."""
    u, a = np.array([2.0]), np.array([0.7])
    delay = ShiftedExponential(u, a)
    z = np.linspace(0.1, 4, 50)
    np.testing.assert_allclose(
        [delay.cdf(np.array([each]))[0] for each in z], np.where(z >= 0.7, 1 - np.exp(-2 * (z - 0.7)), 0)
    )
    drawn = delay.sample(np.random.default_rng(0), 20_000)[:, 0]
    assert stats.kstest(drawn - 0.7, stats.expon(scale=0.5).cdf).pvalue > 1e-3


def test_coded_theorem_1_and_the_expected_rows() -> None:
    """Sun et al., eqs. (3) to (5), Theorem 1."""
    problem, u = cluster(1, 7, 15)
    made = plan(problem, "uniform")
    phi = (-special.lambertw(-np.exp(-2.0), -1).real - 1) / u[0]  # u a = 1
    speed = u[0] / (1 + u[0] * phi)
    assert made.t_star[0] == pytest.approx(1e4 / speed.sum(), rel=1e-12)
    np.testing.assert_allclose(made.loads[0], made.t_star[0] / phi, rtol=1e-12)

    def rows(t: float, loads: Array) -> float:  # eqs. (4) and (5)
        late = np.maximum(t - loads / u[0], 0.0)
        return float((loads * (1 - np.exp(-(u[0] / loads) * late))).sum())

    assert rows(made.t_star[0], made.loads[0]) == pytest.approx(1e4)
    # No other loads have as many rows by t*: the KKT point of P4 is its optimum.
    for n, factor in itertools.product(range(7), np.linspace(0.5, 2, 31)):
        other = made.loads[0] * np.where(np.arange(7) == n, factor, 1.0)
        assert rows(made.t_star[0], other) <= 1e4 + 1e-6
    # Monte Carlo of eq. (4): rows that arrive by t*, all of a worker's or none.
    draws = np.random.default_rng(1).standard_exponential((40_000, 7))
    done = made.loads[0] * (1 / u[0] + draws / u[0]) <= made.t_star[0]
    assert (done * made.loads[0]).sum(1).mean() == pytest.approx(1e4, rel=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_coded_p5_by_brute_force(seed: int) -> None:
    """Sun et al., eqs. (8), (9), Proposition 1, benchmark 3."""
    _, u = cluster(2, 8, 20 + seed)
    rows = np.array([1e4, 3e4])
    problem = problem_of(u, rows=rows)
    phi = (-special.lambertw(-np.exp(-2.0), -1).real - 1) / u
    v = u / (rows[:, None] * (1 + u * phi))  # eq. (8)
    # Eq. (9).
    best = max(
        min(v[0, [o == 0 for o in owner]].sum(), v[1, [o == 1 for o in owner]].sum())
        for owner in itertools.product((0, 1), repeat=8)
    )
    assert plan(problem, "exact").t_star.max() == pytest.approx(1 / best, rel=1e-4)
    assert plan(problem, "probabilistic").t_star.max() <= (1 + 1e-9) / best


def test_coded_p3_by_a_general_solver() -> None:
    """Sun et al., eq. (6): the least t over loads, probabilities and t itself, from several starts."""
    u = np.random.default_rng(24).uniform(1, 5, (2, 3))
    rows = np.array([300.0, 500.0])
    problem = problem_of(u, rows=rows)

    def expected(w: Array) -> Array:  # the left-hand side of eq. (5), rows in hundreds
        k, load, t = w[:6].reshape(2, 3), np.exp(w[6:12]).reshape(2, 3), np.exp(w[12])
        return (k * load * (1 - np.exp(-(u / load) * np.maximum(t - load / u, 0)))).sum(1)

    found = []
    for seed in range(4):
        start = np.random.default_rng(seed)
        result = optimize.minimize(
            lambda w: w[12],
            np.concatenate([start.uniform(0.2, 0.5, 6), np.log(start.uniform(0.5, 2, 6)), [1.5]]),
            method="SLSQP",
            bounds=[(0, 1)] * 6 + [(-3, 3)] * 7,
            constraints=[
                {"type": "ineq", "fun": lambda w: expected(w) - rows / 100},
                {"type": "ineq", "fun": lambda w: 1 - w[:6].reshape(2, 3).sum(0)},
            ],
            options={"maxiter": 1000, "ftol": 1e-12},
        )
        found += [100 * np.exp(result.x[12])] if result.success else []
    made = plan(problem, "probabilistic", rule="printed")
    assert made.t_star.max() == pytest.approx(min(found), rel=1e-5)
    assert (made.probability.sum(0) <= 1 + 1e-12).all()
    # With k of 0 or 1 only.
    least = min(
        max(rows[m] / u[m, [o == m for o in owner]].sum() for m in (0, 1))
        for owner in itertools.product((0, 1), repeat=3)
        if len(set(owner)) == 2
    )
    level = -special.lambertw(-np.exp(-2.0), -1).real  # 1 + u phi
    made = plan(problem, "exact", rule="printed")
    assert made.t_star.max() == pytest.approx(level * least, rel=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_coded_algorithm_2_line_by_line(seed: int) -> None:
    """Sun et al., Alg. 2, lines 1 to 12."""
    v = np.random.default_rng(30 + seed).uniform(1, 5, (4, 15))
    masters, workers, total, owner = set(range(4)), set(range(15)), np.zeros(4), {}
    while masters:  # lines 2 to 6
        m, n = max(itertools.product(masters, workers), key=lambda pair: v[pair])
        total[m], owner[n] = total[m] + v[m, n], m
        masters.remove(m)
        workers.remove(n)
    while workers:  # lines 7 to 12
        m = int(np.argmin(total))
        n = max(workers, key=lambda n, m=m: v[m, n])
        total[m], owner[n] = total[m] + v[m, n], m
        workers.remove(n)
    k = simple(v)
    assert [int(np.argmax(k[:, n])) for n in range(15)] == [owner[n] for n in range(15)]


@pytest.mark.parametrize("rule", ["printed", "tie-safe"])
def test_coded_algorithm_1_ends_where_none_of_its_moves_helps(rule: str) -> None:
    """Sun et al., Alg. 1, lines 1 to 22."""
    for seed in range(5):
        v = np.random.default_rng(40 + seed).uniform(1, 5, (3, 12))
        owner = iterated(v, rule=rule, rounds=1).argmax(0)  # lines 1 to 22, before the exploration

        def sums(owner: Array, v: Array = v) -> Array:
            return np.bincount(owner, v[owner, np.arange(12)], minlength=3)

        now = sums(owner)
        for n in range(12):  # lines 7 to 15
            others = [m for m in range(3) if m != owner[n]]
            moved = owner.copy()
            moved[n] = min(others, key=lambda m: now[m])
            assert sums(moved).min() <= now.min() + 1e-12
        for a, b in itertools.combinations(range(12), 2):  # lines 16 to 22
            if owner[a] != owner[b]:
                moved = owner.copy()
                moved[a], moved[b] = owner[b], owner[a]
                after = sums(moved)
                better = after.sum() > now.sum() + 1e-9
                assert not (better and min(after[owner[a]], after[owner[b]]) > now.min() + 1e-9)


def insertions(v: Array, owner: list[int]) -> bool:
    """Lines 7 to 15 of Algorithm 1, once for each worker."""
    masters, moved = len(v), False
    for n in range(v.shape[1]):
        total = [sum(v[m, i] for i in range(v.shape[1]) if owner[i] == m) for m in range(masters)]
        m1 = owner[n]
        m2 = min((m for m in range(masters) if m != m1), key=lambda m: total[m])
        after = list(total)
        after[m1], after[m2] = total[m1] - v[m1, n], total[m2] + v[m2, n]
        if min(after) > min(total) + 1e-12:
            owner[n], moved = m2, True
    return moved


def interchanges(v: Array, owner: list[int]) -> bool:
    """Lines 16 to 22 of Algorithm 1, once for each pair of workers, with V brought up to date."""
    masters, workers, moved = *v.shape, False
    for n1, n2 in itertools.combinations(range(workers), 2):
        total = [sum(v[m, i] for i in range(workers) if owner[i] == m) for m in range(masters)]
        m1, m2 = owner[n1], owner[n2]
        first, second = total[m1] - v[m1, n1] + v[m1, n2], total[m2] - v[m2, n2] + v[m2, n1]
        rises = v[m1, n1] + v[m2, n2] < v[m1, n2] + v[m2, n1]
        if m1 != m2 and rises and min(first, second) > min(total):
            owner[n1], owner[n2], moved = m2, m1, True
    return moved


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("seed", range(8))
def test_coded_algorithm_1_line_by_line(seed: int, rounds: int) -> None:
    """Sun et al., Alg. 1, lines 1 to 29: the best assignment of the rounds, as the listing makes them."""
    v = np.random.default_rng(40 + seed).uniform(1, 5, (3, 12))
    removed, best, most = np.random.default_rng(0), None, 0.0
    owner = [int(np.argmax(v[:, n])) for n in range(12)]  # lines 1 to 6
    for _ in range(rounds):
        while insertions(v, owner) or interchanges(v, owner):
            pass
        level = min(sum(v[m, n] for n in range(12) if owner[n] == m) for m in range(3))
        if level > most + 1e-9:
            best, most = list(owner), level
        out = set(removed.choice(12, 12 // 3, replace=False).tolist())  # lines 23 to 29
        while out:
            m, n = max(itertools.product(range(3), out), key=lambda pair: v[pair])
            owner[n] = m
            out.remove(n)
    assert iterated(v, rule="printed", rounds=rounds).argmax(0).tolist() == best


def test_coded_algorithm_3_takes_the_printed_steps() -> None:
    """Sun et al., eqs. (10), (11), Lemma 2, Alg. 3, lines 1 to 6: three steps, with a general solver for P(z)."""
    pytest.importorskip("cvxpy")
    rows, alpha = 1.5, 0.1  # L M / N = 1: Algorithm 3 is not the same in other units
    u = np.random.default_rng(51).uniform(1, 5, (2, 3))
    a = 1 / u
    steps = coded.successive(ShiftedExponential(u, a), np.full(2, rows), alpha=alpha)
    points = [np.concatenate([z.k.ravel(), z.loads.ravel(), [z.t]]) for z in itertools.islice(steps, 4)]
    # Line 1: a feasible point, k = 1 / M with the loads and the time of Theorem 1.
    np.testing.assert_allclose(points[0][:6], 1 / 2)

    def parts(w: Array) -> tuple[Array, Array, float]:
        return w[:6].reshape(2, 3), w[6:12].reshape(2, 3), float(w[12])

    def above(w: Array, z: Array) -> Array:  # q~ of eq. (10), one for each master
        (k, load, t), (k0, l0, t0) = parts(w), parts(z)
        late, late0 = load * np.exp(-u * t / load), l0 * np.exp(-u * t0 / l0)
        g = (k**2 + load**2) / 2 - (k0 + l0) ** 2 / 2 - (k0 + l0) * (k - k0 + load - l0)
        h = (k + late) ** 2 / 2 - (k0**2 + late0**2) / 2 - k0 * (k - k0)
        # The slopes of l^2 e^{-2ut/l} / 2 are square (l + ut) and -square u l.
        square = np.exp(-2 * u * t0 / l0)
        h = h - square * (l0 + u * t0) * (load - l0) + square * u * l0 * (t - t0)
        return rows + (g + np.exp(u * a) * h).sum(1)

    def missing(w: Array) -> Array:  # the left-hand side of eq. (5)
        k, load, t = parts(w)
        return rows - (k * load * (1 - np.exp(-u / load * (t - a * load)))).sum(1)

    rng, z = np.random.default_rng(52), points[0]
    np.testing.assert_allclose(above(z, z), missing(z), atol=1e-9)
    for _ in range(200):
        other = z * rng.uniform(0.3, 2.0, 13)
        assert np.all(above(other, z) >= missing(other) - 1e-9)  # Lemma 2
    gamma = 1.0
    for here, there in itertools.pairwise(points):
        found = optimize.minimize(
            lambda w: w[12], here, method="SLSQP", bounds=[(1e-6, None)] * 13, options={"maxiter": 500},
            constraints=[
                {"type": "ineq", "fun": lambda w, here=here: -above(w, here)},
                {"type": "ineq", "fun": lambda w: 1 - w[:6].reshape(2, 3).sum(0)},
            ],
        )  # fmt: skip
        assert there[12] == pytest.approx(here[12] + gamma * (found.x[12] - here[12]), rel=1e-5)
        np.testing.assert_allclose(there, here + gamma * (found.x - here), rtol=5e-3, atol=5e-3)
        gamma *= 1 - alpha * gamma


def test_coded_benchmarks() -> None:
    """Sun et al., benchmark 1."""
    problem, u = cluster(2, 6, 50)
    uncoded = plan(problem, "uniform", coded=False)
    np.testing.assert_allclose(uncoded.loads[0, :3], 1e4 / 3)  # L M / N rows each
    np.testing.assert_allclose(uncoded.loads[1, 3:], 1e4 / 3)
    times = simulate(uncoded, 40_000, np.random.default_rng(2)).times
    slowest = (1e4 / 3) * (1 + np.random.default_rng(3).standard_exponential((40_000, 3))) / u[0, :3]
    assert times[:, 0].mean() == pytest.approx(slowest.max(1).mean(), rel=0.02)


def uniform_times(u: Array, rows: float, runs: int, code: bool) -> Array:
    """Times of benchmarks 1 and 2 by the paper's text alone, shape (runs, M), for a = 1 / u."""
    masters, workers = u.shape
    rng, times = np.random.default_rng(99), []
    level = -special.lambertw(-np.exp(-2.0), -1).real  # 1 + u phi
    for m, mine in enumerate(np.array_split(np.arange(workers), masters)):
        speed = u[m, mine]
        # Theorem 1 for a = 1 / u: loads in proportion to u.
        loads = (
            rows * speed * level / (level - 1) / speed.sum() if code else np.full(len(mine), rows / len(mine))
        )
        done = loads / speed * (1 + rng.standard_exponential((runs, len(mine))))
        order = np.argsort(done, axis=1)
        enough = np.cumsum(loads[order], axis=1) >= rows * (1 - 1e-9)
        at = np.take_along_axis(order, np.argmax(enough, axis=1)[:, None], 1)
        times.append(np.take_along_axis(done, at, 1)[:, 0])
    return np.stack(times, 1)


def drawn_speeds(seed: int, masters: int, workers: int) -> Array:
    """u of the cluster that an experiment draws with a seed, uniform on [1, 5]."""
    return np.random.default_rng(seed).uniform(1, 5, (masters, workers))


def test_coded_fig_2_is_the_98_per_cent_quantile_of_the_slower_master() -> None:
    """Sun et al., Fig. 2, benchmark 2."""
    seconds = coded.fig2(quick=True).figures["seconds_98"]
    for (_, found), rows in zip(seconds.items(), (1e5, 1e4), strict=True):
        for method, code in (("uncoded", False), ("uniform", True)):
            each = [uniform_times(drawn_speeds(seed, 2, 20), rows, 20_000, code) for seed in range(4)]
            worst = np.mean([np.quantile(times, 0.98, axis=0).max() for times in each]) / 1000
            assert found[method] == pytest.approx(worst, rel=0.02)
        # Of 1.40 s for the dedicated assignments and 1.38 s for the probabilistic one, at a tenth of the rows.
        assert found["probabilistic"] < found["exact"] < found["simple"] < 0.8 * found["uniform"]
        assert found["exact"] == pytest.approx(1.40 * rows / 1e4, rel=0.03)


def test_coded_fig_3_is_the_mean_time_of_the_slowest_of_four_masters() -> None:
    """Sun et al., Fig. 3, benchmark 2."""
    result = coded.fig3(quick=True)
    found, two = result.figures["system_mean_seconds"].values()
    for method, code in (("uncoded", False), ("uniform", True)):
        each = [uniform_times(drawn_speeds(seed, 4, 50), 1e5, 10_000, code) for seed in range(3)]
        assert found[method] == pytest.approx(np.mean([t.max(1).mean() for t in each]) / 1000, rel=0.01)
        bars = [np.mean([t[:, m].mean() for t in each]) / 1000 for m in range(4)]
        shown = [r for r in result.rows if r["method"] == method and "printed" in r["setting"]]
        np.testing.assert_allclose([r["mean_seconds"] for r in shown[:4]], bars, rtol=0.02)
        assert shown[4]["mean_seconds"] == found[method]
    # The claims are of the slowest of the proposed assignments, in each cluster and on average.
    for means in (found, two):
        worst = max(means[each] for each in ("simple", "iterated", "probabilistic"))
        less = [f"{100 * (1 - worst / means[other]):.0f} % less than" for other in ("uncoded", "uniform")]
        assert f"{less[0]} uncoded and {less[1]} coded uniform" in result.ours
    reached = {"80 % less than uncoded": 0.0, "49 % less than coded uniform": 0.0}
    for seed in range(3):
        problem = random_problem(4, 50, 1e5, np.random.default_rng(seed), (1.0, 5.0))

        def mean(made: CodedPlan, seed: int = seed) -> float:
            return simulate(made, 5_000, np.random.default_rng([seed, 4])).mean().value

        worst = max(mean(plan(problem, each)) for each in ("simple", "iterated", "probabilistic"))
        uncoded, uniform = mean(plan(problem, "uniform", coded=False)), mean(plan(problem, "uniform"))
        reached["80 % less than uncoded"] += (worst <= (1 - 0.80) * uncoded) / 3
        reached["49 % less than coded uniform"] += (worst <= (1 - 0.49) * uniform) / 3
    printed, shown_two = result.figures["portion_of_clusters"].values()
    assert shown_two == pytest.approx(reached)
    assert printed == {"80 % less than uncoded": 0.0, "49 % less than coded uniform": 0.0}


def test_coded_fig_4_is_the_time_of_each_iterate_beside_the_dedicated_optimum(tmp_path: Path) -> None:
    """Sun et al., Fig. 4: the first step is whole, the second 1 - alpha of the way; the limit is that of an LP."""
    pytest.importorskip("cvxpy")
    result, rows = ran("coded", "fig4", tmp_path)
    u = drawn_speeds(0, 2, 12)
    rate = u / -special.lambertw(-np.exp(-2.0), -1).real  # eq. (8) with a = 1 / u
    owners = np.array(list(itertools.product((0, 1), repeat=12)))
    dedicated = 1e5 / np.minimum((owners == 0) @ rate[0], (owners == 1) @ rate[1]).max()
    # max V so that V <= sum of k v for each master, and each worker's k sum to 1 at most
    upper = np.vstack([np.kron(np.eye(2), np.ones(12)) * -rate.ravel(), np.tile(np.eye(12), 2)])
    upper = np.hstack([upper, np.repeat([1.0, 0.0], [2, 12])[:, None]])
    limit = optimize.linprog(np.append(np.zeros(24), -1), upper, np.append([0, 0], np.ones(12)))
    shown = result["milliseconds"]
    assert shown["exact"] == pytest.approx(dedicated, rel=1e-4)
    assert shown["probabilistic"] == pytest.approx(1e5 / limit.x[-1], rel=1e-6)
    traces = {
        alpha: np.array([float(row["t_ms"]) for row in rows if row["alpha"] == alpha])
        for alpha in ("0.1", "0.01", "0.001")
    }
    start, first = traces["0.1"][:2]
    assert start == pytest.approx(
        (2 * 1e5 / rate.sum(1)).max(), rel=1e-5
    )  # each worker at both masters by half
    whole = (traces["0.001"][2] - first) / 0.999  # the whole second step
    for alpha, trace in traces.items():
        assert len(trace) == 26
        assert trace[:2] == pytest.approx([start, first], rel=1e-5)
        assert trace[2] - first == pytest.approx((1 - float(alpha)) * whole, rel=1e-3)
        assert (np.diff(trace) < 0).all()
        assert shown[alpha] == pytest.approx(trace[-1], rel=1e-5)
        below = np.flatnonzero(trace < shown["iterated"])
        assert shown[f"{alpha} below iterated after"] == (below[0] if len(below) else -1)
    assert shown["probabilistic"] < shown["0.001"] < shown["0.01"] < dedicated < shown["0.1"]
    assert shown["0.1"] < 1.02 * shown["probabilistic"]


# WLBS


def test_weighted_update_of_all_nodes_is_that_of_one() -> None:
    """Eq. (6) of WLBS against its distributed form. The plain mean is biased, and so is its eq. (7), which weighs a
    node by 1 / (K size_k), as the text has it.

    LB-BSP, eqs. (1), (2), (6) to (8); WLBS, eqs. (1) to (3), (6), (7).
    """
    rng = np.random.default_rng(60)
    nodes = [rng.standard_normal((size, 3)) for size in (10, 30, 5)]  # the gradient of each sample
    together = np.concatenate(nodes)
    start, rate = rng.standard_normal(3), 0.1
    parameters = Parameters(start.copy())
    parameters.move(aggregate([WorkerGradient(node.mean(0), 0.0, len(node)) for node in nodes]).step, rate)
    np.testing.assert_allclose(parameters.values, start - rate * together.mean(0), atol=1e-14)
    naive = start - rate * np.mean([node.mean(0) for node in nodes], axis=0)
    assert np.abs(naive - parameters.values).max() > 1e-3


@pytest.mark.parametrize(("micro", "theta"), [(4, 0.05), (1, 0.05), (1, 0.6)])
@pytest.mark.parametrize("seed", range(4))
def test_wlbs_the_quickest_relieves_the_slowest_until_their_times_are_near(
    seed: int, micro: int, theta: float
) -> None:
    """WLBS, section 3.2 (adjustments), section 3.2 (stop)."""
    rng = np.random.default_rng(61 + seed)
    pace = rng.permutation(np.geomspace(0.1, 0.5, 5)) * rng.uniform(0.9, 1.1, 5)  # rounds of some 12 s
    policy = policies.create(f"wlbs:micro={micro},period=3,epoch=0,theta={theta}", Cluster(5, 240))
    made, state = policy.init()
    loads, moves, stopped = np.full(5, 48), 0, 0
    for t in range(1, 91):
        np.testing.assert_allclose(np.asarray(made.shares) * 240, loads, atol=1e-9)
        seconds = pace * loads
        made, state = policy.step(state, Round(loads / 240, seconds, 240))
        if t % 3 == 0:
            best, worst = int(np.argmin(seconds)), int(np.argmax(seconds))
            rate = loads / seconds
            even = loads[worst] * rate[best] - loads[best] * rate[worst]
            moved = micro * int(np.floor(even / (rate[best] + rate[worst]) / micro + 0.5))
            if np.ptp(seconds) > theta * seconds.mean():
                loads = loads + moved * ((np.arange(5) == best).astype(int) - (np.arange(5) == worst))
                moves += moved > 0
            else:
                stopped += moved > 0
    assert moves >= (2 if theta < 0.1 else 1)
    assert stopped > 0 or theta < 0.1  # theta alone keeps samples where they are, not the rounding


@pytest.mark.parametrize("seed", range(4))
def test_lsp_groups_of_l_and_a_barrier_after_m(seed: int) -> None:
    """WLBS, eq. (4), section 3.1."""
    nodes, group, barrier = 5, 3, 3  # the paper's example
    gate = sync.create(f"lsp:{group}:{barrier}", nodes)
    _, state = gate.init()
    rng = np.random.default_rng(70 + seed)
    due = rng.exponential(1.0, nodes)  # when each node pushes its increment
    pushed: list[int] = []
    counter = 0
    for _ in range(120):
        node = int(np.argmin(due))
        now, due[node] = float(due[node]), np.inf
        effects, state = gate.arrive(state, node, now)
        pushed.append(node)
        enough = len(pushed) == (nodes if counter == barrier else group)
        moved = [g.worker for each in effects if isinstance(each, Apply) for g in each.gradients]
        freed = [w for each in effects if isinstance(each, Release) for w in each.workers]
        assert sorted(moved) == sorted(freed) == (sorted(pushed) if enough else [])
        if enough:
            counter = 0 if counter == barrier else counter + 1
            due[pushed] = now + rng.exponential(1.0, len(pushed))
            pushed = []


@pytest.mark.parametrize(("group", "barrier"), [(3, 3), (1, 5), (5, 2), (2, 8)])
def test_lsp_regret_keeps_to_its_bound(group: int, barrier: int) -> None:
    """WLBS, eq. (5): f_t(w) = |w - c_t|, so that L = 1, and |w - w'| <= sqrt(2) F with F = 1."""
    nodes, steps, rng = 5, 4000, np.random.default_rng(group)
    gate = sync.create(f"lsp:{group}:{barrier}", nodes)
    _, state = gate.init()
    sigma = 1 / np.sqrt(2 * (barrier + 1) * group)
    w, held, pushed = 0.0, np.zeros(nodes), np.zeros(nodes)
    aims, losses, due = rng.normal(0.3, 0.2, steps), np.zeros(steps), rng.exponential(1.0, nodes)
    for t in range(steps):
        node = int(np.argmin(due))
        now, due[node] = float(due[node]), np.inf
        losses[t] = abs(held[node] - aims[t])
        pushed[node] = -sigma / np.sqrt(t + 1) * np.sign(held[node] - aims[t])  # u_t
        effects, state = gate.arrive(state, node, now)
        for each in effects:
            if isinstance(each, Apply):
                w += sum(pushed[g.worker] for g in each.gradients)
            if isinstance(each, Release):
                for worker in each.workers:
                    held[worker], due[worker] = w, now + rng.exponential(1.0)
    regret = np.cumsum(losses - np.abs(aims - np.median(aims)))
    t = np.arange(1, steps + 1)
    bound = 4 * np.sqrt(2 * (barrier + 1) * group * t)  # 4 F L sqrt(2 (m + 1) l T), of the sum
    assert np.all(regret[100:] <= bound[100:])
    # Printed for the mean over T, and times K: it holds as well, and says nothing, since the mean goes to 0.
    assert np.all(regret[100:] / t[100:] <= nodes * bound[100:])
    assert regret[-1] / steps < 0.02 < nodes * bound[0] < nodes * bound[-1]


@pytest.mark.parametrize("workers", [4, 6])  # (N - 1) / 4 below and above 1
def test_dolbie_theorem_1_with_its_constants_put_right(workers: int) -> None:
    """DOLBIE, Theorem 1."""
    rounds, batch = 40, 200
    rng = np.random.default_rng(workers)
    pace = np.geomspace(0.001, 0.01, workers) * np.exp(0.1 * rng.standard_normal((rounds, workers)))
    overhead = rng.uniform(0.01, 0.02, (rounds, workers))
    drifting = from_trace(Trace(pace, overhead), global_batch=batch, fractional=True)
    text = "dolbie:alpha=0.03,floor=0"
    outcome = run(drifting, [text])
    played = outcome.policies[text]
    x, alpha, alphas, total, path = np.full(workers, 1 / workers), 0.03, [], 0.0, 0.0
    before = None
    for slope, comm in zip(pace, overhead, strict=True):
        seconds = x * batch * slope + comm
        best, level = best_division(BATCH / batch / slope, comm)
        path += 0.0 if before is None else float(np.linalg.norm(best - before))
        before = best
        alphas.append(alpha)
        total += seconds.max() - level
        s = int(np.argmax(seconds))
        possible = np.minimum((seconds[s] - comm) / (batch * slope), 1.0)
        new = x + alpha * (possible - x)
        new[s] = 1 - (new.sum() - new[s])
        x, alpha = new, min(alpha, new[s] / (workers - 2 + new[s]))
    inside = (1 + path) / alphas[-1] + rounds * min((workers - 1) / 4, 1)
    inside += workers * (workers - 1) / 2 * sum(alphas)
    bound = batch * pace.max() * np.sqrt(rounds * inside)
    np.testing.assert_allclose(played.steps[:, 0], alphas, rtol=1e-9)  # type: ignore[index]
    assert path > 0.1
    assert outcome.path[0] == pytest.approx(path, rel=1e-6)
    assert measures.regret(played, outcome)[-1, 0] == pytest.approx(total, rel=1e-6)
    found = measures.regret_bound(played, outcome)
    assert found is not None
    assert found[0] == pytest.approx(bound, rel=1e-7)
    assert 0 < total < bound


def test_settings_of_the_experiments() -> None:
    """DOLBIE, setting; LB-BSP, setting; DBW, setting; Sun et al., setting."""
    assert (dolbie.WORKERS, dolbie.BATCH) == (30, 256)
    assert dolbie.POLICIES["OGD"] == "ogd:rate=0.001"
    assert dolbie.POLICIES["LB-BSP"] == "lbbsp:delta=5,rounds=5"
    assert dolbie.POLICIES["ABS"] == "abs:window=5"
    assert dolbie.POLICIES["DOLBIE"] == "dolbie:alpha=0.001"
    assert len(dolbie.PROCESSORS) == 5
    assert lbbsp_clusters.MODELS == {"ResNet-32": (128, 0.015), "Inception-V3": (32, 0.25)}
    assert {kind: bounds[:2] for kind, bounds in lbbsp_clusters.GPUS.items()} == {
        "g2": (58, 384), "p2": (92, 1184), "g3": (103, 788)}  # fmt: skip
    assert lbbsp_clusters.COUNTS == {"g2": 4, "p2": 2, "g3": 2}
    assert lbbsp_clusters.cluster_c(2, 1).global_batch == 8 * 380
    assert (lbbsp_clusters.ABUNDANT, lbbsp_clusters.DEFICIENT) == (480, 160)
    assert lbbsp_clusters.SCHEMES["SSP"] == ("ssp:10", "equal")
    assert lbbsp_clusters.TARGET == 0.6
    assert list(lbbsp.PRINTED.values()) == [
        (11.85, 0.584), (7.85, 0.489), (9.67, 0.523), (8.34, 0.491), (9.19, 0.515), (4.78, 0.423)]  # fmt: skip
    assert (dbw.WORKERS, dbw.MNIST_RATE) == (16, 0.08)
    assert (Dbw(16).depth, Dbw(16).beta) == (5, 1.01)
    played = {name: each.default for name, each in inspect.signature(dbw.play).parameters.items()}
    kept = {"batch": 500, "lr": 0.08, "mode": "push-wait", "rate": "fixed"}
    assert {name: played[name] for name in kept} == kept
    assert (coded.PRINTED.rows, coded.PRINTED.speeds) == (1e5, None)
    problem = random_problem(4, 50, coded.PRINTED.rows, np.random.default_rng(0))
    u, a = problem.delay.u, problem.delay.a  # type: ignore[attr-defined]
    assert 1 <= u.min() < 1.1 < 4.9 < u.max() <= 5
    np.testing.assert_allclose(u * a, 1)
