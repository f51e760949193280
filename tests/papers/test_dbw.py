"""DBW's experiments: what they take for the truth against closed forms, and that each writes what it says."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional

from paceline.data import datasets
from paceline.learners.images import Images
from paceline.papers import dbw, dbw_training, experiments
from paceline.papers.dbw import Remembering
from paceline.paramserver.samples import Draws
from support.experiments import ran
from support.skips import with_data


def test_the_true_times_meet_what_is_known_of_order_statistics() -> None:
    """DBW, Appendix A."""
    times = dbw._stationary(5, 6000)  # round trips of .3 + .7 Exp(1)
    # The k-th of five that start together: .3 + .7 (1/5 + ... + 1/(6 - k)). Some start later, but with k = n none.
    together = 0.3 + 0.7 * np.cumsum(1 / np.arange(5, 0, -1))
    assert times[4] == pytest.approx(together[4], rel=0.02)
    assert np.all(times[:4] > together[:4])
    assert np.all(np.diff(times) > 0)


def test_the_constrained_estimates_are_better_than_plain_means(tmp_path: Path) -> None:
    """DBW, Fig. 3."""
    _, rows = ran("dbw", "fig3", tmp_path)
    errors = {(row["estimator"], row["k"]): float(row["rms_error"]) for row in rows}
    assert all(errors["constrained", k] < errors["naive", k] for k in "34")  # those seldom tried


def test_the_stand_in_for_spark_has_the_percentiles_it_was_made_from(tmp_path: Path) -> None:
    """DBW, Fig. 7."""
    _, rows = ran("dbw", "fig7", tmp_path)
    found = {float(row["percentile"]): float(row["seconds"]) for row in rows}
    one, tail = stats.lognorm(0.4, scale=0.9), stats.lognorm(0.4, scale=2.7)
    for percentile, seconds in found.items():
        share = 0.97 * one.cdf(seconds) + 0.03 * tail.cdf(seconds)
        assert share == pytest.approx(percentile / 100, abs=0.01)


@with_data("mnist")
def test_a_slowdown_of_half_of_the_workers_is_noticed(tmp_path: Path) -> None:
    """DBW, Fig. 9."""
    result, _ = ran("dbw", "fig9", tmp_path)  # 28 virtual seconds
    assert "dbw:memory=0.9 16 -> 8" in result["ours"]


def test_seconds_are_counted_by_what_an_update_waited_for() -> None:
    updates = [SimpleNamespace(ended=now, quorum=k) for now, k in ((2.0, 4), (2.5, 1), (4.0, 4), (7.0, 2))]
    assert dbw_training.waited(updates, 4) == pytest.approx(2.0 + 1.5)  # type: ignore[arg-type]
    assert dbw_training.waited(updates, 3) == 0  # type: ignore[arg-type]


SHAPES = [(10, 1, 5, 5), (10,), (20, 10, 5, 5), (20,), (50, 320), (50,), (10, 50), (10,)]


@pytest.fixture
def images() -> Images:
    """The network of the figures on 60 images of noise."""
    rng = np.random.default_rng(5)
    x = rng.integers(256, size=(60, 1, 28, 28), dtype=np.uint8)
    y = rng.integers(10, size=60)
    return Images(datasets.Data(x, y, x, y, 10, "noise"), "cnn", seed=1)


def test_the_network_has_two_convolutions_of_5_by_5_and_two_dense_layers(images: Images) -> None:
    """DBW, setting."""
    assert [tuple(p.shape) for p in images._flat.model.parameters()] == SHAPES
    assert len(images.start()) == 260 + 5_020 + 16_050 + 510 == 21_840


def test_its_gradient_is_the_one_that_a_plain_computation_gives(images: Images) -> None:
    """DBW, eqs. (1) to (3)."""
    samples = np.array([3, 3, 17, 40, 59])
    values = images.start()
    gradient, loss = images.gradient(values, samples)
    parameters, place = [], 0
    for shape in SHAPES:  # float64, ReLU before pooling, channels in their usual order
        size = int(np.prod(shape))
        flat = torch.tensor(values[place : place + size], dtype=torch.float64)
        parameters.append(flat.reshape(shape).requires_grad_())
        place += size
    w1, b1, w2, b2, w3, b3, w4, b4 = parameters
    pixels = images.data.x_train / 255.0
    x = torch.from_numpy((pixels - pixels.mean()) / pixels.std())[samples]
    x = functional.max_pool2d(functional.relu(functional.conv2d(x, w1, b1)), 2)
    x = functional.max_pool2d(functional.relu(functional.conv2d(x, w2, b2)), 2)
    logits = functional.relu(x.flatten(1) @ w3.T + b3) @ w4.T + b4
    chosen = torch.log_softmax(logits, 1)[torch.arange(5), torch.from_numpy(images.data.y_train[samples])]
    expected = -chosen.mean()
    expected.backward()
    direct = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).numpy()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert images.loss(values, samples) == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(gradient, direct, rtol=0, atol=1e-5 * np.abs(direct).max())


def test_every_run_starts_from_the_same_weights(images: Images) -> None:
    first = images.start()
    images.gradient(first * 2, np.arange(5))
    assert np.array_equal(images.start(), first)
    assert len(np.unique(first)) > 20_000


def test_the_gradient_of_the_whole_set_is_that_of_its_parts(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DBW, Figs. 1, 2."""
    values, everything = images.start() * np.float32(1.1), np.arange(60)
    whole, loss = images.gradient(values, everything)
    monkeypatch.setattr(dbw, "PART", 25)  # parts of 25, 25 and 10
    parts, mean = dbw._whole(images, values, everything)
    assert mean == pytest.approx(loss, rel=1e-5)
    assert dbw._loss(images, values, everything) == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-5 * np.abs(whole).max())


