"""``paceline verify`` calls the examples exact, for each framework that hosts a loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.verified import verified

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("train_ddp", "torch"),
        *(
            pytest.param(name, needs, marks=pytest.mark.nightly)
            for name, needs in (
                ("text_lengths", "torch"),
                ("fsdp2", "torch"),
                ("accelerate_loop", "accelerate"),
                ("fabric_loop", "lightning"),
                ("lightning_trainer", "lightning"),
                ("hf_trainer", "transformers"),
            )
        ),
    ],
)
def test_example_is_exact_for_any_loads(name: str, needs: str) -> None:
    pytest.importorskip(needs)
    verdict = verified(EXAMPLES / f"{name}.py", loaded=(needs,), steps=3)
    assert verdict.exact, verdict
