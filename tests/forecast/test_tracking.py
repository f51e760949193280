import numpy as np
import pytest

from paceline.forecast import tracking
from support.guarantees import guarantee


def walk(values):
    """Expectations after each row of values (rounds, ..., n)."""
    track, out = tracking.start(values.shape[1:]), []
    for row in values:
        pace, gain, track = tracking.follow(track, row)
        out.append(pace)
    return np.array(out), gain, track


def noise(shape, scatter, seed=0):
    return np.exp(scatter * np.random.default_rng(seed).standard_normal(shape))


def test_the_first_measurement_is_believed():
    out, _, _ = walk(np.array([[2.0, 3.0]]))
    np.testing.assert_allclose(out, [[2, 3]])


def test_noise_is_averaged_away():
    out, gain, _ = walk(noise((200, 30), 0.3))
    assert np.std(np.log(out[-1])) < 0.3 / 4
    assert np.all(gain < 0.15)


def test_what_drifts_without_noise_is_followed_as_it_is():
    drift = np.exp(np.cumsum(0.05 * np.random.default_rng(0).standard_normal((200, 30)), axis=0))
    out, gain, _ = walk(drift)
    assert np.all(gain > 0.9)
    assert np.std(np.log(out[-1] / drift[-1])) < 0.02


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_change_is_believed_at_once_in_either_direction(factor):
    values = noise((80, 8), 0.1)
    values[50:, 3] *= factor
    out, _, _ = walk(values)
    assert out[50, 3] == pytest.approx(values[50, 3])
    np.testing.assert_allclose(np.delete(out[50], 3), 1, rtol=0.15)
    assert out[-1, 3] == pytest.approx(factor, rel=0.1)  # and averaged from there


def test_a_spike_is_forgotten_a_round_later():
    values = noise((80, 8), 0.05)
    values[50, 3] *= 10
    out, _, _ = walk(values)
    assert out[50, 3] > 8
    assert out[51, 3] == pytest.approx(1, rel=0.15)


@guarantee(
    "Equal workers under `level` take less than 1.02 times as long as with equal shares, with noise, spikes "
    "and up to 85 % overhead."
)
def test_spikes_are_hardly_believed_once_there_were_only_spikes():
    values = noise((300, 4), 0.05)
    values[20::10, 1] *= 3
    out, _, _ = walk(values)
    assert out[20, 1] > 2.5
    assert np.all(out[150::10, 1] < 1.1)
    values[250:, 2] *= 4  # what lasts is followed a round later at the most
    out, _, _ = walk(values)
    np.testing.assert_allclose(out[251:, 2], 4, rtol=0.15)


def test_changes_that_last_are_believed_again():
    steps = np.where(np.arange(600) % 40 < 20, 1.0, 4.0)
    values = noise((600, 3), 0.05)
    values[:200:5, 0] *= 3
    values[200:, 0] *= steps[:400]
    out, _, _ = walk(values)
    moved = np.arange(500, 600, 20)
    np.testing.assert_allclose(out[moved, 0], values[moved, 0], rtol=0.05)


@pytest.mark.parametrize("overhead", [0.5, 0.7, 0.8])
def test_spike_differs_from_a_change_where_the_load_hardly_counts(overhead):
    """A worker is held up once and gets a third of its load. Its seconds then hardly fall, so that it looks slow."""
    values = noise((80, 6), 0.01)
    values[50, 3] *= 3
    values[51, 3] *= overhead * 3 + 1 - overhead
    out, _, track = walk(values[:52])
    assert track.mean[3] == pytest.approx(0, abs=0.02)
    out, _, _ = walk(values)
    assert out[52:, 3] == pytest.approx(1, rel=0.03)


def test_absence_changes_nothing_but_certainty():
    values = noise((60, 4), 0.1)
    values[30:40, 2] = np.nan
    out, _, _ = walk(values)
    np.testing.assert_array_equal(out[30:40, 2], np.full(10, out[29, 2]))
    assert np.isfinite(out).all()
    late = noise((20, 3), 0.1)
    late[:5, 1] = np.nan
    out, _, _ = walk(late)
    assert np.isnan(out[:5, 1]).all()
    assert out[5, 1] == pytest.approx(late[5, 1])


def test_scatter_and_drift_are_learned_apart():
    _, _, noisy = walk(noise((300, 20), 0.2))
    scatter = -(noisy.products / noisy.weight).item()
    both = (noisy.squares / noisy.weight).item()
    assert scatter == pytest.approx(0.04, rel=0.3)
    assert both == pytest.approx(0.08, rel=0.3)
