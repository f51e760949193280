"""The change that the doctor prints: for the loop that it saw, complete, and narrow enough for a terminal."""

from __future__ import annotations

import ast

import pytest

from paceline.doctor.script import ADAPTERS, diff, moves_work
from paceline.doctor.spent import Loop

LOADER = {"processes": 2, "stream": False}
LOOPS = {
    "loader": Loop(96, 1, 1, LOADER, "", []),
    "accumulates": Loop(480, 4, 1, LOADER, "", []),
    "own batches": Loop(96, 1, 1, None, "", []),
    "own batches, accumulates": Loop(480, 4, 4, None, "", []),
    "stream": Loop(96, 1, 1, LOADER | {"stream": True}, "", []),
} | {host: Loop(96, 1, 1, LOADER, host, []) for host in ADAPTERS}


def after(lines: list[str]) -> str:
    """The script with the change made."""
    return "\n".join(line[2:] for line in lines if not line.startswith("-"))


@pytest.mark.parametrize("name", LOOPS)
def test_what_is_added_is_python_and_fits_a_terminal(name: str) -> None:
    for policy in ("level", "lbbsp-gpu"):
        lines = diff(LOOPS[name], 3, policy)
        ast.parse(after(lines).replace("(..., ", "(").replace(", ...)", ")"))
        assert max(map(len, lines)) <= 78
        assert lines[0].startswith("+ ")
        assert "import" in lines[0]
        if name != "transformers":  # its trainer has the batch from its own arguments
            assert f"global_batch={LOOPS[name].batch}" in after(lines)
            assert ("lbbsp-gpu" in after(lines)) == (policy == "lbbsp-gpu")
    assert moves_work("auto")
    assert not moves_work("level")


def test_the_forms_of_loops() -> None:
    plain = after(diff(LOOPS["loader"], 3, "level"))
    assert "loader = pace.loader(dataset, seed=0)" in plain
    assert "pace.backward(loss)" in plain
    assert "micro_batch" not in plain
    assert "loop=" not in plain
    rounds = after(diff(LOOPS["accumulates"], 3, "level"))
    assert 'loop="round"' in rounds
    assert "micro_batch=40" in rounds  # 480 samples over 3 ranks and 4 passes
    assert "loss = pace.round(batch, lambda x, y: criterion(ddp(x), y))" in rounds
    within = after(diff(LOOPS["loader"], 3, "auto"))
    assert "loss = pace.round(batch" in within, "what moves work within the round needs pieces"
    assert "micro_batch" not in within
    own = after(diff(LOOPS["own batches"], 3, "level"))
    assert "for size in pace.sizes(steps):" in own
    assert "loader" not in own
    pieces = after(diff(LOOPS["own batches, accumulates"], 3, "level"))
    assert "micro_batch=40" in pieces
    assert "loss = pace.round(turn, loss_of)" in pieces
    assert "take(stream, size)" in after(diff(LOOPS["stream"], 3, "level"))
