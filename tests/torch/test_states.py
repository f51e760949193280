"""``load_state_dict`` takes its own states whole, and refuses anything else with a sentence, changing nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline.torch
from paceline import PacelineError, policies
from paceline.balancer import Balancer
from paceline.rounds import Cluster
from support.guarantees import guarantee

GUARANTEES = (
    "A resumed run continues with the same plans and samples; a state that does not fit raises and "
    "changes nothing.",
)

JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3),
    st.lists(st.floats(), max_size=3), st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
)  # fmt: skip


def balancer(policy: str, workers: int = 3) -> Balancer:
    return Balancer(policies.create(policy, Cluster(workers, 60)))


def state_of(policy: str) -> dict[str, Any]:
    loop = balancer(policy)
    for step in range(3):
        loop.report(step, loop.loads(step, 60), np.array([1.0, 2.0, 3.0]))
    return loop.state_dict()


def places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything in a nested state, itself included."""
    yield path
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def changed(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    state = copy.deepcopy(state)
    part = state
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return state


STATES = {policy: state_of(policy) for policy in ("level", "factoring", "dolbie", "lbbsp-cpu")}


@given(data=st.data(), policy=st.sampled_from(sorted(STATES)))
def test_anything_within_a_balancers_state(data: Any, policy: str) -> None:
    """It is taken, and then divides every batch, or refused with a sentence, and then changes nothing."""
    sound = STATES[policy]
    path = data.draw(st.sampled_from(list(places(sound))))
    state = changed(sound, path, data.draw(JUNK))
    loop = balancer(policy)
    loop.load_state_dict(sound, 3)
    said = ""
    try:
        loop.load_state_dict(state, 3)
    except PacelineError as error:
        said = str(error)
    if said:
        assert "\n" not in said
        before = balancer(policy)
        before.load_state_dict(sound, 3)
        assert str(loop.state_dict()) == str(before.state_dict())
    assert loop.loads(3, 60).sum() == 60


@pytest.mark.parametrize("policy", STATES)
def test_states_that_went_through_json(policy: str) -> None:
    first, second = balancer(policy), balancer(policy)
    first.load_state_dict(STATES[policy], 3)
    second.load_state_dict(json.loads(json.dumps(STATES[policy])), 3)
    assert first.loads(3, 60).tolist() == second.loads(3, 60).tolist()
    assert str(first.state_dict()) == str(second.state_dict())


def pace_after(rounds: int) -> paceline.torch.Pace:
    model = torch.nn.Linear(2, 1)
    pace = paceline.torch.Pace(model, global_batch=4, policy="level")
    data = torch.utils.data.TensorDataset(torch.zeros(20, 2), torch.zeros(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in pace.loader(data):
        if pace.rounds == rounds:
            break
        pace.backward(((model(x) - y) ** 2).mean())
        pace.step(optimizer)
    pace.host.abandon()
    return pace


@guarantee(
    "After a loop is left, the next `for` begins a fresh round with the same samples and without the old "
    "gradients."
)
def test_a_backward_pass_that_ends_in_its_middle_leaves_nothing() -> None:
    """The gradients that it had by then do not count in the round that is run once more."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
    pace = paceline.torch.Pace(model, global_batch=4, policy="equal")
    x, y = torch.randn(4, 2), torch.randn(4, 1)
    (model(x) - y).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    trouble = iter([True, False])

    def fail(grad: torch.Tensor) -> None:
        if next(trouble):
            raise RuntimeError("out of memory")

    model[0].weight.register_hook(fail)  # after the gradients of the last layer
    for _ in range(2):
        try:
            for a, b in pace.loader(torch.utils.data.TensorDataset(x, y)):
                pace.backward((model(a) - b).square().mean())
                break  # the step is left out
        except RuntimeError:
            pace.host.abandon()
            pace.load_state_dict(pace.state_dict())
    found = [p.grad for p in model.parameters()]
    assert all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (None, {}, "version=None; expected 1"),
        (None, 7, "the state of Pace is 7; expected a dict"),
        ("version", 2, "version=2; expected 1"),
        ("version", None, "version=None; expected 1"),
        ("version", True, "version=True; expected 1"),
        ("rounds", "x", "rounds='x'; expected a whole number"),
        ("rounds", -3, "rounds=-3; expected a whole number of at least 0"),
        ("rounds", None, "rounds=None; expected a whole number"),
        ("epoch", 0.5, "epoch=0.5; expected a whole number"),
        ("samples_done", [1], r"samples_done=\[1\]; expected a whole number"),
        ("global_batch", 8, "made with global_batch=8, this run has 4"),
        ("seed", -1, "seed=-1; expected a whole number of at least 0"),
        ("shuffle", 1, "shuffle=1; expected True, False or None"),
        ("policy", 5, "policy=5; expected the name of a policy"),
        ("balancer", None, "balancer=None; expected a dict"),
        ("balancer", {}, "expected a dict with workers in it"),
    ],
)
def test_states_of_pace_that_are_none(name: str | None, value: Any, words: str) -> None:
    pace = pace_after(2)
    before = pace.state_dict()
    with pytest.raises(PacelineError, match=words):
        pace.load_state_dict(value if name is None else before | {name: value})
    assert str(pace.state_dict()) == str(before)
    pace.close()


def test_a_state_is_taken_back_whole() -> None:
    saved, fresh = pace_after(3).state_dict(), pace_after(0)
    fresh.load_state_dict(saved)
    assert str(fresh.state_dict()) == str(saved)
    assert (fresh.rounds, fresh.host.progress.samples_done) == (3, 12)
