"""The examples run as they stand, and end cleanly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import forks
from support.commands import python
from support.forks import HOSTS, all_well, as_torchrun
from support.skips import skip_without

TESTS = Path(__file__).resolve().parents[1]
EXAMPLES = TESTS.parent / "examples"


@pytest.mark.processes
def test_train_ddp() -> None:
    out, err = all_well(as_torchrun(3), [EXAMPLES / "train_ddp.py"])
    assert "terminate called" not in err
    lines = [line for line in out.splitlines() if line.startswith("epoch")]
    assert len(lines) == 8
    loads = [int(load) for load in lines[-1].split("[")[1].rstrip("]").split(", ")]
    assert sum(loads) == 256
    assert loads[2] < 256 / 3, "the slow rank has less than an equal part"


@pytest.mark.nightly  # torch/feed/test_costs.py trains with such lengths, and docs/samples.md has such a loader
@pytest.mark.processes
def test_text_lengths() -> None:
    out, err = all_well(as_torchrun(3), [EXAMPLES / "text_lengths.py", "--epochs", 2])
    assert "terminate called" not in err
    lines = [line for line in out.splitlines() if line.startswith("epoch")]
    assert len(lines) == 2
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 3.5, "letters drawn at random have 4.85"
    texts = [int(load) for load in lines[-1].split("[")[1].split("]")[0].split(", ")]
    assert sum(texts) == 64


@pytest.mark.processes
@pytest.mark.xdist_group("hosts")
@pytest.mark.parametrize(
    ("name", "needs"),
    [
        # hosts/test_lightning.py and hosts/test_transformers.py train in the same way.
        pytest.param("lightning_trainer", "lightning", marks=pytest.mark.nightly),
        ("fabric_loop", "lightning"),
        ("fsdp2", "torch"),
        ("accelerate_loop", "accelerate"),
        pytest.param("hf_trainer", "transformers", marks=pytest.mark.nightly),
    ],
)
def test_hosts(name: str, needs: str) -> None:
    skip_without(needs)
    forks.load(*HOSTS)
    out, err = all_well(as_torchrun(3), [EXAMPLES / f"{name}.py"])
    assert "terminate called" not in err
    (line,) = (line for line in out.splitlines() if line.startswith("loss"))
    loads = [int(load) for load in line.split("[")[1].split("]")[0].split(", ")]
    assert sum(loads) == 256
    assert loads[2] < 256 / 3, "the slow rank has less than an equal part"


@pytest.mark.nightly  # docs/service.md asks a service in the same order, and serve/test_process.py has such workers
@pytest.mark.processes
def test_jax_service() -> None:
    pytest.importorskip("jax")
    pytest.importorskip("fastapi")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "jax_service.py"), "--rounds", "20"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loads, losses, difference = done.stdout.splitlines()[-3:]
    last = [int(load) for load in loads.split("[")[2].rstrip("]").split(", ")]
    assert sum(last) == 768
    assert last[2] < min(last[:2]), "the slow process has least to do"
    first, final = (float(part) for part in losses.removeprefix("loss ").split(" -> "))
    assert final < first
    assert float(difference.split(": ")[1].split()[0]) < 1e-6


def test_offloading() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "offloading.py"), "--rounds", "12"],
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.rsplit(None, 9) for line in done.stdout.splitlines()[2:]]
    ratios = {fields[0].split("  ")[0].strip(): float(fields[2]) for fields in rows}
    assert ratios["knowing all beforehand"] == 1.0
    assert 1.0 < ratios["level"] < ratios["dolbie"] < ratios["equal"]


def with_forked_workers(name: str) -> subprocess.CompletedProcess[str]:
    program = "import runpy; from support import ray_forks; ray_forks.use()"
    program += f"; runpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')"
    return python(program, place=TESTS)


@pytest.mark.nightly  # docs/server.md trains such a program in the same way
@pytest.mark.ray
@pytest.mark.xdist_group("ray-products")
def test_ray_server(forks_of_ray: Any) -> None:
    pytest.importorskip("ray")
    done = with_forked_workers("ray_server.py")
    assert done.returncode == 0, done.stderr
    first, last = (float(part) for part in done.stdout.split("loss ")[1].split(" -> "))
    assert last < first / 3


@pytest.mark.nightly  # ray/test_ray_train.py::test_as_one_process trains in the same way
@pytest.mark.ray
@pytest.mark.xdist_group("ray-products")
def test_ray_train(forks_of_ray: Any) -> None:
    pytest.importorskip("ray")
    forks_of_ray.load(*forks_of_ray.BESIDE_RAY_TRAIN)
    done = with_forked_workers("ray_train.py")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("loss"))
    samples = [int(each) for each in line.split("[")[1].split("]")[0].split(", ")]
    assert sum(samples) == 1500, "each sample of the training set once"
    assert samples[2] < min(samples[:2]), "the slow worker has least to do"