class Bowl:
    """F(w) = mean of |w - x|^2 / 2 over 3,000 points x: V is their variance over B, and L is 1."""

    def __init__(self, data: str) -> None:
        rng = np.random.default_rng(len(data))
        self.x = rng.normal(0.5, 0.7, (3000, 4))
        self.data = SimpleNamespace(x_train=self.x)
        self.probed: list[np.ndarray] = []  # parameters at which the whole set was asked for
        self.batches: set[int] = set()

    def start(self) -> np.ndarray:
        return np.full(4, 3.0)

    def loss(self, values: np.ndarray, samples: np.ndarray) -> float:
        return float(((values - self.x[samples]) ** 2).sum(1).mean() / 2)

    def gradient(self, values: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, float]:
        if samples[0] == 0 and np.array_equal(np.diff(samples), np.ones(len(samples) - 1)):
            self.probed.append(np.array(values))
        else:
            self.batches.add(len(samples))
        return values - self.x[samples].mean(0), self.loss(values, samples)


@pytest.mark.parametrize(
    ("name", "data", "batch", "rate"), [("fig1", "mnist", 500, 0.01), ("fig2", "cifar10", 256, 0.05)]
)
def test_estimates_are_compared_with_the_exact_values(
    name: str, data: str, batch: int, rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DBW, Figs. 1, 2: on a quadratic, whose norm, variance and decrease are known in closed form."""
    bowl = Bowl(data)
    monkeypatch.setattr(dbw, "learner", lambda asked, model: bowl if asked == data else None)
    monkeypatch.setattr(dbw, "dataset", lambda asked: bowl.data if asked == data else None)
    _, table = ran("dbw", name, tmp_path, quick=False)
    rows = [{key: float(value) for key, value in row.items()} for row in table]
    assert len(rows) > 60
    assert bowl.batches - {1000} == {batch}
    mean, spread = bowl.x.mean(0), bowl.x.var(0).sum()
    exact = np.array([((values - mean) ** 2).sum() for values in bowl.probed])
    assert [row["norm2_exact"] for row in rows] == pytest.approx(exact, rel=1e-5)
    assert np.mean([row["variance_exact"] for row in rows]) == pytest.approx(spread / batch, rel=0.1)
    assert np.mean([row["variance"] for row in rows]) == pytest.approx(spread / batch, rel=0.1)
    # Each update multiplies the distance by 1 - rate. Later rows are near the minimum, where noise is large.
    early = slice(2, int(1 / rate) // 4)
    decrease = np.array([row["decrease"] for row in rows])
    assert decrease[early] == pytest.approx((1 - (1 - rate) ** 2) / 2 * exact[early], rel=0.15)
    # The norm is the mean of those of the last five updates, 1 to 5 updates ago.
    lag = np.mean([(1 - rate) ** (-2.0 * ago) for ago in range(1, 6)])
    assert [row["norm2"] for row in rows][early] == pytest.approx(lag * exact[early], rel=0.1)
    promised = np.array([row["gain"] for row in rows])
    assert promised[early].sum() == pytest.approx(lag * decrease[early].sum(), rel=0.1)


def test_what_is_remembered_is_what_was_computed(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.papers.dbw.KEPT", 3 * 21_840 * 4)  # bytes: three gradients
    asked = []

    class Counting:
        def gradient(self, values: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, float]:
            asked.append(samples.tolist())
            return images.gradient(values, samples)

    learns, values = Remembering(Counting()), images.start()
    for each in (values, values * np.float32(1.01), values):
        for samples in (np.array([1, 2]), np.array([2, 3])):
            gradient, loss = learns.gradient(each, samples)
            expected, mean = images.gradient(each, samples)
            assert np.array_equal(gradient, expected)
            assert loss == mean
    assert asked == [[1, 2], [2, 3]] * 2  # nothing the third time
    learns.gradient(values * np.float32(1.01), np.array([2, 3]))  # there was no room for this one
    assert len(asked) == 5


@pytest.mark.parametrize("name", ["fig1", "fig4", "fig6", "fig9", "fig10"])
@pytest.mark.parametrize(("quick", "model"), [(False, "cnn"), (True, "mlp")])
def test_figures_on_mnist_train_the_papers_network_unless_they_must_be_quick(
    name: str, quick: bool, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    class Asked(Exception):
        pass

    def play(*args: object, **setting: object) -> None:
        raise Asked(setting["model"])

    def learner(data: str, asked: str) -> None:
        raise Asked(asked)

    for module in (dbw_training, dbw):
        monkeypatch.setattr(module, "play", play)
    monkeypatch.setattr(dbw, "learner", learner)
    with pytest.raises(Asked, match=f"^{model}$"):
        experiments("dbw")[name](tmp_path, quick)


@with_data("cifar10")
def test_data_that_are_split_are_learned_by_each_scheme(tmp_path: Path) -> None:
    """DBW, Fig. 5."""
    drawn = Draws(640, 0, 16)
    mine = [set(drawn.take(worker, 4000).tolist()) for worker in range(16)]
    assert [len(each) for each in mine] == [40] * 16  # "split uniformly at random among workers"
    assert len(set().union(*mine)) == 640
    _, rows = ran("dbw", "fig5", tmp_path)  # 20 virtual seconds
    accuracy = {row["policy"]: float(row["accuracy"]) for row in rows}
    assert set(accuracy) == {"dbw fixed", "blind fixed", "static:8 proportional", "static:8 fixed"}
    assert min(accuracy.values()) > 0.2  # of ten kinds


@with_data("mnist")
def test_each_batch_size_has_its_rates_and_its_best_number(tmp_path: Path) -> None:
    """DBW, Fig. 8."""
    _, rows = ran("dbw", "fig8", tmp_path)
    for batch in ("16", "128", "500"):
        rates = {row["policy"]: float(row["rate"]) for row in rows if row["batch"] == batch}
        # "the same value is also used for DBW"
        assert rates["dbw"] == rates["blind"] == rates["static:16"] > 0
        assert len(rates) == 6
        seconds = {row["policy"]: float(row["seconds"]) for row in rows if row["batch"] == batch}
        assert all(each > 0 for each in seconds.values())


def test_each_figure_has_the_printed_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DBW, setting, Figs. 4, 5, 6, 8, 9, 10: what each trains with, from the paper's captions and section 4."""
    played: list[tuple[str, float, dict[str, Any]]] = []

    def play(backup: str, delay: Any, **setting: Any) -> tuple[list[Any], Any]:
        played.append((backup, delay, setting))
        told = {"loss": 0.05, "quorum": 16, "variance": 1.0, "norm2": 1.0, "seconds": 60.0}
        updates = [SimpleNamespace(ended=60.0 * n, **told) for n in range(1, 7)]
        return updates, SimpleNamespace(parameters=SimpleNamespace(values=None))

    monkeypatch.setattr(dbw_training, "play", play)
    monkeypatch.setattr(dbw_training, "knee_rates", lambda batch, ks, *rest: dict.fromkeys(ks, 0.1))
    monkeypatch.setattr(
        dbw_training, "learner", cache(lambda *rest: SimpleNamespace(test=lambda _: (0, 0.5)))
    )

    def of(figure: str) -> list[tuple[str, float, dict[str, Any]]]:
        played.clear()
        experiments("dbw")[figure](tmp_path, False)
        return list(played)

    def alpha(delay: Any) -> float:
        draws = next(delay.stream((40_000,), np.random.default_rng(0)))
        assert draws.mean() == pytest.approx(1.0, abs=0.03)  # 1 - alpha + alpha Exp(1)
        return float(draws.std())

    def kinds(runs: list[tuple[str, float, dict[str, Any]]]) -> set[tuple[str, str]]:
        return {(backup, setting.get("rate", "fixed")) for backup, _, setting in runs}

    dynamic = {("dbw", "fixed"), ("dbw:worth=noise", "fixed"), ("blind", "fixed")}
    fig4 = of("fig4")
    assert {setting.get("batch", 500) for _, _, setting in fig4} == {500}
    assert {setting.get("target", 0.2) for _, _, setting in fig4} == {0.2}
    assert all(alpha(delay) == pytest.approx(0.7, abs=0.02) for _, delay, _ in fig4)
    assert dynamic | {("static:10", "proportional"), ("static:16", "proportional")} <= kinds(fig4)
    for _, delay, setting in of("fig5"):
        assert alpha(delay) == pytest.approx(1.0, abs=0.03)
        assert (setting["lr"], setting["batch"], setting["shards"]) == (0.05, 256, 16)
    fig6 = of("fig6")
    assert {setting.get("target", 0.2) for _, _, setting in fig6} == {0.2}
    assert {round(alpha(delay), 1) for _, delay, _ in fig6} == {0.0, 0.2, 1.0}
    assert dynamic | {(f"static:{k}", "proportional") for k in (8, 12, 16)} <= kinds(fig6)
    assert {setting["batch"] for _, _, setting in of("fig8")} == {16, 128, 500}
    for _, delay, setting in of("fig9"):
        assert alpha(delay) == 0
        (change,) = setting["changes"]
        assert (change.at, len(change.workers), change.factor) == (160.0, 8, 5.0)
    fig10 = of("fig10")
    assert {(setting["mode"], setting["target"]) for _, _, setting in fig10} == {("push-interrupt", 0.07)}
    assert kinds(fig10) == {("dbw", "fixed"), ("dbw:worth=noise", "fixed"), ("adasync", "fixed")}
    assert {round(alpha(delay), 1) for _, delay, _ in fig10} == {0.1, 0.3, 0.7, 1.0}
    for each in (fig6, fig10):  # DBW keeps the full rate, static k have theirs in proportion
        assert {setting.get("rate", "fixed") for backup, _, setting in each if backup[:3] == "dbw"} == {
            "fixed"
        }
        assert {setting.get("lr", dbw.MNIST_RATE) for _, _, setting in each} == {0.08}


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str, float], float]:
    """Seconds of an update by (backup policy, rule of the rate, alpha), as ``play`` then plays: 20 updates, the first
    ten with a loss of 1.01, the others with none, from 1, 2, ... 20 gradients."""
    found: dict[tuple[str, str, float], float] = {}

    def play(backup: str, delay: Any, rate: str = "fixed", **setting: Any) -> tuple[list[Any], None]:
        alpha = round(float(next(delay.stream((40_000,), np.random.default_rng(0))).std()), 1)
        each = found.setdefault((backup, rate, alpha), 1.0 + len(found) % 7 + 0.01 * len(found))
        losses = [1.01] * 10 + [0.0] * 10
        told = {"variance": 1.0, "norm2": 1.0}
        return [
            SimpleNamespace(ended=each * (i + 1), loss=loss, quorum=i + 1, **told)
            for i, loss in enumerate(losses)
        ], None

    monkeypatch.setattr(dbw_training, "play", play)
    monkeypatch.setattr(dbw_training, "learner", cache(lambda *rest: None))
    return found


