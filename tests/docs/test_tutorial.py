"""The script of docs/tutorial.md prints what the page says, and the commands after it print the same lines."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from paceline.runs.run import ROUNDS, with_checksum
from support.blocks import ROOT
from support.commands import paceline
from support.forks import all_well, as_torchrun

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("tutorial")]

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
SLEEPS = ("0.1", "0.4")  # ms per sample of the two machines, a tenth of the page's
LOADS = {"equal": (1 / 2, 1 / 2), "level": (4 / 5, 1 / 5)}  # portions of a batch, as the page's loads settle
EPOCHS = "4"  # half of the page's: enough for loads to settle
POLICIES = "auto|dolbie|level|equal"


def printed(command: str) -> str:
    """The ``text`` block that follows a command of the page."""
    found = re.search(rf"{re.escape(command)}.*?```text\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, command
    return found[1]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = re.search(r'```python title="train.py"\n(.*?)```', PAGE, re.DOTALL)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(found[1], encoding="utf-8")
    return path


def run(script: Path, *own: dict[str, str], **given: str) -> str:
    """What two workers print; own: the variables of each, given: those of both."""
    ranks = as_torchrun(2)
    return all_well([a | b | given for a, b in zip(ranks, own or ({}, {}), strict=True)], [script])[0]


def losses(text: str) -> list[tuple[str, float]]:
    return [(epoch, float(loss)) for epoch, loss in re.findall(r"epoch (\d): loss ([\d.]+)", text)]


def close(text: str, wanted: str) -> bool:
    """Whether both have the same epochs, and losses that differ by rounding at most: loads follow from seconds."""
    pairs = zip(losses(text), losses(wanted), strict=True)
    return all(a[0] == b[0] and abs(a[1] - b[1]) <= 0.002 for a, b in pairs)


def test_two_workers_print_the_losses_of_the_page(script: Path) -> None:
    assert close(run(script), printed("torchrun --standalone --nproc-per-node 2 train.py"))


def test_resumed_run_prints_the_losses_of_the_page(script: Path) -> None:
    said = run(script, EPOCHS="3", CHECKPOINT="checkpoint.pt") + run(script, CHECKPOINT="checkpoint.pt")
    whole = printed("torchrun --standalone --nproc-per-node 2 train.py")
    shown = printed("EPOCHS=3 CHECKPOINT=checkpoint.pt torchrun")
    assert close(said, whole)
    assert set(losses(shown)) <= set(losses(whole))
    assert [line for line in said.splitlines() if "continues" in line] == ["continues with epoch 3"]
    assert "continues with epoch 3\nepoch 3" in shown


def words(text: str) -> Counter[str]:
    """The words of all lines, without those that vary: figures, the winner's name, which is faster, rules, file
    names. A line may be folded at the width of a terminal."""
    named = re.sub(rf"\b({POLICIES})\b", "POLICY", text).replace("rounds", "round")
    named = re.sub(r"at (least|most)\s+[\d.]+x\s+(slower\s+than|as\s+fast\s+as)", "COMPARED", named)
    kept = (word for word in named.split() if not re.search(r"\d|─|\.html|^(almost|under|%)$", word))
    return Counter(word.strip(",.;:") for word in kept)


def as_on_idle_machines(run: Path, loads: tuple[float, ...], first: tuple[float, ...]) -> None:
    """Give a record the loads, and the seconds by the clock, of machines on which nothing else runs.

    loads: portions of a batch from the second round on; first: of the first round.
    """
    file, now, last, draw = run / ROUNDS, 0.0, "", np.random.default_rng(0)
    lines = []
    for each in map(json.loads, file.read_text().splitlines()):
        fast = round(each["batch"] * (loads if each["round"] else first)[0])
        each["loads"] = [fast, each["batch"] - fast]
        own = np.array(each["loads"]) * [0.001, 0.004] * draw.uniform(1, 1.02, 2)
        each["compute"], each["wait"] = own.tolist(), (own.max() - own).tolist()
        each["overhead"], each["seconds"] = [0.0005, 0.0005], own.max() + 0.001
        now = each["time"] = now + each["seconds"]
        del each["sum"]
        line, last = with_checksum(json.dumps(each), last)
        lines.append(line)
    file.write_bytes(b"".join(lines))


def test_commands_after_two_runs_print_the_lines_of_the_page(script: Path) -> None:
    """The commands read the records of both runs, whose times are not those of this machine, which may be busy."""
    for policy in ("equal", "level"):
        own = [{"SLEEP_MS": each} for each in SLEEPS]
        said = run(script, *own, POLICY=policy, RUN=f"runs/{policy}", EPOCHS=EPOCHS)
        assert close(
            said, "".join(f"epoch {n}: loss {x}\n" for n, x in losses(printed("--nproc-per-node 2"))[:4])
        )
        as_on_idle_machines(Path("runs", policy), LOADS[policy], LOADS["equal"])
    for command in ("whatif runs/equal", "report runs/equal runs/level", "report runs/level"):
        done = paceline(*command.split())
        assert done.status == 0, done.stderr
        assert words(printed(f"paceline {command}\n")) <= words(done.stdout), done.stdout
