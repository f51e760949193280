from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

from paceline import Cluster, PacelineError, Plan, coded, policies, sync
from paceline.balance import POLICIES
from paceline.forecast import FORECASTS
from paceline.sync import GATES

CLUSTER = Cluster(4, 64)


class Inner(NamedTuple):
    a: np.ndarray
    b: np.ndarray


class Outer(NamedTuple):
    inner: Inner
    c: np.ndarray
    nothing: tuple


def test_options_reach_the_policy():
    policy = policies.create("dolbie:alpha=0.01,monotone=no", CLUSTER)
    assert (policy.alpha, policy.monotone, policy.tight) == (0.01, False, False)
    assert policy.cluster is CLUSTER
    assert policies.create("level:forecast=ema:gain=0.5", CLUSTER).forecast == "ema:gain=0.5"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("levle", "did you mean level[?] Expected one of abs, ata, auto, dolbie, equal"),
        ("dolbie:speed=3", "alpha, monotone, tight"),
        ("dolbie:alpha=fast", "expected a number"),
        ("dolbie:alpha=2", "0 < alpha <= 1"),
        ("dolbie:floor=-1", "0 <= floor <= 1"),
        ("level:forecast=ema:of=time", "speed, seconds"),
        ("level:forecast=oracle", "forecast 'oracle' is unknown"),
        ("lbbsp-gpu:knee=40", "lower it"),
        ("equal:cluster=3", "no options"),
    ],
)
def test_policy_that_cannot_be_made_raises(text, words):
    with pytest.raises(PacelineError, match=words):
        policies.create(text, CLUSTER)


def test_states_of_any_shape_are_taken_apart_and_restored():
    state = Outer(Inner(np.arange(3.0), np.array([True, False])), np.array(7), ())
    stored = policies.leaves(state)
    assert [leaf.dtype.kind for leaf in stored] == ["f", "b", "i"]
    template = Outer(Inner(np.zeros(3), np.zeros(2, bool)), np.array(0), ())
    back = policies.restore(template, [leaf.tolist() for leaf in stored])
    assert type(back.inner) is Inner
    for a, b in zip(policies.leaves(back), stored, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("cluster", [None, 4, "x"])
def test_a_policy_is_made_for_a_cluster_alone(cluster):
    with pytest.raises(PacelineError, match=r"cluster=.*: expected a paceline\.Cluster"):
        policies.create("level", cluster)


@pytest.mark.parametrize("text", [None, 3, ["level"], b"level"])
def test_a_policy_is_asked_for_by_text_alone(text):
    with pytest.raises(PacelineError, match=r"policy .* is unknown; expected one of abs, "):
        policies.create(text, CLUSTER)


def test_another_policys_state_is_refused():
    small = policies.create("dolbie", Cluster(3, 64)).init()[1]
    mine = policies.create("dolbie", CLUSTER).init()[1]
    with pytest.raises(PacelineError, match="another number of workers"):
        policies.restore(mine, policies.leaves(small))
    with pytest.raises(PacelineError, match="another policy"):
        policies.restore(mine, policies.leaves(small)[:1])


def test_digest_survives_as_a_float_and_differs_between_plans():
    plan = Plan(np.array([0.5, 0.5]))
    value = policies.digest(plan)
    assert value == int(float(value)) == policies.digest(Plan(np.array([0.5, 0.5])))
    assert value != policies.digest(Plan(np.array([0.5, np.nextafter(0.5, 1)])))
    assert policies.digest(Plan(np.array([1.0, -0.0]))) == policies.digest(Plan(np.array([1.0, 0.0])))
    assert policies.digest(Plan(np.array([0.25, 0.75]))) == 1781062005066752  # the same on every machine


def test_registered_policies_have_their_names(monkeypatch):
    @dataclass(frozen=True)
    class Mine:
        """Mine."""

        cluster: Cluster

    monkeypatch.setattr(policies, "POLICIES", dict(policies.POLICIES))
    policies.register("mine", Mine)
    assert isinstance(policies.create("mine", CLUSTER), Mine)
    assert policies.describe("mine") == "Mine."
    with pytest.raises(PacelineError, match="exists already"):
        policies.register("level", Mine)
    with pytest.raises(PacelineError, match="unknown"):
        policies.describe("yours")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (policies.describe, "policy {} is unknown"),
        (lambda word: POLICIES["abs"](CLUSTER, reading=word), "reading={}: expected inverse or share"),
        (lambda word: POLICIES["lbbsp"](CLUSTER, reading=word), "reading={}: expected loose or strict"),
        (
            lambda word: POLICIES["factoring"](CLUSTER, scheme=word),
            "={}: expected adaptive, factoring, guided or self",
        ),
        (lambda word: POLICIES["level"](CLUSTER, forecast=word), "forecast {} is unknown"),
        (lambda word: POLICIES["lbbsp-cpu"](CLUSTER, forecast=word), "forecast {} is unknown"),
        (lambda word: FORECASTS["ema"](of=word), "of={}: expected speed or seconds"),
        (lambda word: FORECASTS["recurrent"](cell=word), "cell={}: expected simple or lstm"),
        (lambda word: FORECASTS["narx"](inputs=word), "inputs={}: expected 6 or 8"),
        (lambda word: GATES["bsp"](2, late=word), "late={}: expected drop or use"),
        (lambda word: sync.create("bsp", 2, word), "mode {} is unknown"),
        (lambda word: coded.fit(np.empty(1, object), word), "family={}: expected one of"),
        (lambda word: coded.plan(coded.random_problem(1, 2, 9, np.random.default_rng(0)), word), "assign={}"),
    ],
)
def test_array_or_number_in_place_of_a_word_raises(call, words):
    for word, shown in ((np.array(["a", "b"]), ".*array.*"), (7, "7")):
        with pytest.raises(PacelineError, match=words.format(shown)):
            call(word)
