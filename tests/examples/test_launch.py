"""The recipes in examples/launch/: what can be checked without a cluster."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from support.shell import parse_paceline

GUARANTEES = (
    "The shell and YAML of the recipes in `examples/launch/` parse, and `torchrun` accepts their options.",
)

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
yaml = pytest.importorskip("yaml")


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((LAUNCH / name).read_text(encoding="utf-8")))


def torchrun(words: list[str], script: str = "train_ddp.py") -> list[str]:
    """torchrun itself must take the options, down to the script; the script's own."""
    pytest.importorskip("torch")
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(words)
    assert given.training_script == script
    return list(given.training_script_args)


def test_the_batch_script_is_a_shell_script() -> None:
    text = (LAUNCH / "slurm.sbatch").read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(LAUNCH / "slurm.sbatch")], check=True)
    assert all(
        re.fullmatch(r"#SBATCH --[a-z-]+=\S+", line) for line in text.splitlines() if "#SBATCH" in line
    )
    done = subprocess.run(["bash", str(LAUNCH / "slurm.sbatch")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "usage: sbatch slurm.sbatch SCRIPT.py [OPTIONS...]\n")


def test_the_batch_script_starts_torchrun_once_on_each_node(tmp_path: Path) -> None:
    """With Slurm's commands played by scripts that print what they were given."""
    for name, body in {
        "scontrol": "printf 'node7\\nnode9\\n'",
        "srun": 'printf "%s " "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "node[7,9]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "42", "SLURM_CPUS_PER_TASK": "16",
        "SLURM_GPUS_ON_NODE": "4", "PATH": f"{tmp_path}:/usr/bin:/bin",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sbatch"), "train_ddp.py"],
        env=slurm,
        capture_output=True,
        text=True,
        check=True,
    )
    step, *words = done.stdout.split()
    assert (step, words[0]) == ("--kill-on-bad-exit=1", "torchrun")
    assert "node7:29500" in words
    torchrun(words[1:])


def test_the_job_s_pods_form_one_group() -> None:
    service, job = documents("kubernetes-job.yaml")
    assert (service["kind"], service["apiVersion"]) == ("Service", "v1")
    assert (job["kind"], job["apiVersion"]) == ("Job", "batch/v1")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == 2
    assert spec["completionMode"] == "Indexed", "which numbers the pods"
    assert pod["restartPolicy"] == "Never"
    name = service["metadata"]["name"]
    assert pod["subdomain"] == name
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (container,) = pod["containers"]
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["args"]]
    assert f"--nnodes={spec['parallelism']}" in words
    assert f"--master-addr={job['metadata']['name']}-0.{name}" in words
    assert container["command"] == ["torchrun"]
    torchrun(words)


def test_the_train_job_names_its_runtime() -> None:
    (job,) = documents("kubernetes-trainjob.yaml")
    assert (job["kind"], job["apiVersion"]) == ("TrainJob", "trainer.kubeflow.org/v1alpha1")
    assert job["spec"]["runtimeRef"]["name"] == "torch-distributed"
    assert job["spec"]["trainer"]["numNodes"] == 2


def test_the_containers_form_one_group_of_unequal_speed() -> None:
    (compose,) = documents("compose.yaml")
    services = compose["services"]
    assert services["quick"]["cpus"] > services["slow"]["cpus"]
    for rank, name in enumerate(("quick", "slow")):
        program, *words = shlex.split(services[name]["command"])
        assert program == "torchrun"
        assert words[words.index("--node-rank") + 1] == str(rank)
        assert words[words.index("--master-addr") + 1] == "quick"
        command, *options = torchrun(words, "paceline")
        assert command == "train"
        parse_paceline([command, *options])
    build = services["quick"]["build"]
    assert (LAUNCH / build["context"] / build["dockerfile"]).is_file()


def test_the_image_copies_what_is_there() -> None:
    lines = (LAUNCH / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied
    for path in copied:
        assert (LAUNCH.parents[1] / path).exists(), path
