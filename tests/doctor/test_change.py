"""The change that the doctor prints: for the loop that it saw, complete, and narrow enough for a terminal."""

from __future__ import annotations

import ast

import pytest
import torch

from paceline.doctor.change import LINES, diff
from paceline.doctor.phases import LoopForm
from support.guarantees import guarantee

LOADER = {"processes": 2, "stream": False}
LOOPS = {
    "loader": LoopForm(96, 1, 1, LOADER, "", []),
    "accumulates": LoopForm(480, 4, 1, LOADER, "", []),
    "own batches": LoopForm(96, 1, 1, None, "", []),
    "own batches, accumulates": LoopForm(480, 4, 4, None, "", []),
    "stream": LoopForm(96, 1, 1, LOADER | {"stream": True}, "", []),
} | {host: LoopForm(96, 1, 1, LOADER, host, []) for host in LINES}


def after(lines: list[str]) -> str:
    """The script with the change made."""
    return "\n".join(line[2:] for line in lines if not line.startswith("-"))


@pytest.mark.parametrize("name", LOOPS)
def test_what_is_added_is_python_and_fits_a_terminal(name: str) -> None:
    for policy in ("level", "lbbsp-gpu"):
        lines = diff(LOOPS[name], 3, policy).lines
        ast.parse(after(lines).replace("(..., ", "(").replace(", ...)", ")"))
        assert max(map(len, lines)) <= 78
        assert lines[0].startswith("+ ")
        assert "import" in lines[0]
        if name != "transformers":  # its trainer has the batch from its own arguments
            assert f"global_batch={LOOPS[name].batch}" in after(lines)
            assert ("lbbsp-gpu" in after(lines)) == (policy == "lbbsp-gpu")


@guarantee(
    "The doctor's change for thirteen forms of program is applied by `patch` and trains the model of one "
    "process."
)
@pytest.mark.parametrize("policy", ["level", "auto"])
@pytest.mark.parametrize(
    "name", ["loader", "accumulates", "own batches", "own batches, accumulates", "stream"]
)
def test_the_changed_script_runs(name: str, policy: str) -> None:
    """In one process, which takes all of each batch: the optimizer steps that were asked for, of so many samples."""
    loop = LOOPS[name]
    seen: list[int] = []
    model = torch.nn.Linear(4, 2)
    model.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    x, y = torch.randn(3 * loop.batch, 4), torch.zeros(3 * loop.batch, dtype=torch.int64)
    steps: list[int] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: steps.append(sum(seen)))
    around = {
        "ddp": model,
        "dataset": torch.utils.data.TensorDataset(x, y),
        "criterion": torch.nn.functional.cross_entropy,
        "optimizer": optimizer,
        "steps": 3,
        "get_batch": lambda size: (x[:size], y[:size]),
        "stream": None,
        "take": lambda _, size: (x[:size], y[:size]),
    }
    exec(after(diff(loop, 3, policy).lines), around)
    assert steps == [loop.batch, 2 * loop.batch, 3 * loop.batch]
    most = loop.micro_batch(3)
    assert max(seen) <= (most or loop.batch)


def test_the_forms_of_loops() -> None:
    plain = after(diff(LOOPS["loader"], 3, "level").lines)
    assert "loader = pace.loader(dataset, seed=0)" in plain
    assert "pace.backward(loss)" in plain
    assert "micro_batch" not in plain
    assert "loop=" not in plain
    rounds = after(diff(LOOPS["accumulates"], 3, "level").lines)
    assert 'loop="round"' in rounds
    assert "micro_batch=40" in rounds  # 480 samples over 3 ranks and 4 passes
    assert "loss = pace.round(batch, lambda x, y: criterion(ddp(x), y))" in rounds
    within = after(diff(LOOPS["loader"], 3, "auto").lines)
    assert "loss = pace.round(batch" in within, "what moves work within the round needs pieces"
    assert "micro_batch" not in within
    own = after(diff(LOOPS["own batches"], 3, "level").lines)
    assert "for size in pace.sizes(steps):" in own
    assert "loader" not in own
    pieces = after(diff(LOOPS["own batches, accumulates"], 3, "level").lines)
    assert "micro_batch=40" in pieces
    assert "loss = pace.round(micro_step, loss_of)" in pieces
    assert "take(stream, size)" in after(diff(LOOPS["stream"], 3, "level").lines)


def test_without_a_known_number_of_samples_the_lines_name_it() -> None:
    lines = after(diff(LOOPS["own batches, accumulates"]._replace(sure=False), 3, "level").lines)
    assert "global_batch=3 * 4 * batch_size" in lines
    assert "micro_batch=batch_size" in lines