def name_of(backup: str, rate: str) -> str:
    return f"{backup} {rate}" if backup.startswith("static") else backup


def test_fig4_has_the_seconds_and_the_numbers_of_gradients(
    seconds: dict[tuple[str, str, float], float], tmp_path: Path
) -> None:
    """DBW, Fig. 4: five losses in a row are 0 after 15 updates."""
    result, table = ran("dbw", "fig4", tmp_path, quick=False)
    assert len(seconds) == 10
    for (backup, rate, _), each in seconds.items():
        assert f"{name_of(backup, rate)} {15 * each:.0f} s" in result["ours"]
    assert "mean k 3.5 in the first third, 17.5 in the last; B-DBW's median 10" in result["ours"]
    rows = [row for row in table if row["policy"] == "dbw"]
    assert [float(row["loss"]) for row in rows] == [1.01] * 10 + [0.0] * 10
    assert [float(row["k"]) for row in rows] == list(range(1, 21))
    each = seconds["dbw", "fixed", 0.7]
    assert [float(row["seconds"]) for row in rows] == pytest.approx(
        [each * i for i in range(1, 21)], rel=1e-5
    )


def test_fig6_compares_with_the_best_static_number(
    seconds: dict[tuple[str, str, float], float], tmp_path: Path
) -> None:
    """DBW, Fig. 6."""
    result, rows = ran("dbw", "fig6", tmp_path, quick=False)
    found = {(row["policy"], float(row["alpha"])): float(row["seconds"]) for row in rows}
    assert found == {
        (name_of(backup, rate), alpha): pytest.approx(15 * each, rel=1e-5)
        for (backup, rate, alpha), each in seconds.items()
    }
    for alpha in (0.0, 0.2, 1.0):
        best = min(each for (_, rate, a), each in seconds.items() if rate == "proportional" and a == alpha)
        assert result["ratios"][str(alpha)] == pytest.approx(best / seconds["dbw", "fixed", alpha])
    # From 16 gradients is one of the 20 updates.
    assert result["ours"].count("updates from all 16 take 5 % of dbw's first run") == 3


def test_fig10_has_the_seconds_of_each_rule(
    seconds: dict[tuple[str, str, float], float], tmp_path: Path
) -> None:
    """DBW, Fig. 10."""
    _, rows = ran("dbw", "fig10", tmp_path, quick=False)
    found = {(row["policy"], float(row["alpha"])): float(row["seconds"]) for row in rows}
    assert found == {
        (backup, alpha): pytest.approx(15 * each, rel=1e-5) for (backup, _, alpha), each in seconds.items()
    }
    assert len(found) == 12
