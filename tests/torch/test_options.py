"""Options of ``Pace`` of another kind than it says are refused in a sentence, whatever they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline.torch
from paceline import PacelineError
from paceline.torch.callbacks import GarbageCollection, OnRound, Record

GUARANTEES = ("An option or a loss of the wrong kind raises with its name and what was expected.",)

MODEL = torch.nn.Linear(2, 1)
GOOD: dict[str, Any] = {"model": MODEL, "global_batch": 8, "policy": "level"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": None}, "model=None: expected a torch.nn.Module"),
        ({"model": "resnet"}, "model='resnet': expected a torch.nn.Module"),
        ({"global_batch": "x"}, "global_batch='x': expected a whole number, 1 to 2,147,483,647"),
        ({"global_batch": float("nan")}, "global_batch=nan: expected a whole number"),
        ({"global_batch": 1e30}, r"global_batch=1e\+30: expected a whole number"),
        ({"global_batch": 10**20}, "global_batch=100000000000000000000: expected a whole number, 1 to"),
        ({"global_batch": True}, "global_batch=True: expected a whole number"),
        ({"global_batch": 0}, "global_batch=0: expected a whole number, 1 to"),
        ({"policy": 5}, "policy=5: expected the name of a policy"),
        ({"policy": "quickest"}, "policy 'quickest' is unknown"),
        ({"micro_batch": "x"}, "micro_batch='x': expected a whole number"),
        ({"micro_batch": -4}, "micro_batch=-4: expected a whole number, 1 to"),
        ({"quantum": None}, "quantum=None: expected a whole number"),
        ({"callbacks": "record"}, "callbacks='record': expected a list of callbacks, such as"),
        ({"callbacks": [print]}, "expected a list of callbacks, such as"),
        ({"limits": "1:8"}, "limits='1:8': expected 'memory', or a pair"),
        ({"limits": [(1, 2, 3)]}, r"limits=\[\(1, 2, 3\)\]: expected 'memory', or a pair"),
        ({"limits": [("1", None)]}, "limits of rank 0, least or most='1': expected a whole number, 0 to"),
        ({"weigh": ["loss"]}, r"weigh=\['loss'\]: expected 'loss' or 'hook'"),
        ({"loop": 3}, "loop=3: expected one of"),
        ({"loop": "local"}, "loop='local': expected one of 'whole', 'round', 'pieces'"),
        ({"deterministic": "no"}, "deterministic='no': expected True or False"),
        ({"stall": []}, r"stall=\[\]: expected 'warn', 'end', a function"),
    ],
)
def test_each_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        paceline.torch.Pace(**GOOD | options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: GarbageCollection(2**63),
            r"GarbageCollection\(every\)=9223372036854775808: expected",
        ),
        (lambda: Record(5), r"Record\(5\): expected the path of a new directory"),
        (lambda: OnRound("print"), r"OnRound\('print'\): expected a function"),
    ],
)
def test_wrong_arguments_of_callbacks_raise(make: Callable[[], object], words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        make()


def test_numbers_of_numpy_are_numbers() -> None:
    pace = paceline.torch.Pace(
        MODEL, np.int64(8), micro_batch=np.int32(8), limits=[(np.int64(1), None)], policy="level",
        callbacks=[GarbageCollection(np.int64(2**31))],
    )  # fmt: skip
    assert pace.host.terms.batch == 8
    pace.close()


@pytest.mark.parametrize("seed", ["x", -1, 1.5, None, 2**64])
def test_seeds(seed: Any) -> None:
    pace = paceline.torch.Pace(**GOOD)
    with pytest.raises(PacelineError, match=r"seed=.*expected a whole number, 0 to"):
        pace.loader(torch.utils.data.TensorDataset(torch.zeros(20, 2)), seed=seed)
    pace.close()


@pytest.mark.parametrize("option", ["shuffle", "drop_last", "padded"])
@pytest.mark.parametrize("value", ["no", "", 0.0, 2, []])
def test_what_is_neither_true_nor_false_is_not_taken_for_one(option: str, value: Any) -> None:
    """Samples would be dropped, or stand in another order, in silence."""
    data = torch.utils.data.TensorDataset(torch.zeros(20, 2))
    with paceline.torch.Pace(**GOOD) as pace:
        with pytest.raises(PacelineError, match=f"{option}=.*: expected True or False"):
            pace.loader(data, **{option: value})
        with pytest.raises(PacelineError, match="drop_last='no': expected True or False"):
            pace.stream(iter(data), drop_last="no")
        pace.loader(data, shuffle=0, drop_last=np.bool_(False))


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3),
    st.lists(st.integers() | st.text(max_size=2), max_size=3), st.tuples(st.tuples(st.integers(), st.none())),
)  # fmt: skip
OPTIONS = (
    "model", "global_batch", "policy", "limits", "micro_batch", "loop", "quantum", "weigh",
    "callbacks", "stall", "deterministic", "drop",
)  # fmt: skip


@given(options=st.dictionaries(st.sampled_from(OPTIONS), JUNK, min_size=1, max_size=2))
def test_whatever_they_are(options: dict[str, Any]) -> None:
    try:
        paceline.torch.Pace(**GOOD | options).close()
        said = ""
    except PacelineError as error:
        said = str(error)
    assert "\n" not in said


@pytest.mark.parametrize("wrong", [{"loss": torch.ones(())}, 3.0, None, [torch.ones(())]])
def test_a_loss_that_is_no_tensor_is_named(wrong: Any) -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1))
    with paceline.torch.Pace(MODEL, 8) as pace:
        for x, y in pace.loader(data):
            for call in (pace.backward, pace.weighted) if wrong is not None else (pace.backward,):
                with pytest.raises(PacelineError, match=r"the loss is .*; expected a tensor: pass"):
                    call(wrong)
            pace.backward((MODEL(x) - y).square().mean())
            pace.step(torch.optim.SGD(MODEL.parameters(), lr=0.1))


@pytest.mark.parametrize("shape", [(8,), (8, 1), (0,)])
def test_loss_of_several_numbers_raises(shape: tuple[int, ...]) -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1))
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    with paceline.torch.Pace(MODEL, 8) as pace:
        for x, y in pace.loader(data):
            losses = (MODEL(x) - y).square()
            for call in (pace.backward, pace.weighted):
                with pytest.raises(
                    PacelineError, match=r"the loss has shape .*; expected a single number: loss\.mean"
                ):
                    call(losses[: losses.numel() * bool(shape[0])].reshape(shape))
            pace.backward(losses.mean().reshape(1))
            pace.step(optimizer)
        assert pace.rounds == 1
