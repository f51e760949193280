"""The doctor's change for loops in the shape of well-known programs: applied by ``patch`` as printed, and run.

Each ends with the model of one process that takes all samples at once, by the script as it was before.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.commands import paceline
from support.forks import all_well, as_torchrun
from support.guarantees import guarantee
from support.verified import verified

LOOPS = Path(__file__).with_name("foreign")
RANKS = 3
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
APPLIED = (
    "mnist", "siamese", "dit", "accelerated", "imagenet", "tutorial", "graphs", "text", "scaled",
    "peft_loop", "fabric_loop", "lightning_fit", "hf_trainer",
)  # fmt: skip
HOSTS = {
    "accelerated": "accelerate",
    "peft_loop": "accelerate",
    "fabric_loop": "lightning",
    "lightning_fit": "lightning",
    "hf_trainer": "transformers",
}
BY_HAND = {
    "llmc": "make an indexed data set of the samples and use pace.loader(dataset, shuffle=False)",
    "dcgan": 'docs/porting.md ("Two models") has the loop',
    "nanogpt": "The loop accumulates gradients",
    "dqn": "The change below is for a loop that draws them at random",
}

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm")]


def most_at_night(scripts: Iterable[str]) -> list[Any]:
    """The first runs with every change, the others once a day."""
    return [
        script if number < 1 else pytest.param(script, marks=pytest.mark.nightly)
        for number, script in enumerate(scripts)
    ]


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FOREIGN_PAUSE", "0.004")


def diagnosed(script: str, place: Path, *launcher: object) -> str:
    shutil.copytree(LOOPS, place, dirs_exist_ok=True)
    monitored = ("doctor", "--steps", 12, "--policy", "level", "--", *launcher, RANKS, f"{script}.py")
    said = paceline(*monitored)
    assert said.status == 0, said.stderr
    return str(said.stdout)


def run(place: Path, script: str, ranks: int) -> list[dict[str, Any]]:
    """What each rank left."""
    out = place / f"out{ranks}"
    out.mkdir()
    own = {name: os.environ[name] for name in os.environ if name.startswith("FOREIGN_")}
    environments = [each | own | {"FOREIGN_OUT": str(out)} for each in as_torchrun(ranks)]
    all_well(environments, [place / f"{script}.py"])
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


@guarantee(
    "The doctor's change for thirteen forms of program is applied by `patch` and trains the model of one "
    "process."
)
@pytest.mark.skipif(shutil.which("patch") is None, reason="no command patch: apt-get install patch")
@pytest.mark.parametrize("script", most_at_night(APPLIED))
def test_its_change_is_applied_as_printed_and_trains_the_same_model(script: str, tmp_path: Path) -> None:
    if script in HOSTS:
        pytest.importorskip(HOSTS[script])
    shutil.copytree(LOOPS, tmp_path, dirs_exist_ok=True)
    said = diagnosed(script, tmp_path, *TORCHRUN)
    (expected,) = run(tmp_path, script, 1)
    assert ("global_batch=48" in said) == (script != "hf_trainer"), said
    applied = subprocess.run(["patch", "-p0"], cwd=tmp_path, input=said, capture_output=True, text=True)
    assert applied.returncode == 0, said + applied.stdout
    assert f"patching file {script}.py" in applied.stdout
    ranks = run(tmp_path, script, RANKS)
    for each in ranks:
        assert np.allclose(each["parameters"], expected["parameters"], rtol=0, atol=1e-12)
        assert np.allclose(each.get("logged", 0), expected.get("logged", 0), rtol=0, atol=1e-12)
    read = [each["read"] for each in ranks]
    assert read[2] < min(read[:2]), "loads are unlike"
    verdict = verified(tmp_path / f"{script}.py", ranks=RANKS, steps=3)
    assert verdict.exact, verdict


@guarantee("For a script that the doctor does not recognize, it prints no diff and says what to do.")
@pytest.mark.parametrize("script", most_at_night(BY_HAND))
def test_loop_that_cannot_be_changed_is_reported(script: str, tmp_path: Path) -> None:
    said = " ".join(diagnosed(script, tmp_path, *TORCHRUN).split())
    assert BY_HAND[script] in said
    assert "to be made by hand" in said
