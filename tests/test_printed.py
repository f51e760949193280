"""The commands that outputs print as the next step are collected, and each is run as it is printed, in a shell whose
PATH has no ``paceline``, as after ``make demo``."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from paceline import commands
from support.events import until
from support.served import TOKEN
from test_commands import PLAIN, SCRIPT

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("printed"), pytest.mark.usefixtures("warm")]
ENV = {"PATH": PLAIN, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
PACELINE = ".venv/bin/paceline"
COMMAND = re.compile(rf"{re.escape(PACELINE)} (?:train|watch|whatif|doctor|verify|report|serve) [^;,\n]*")


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    return kept | ENV | {"PYTHONPATH": str(Path(commands.__file__).parents[1]), "PACELINE_TOKEN": TOKEN}


def run(line: str, place: Path, status: int = 0) -> str:
    """What a line prints. One that needs no shell is run without, and loads nothing once more."""
    words = ["bash", "-c", line] if set(line) & set("|<>&;$") else shlex.split(line)
    done = subprocess.run(words, cwd=place, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == status, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def served(line: str, place: Path, address: str) -> subprocess.Popen[str]:
    """A server that a line starts, once it has printed its ``address``, a pattern."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {line}"],
        cwd=place,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = ""
    while not re.search(address, said):
        more = process.stdout.readline()
        assert more, said
        said += more
    process.said = said  # type: ignore[attr-defined]
    return process


def ended(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=400)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shell")
    script = folder / PACELINE
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT.format(python=sys.executable))
    script.chmod(0o755)
    return folder


def test_lines_at_the_end_of_a_training_run(place: Path) -> None:
    said = run(f"{PACELINE} train --workers 2 --steps 6 --compare equal,level --out run", place)
    printed = [line.split("  #")[0] for line in COMMAND.findall(said)]
    assert [line.split()[1] for line in printed] == ["watch", "watch", "whatif", "doctor"]
    for line in printed[:2]:
        page = served(f"{line} --no-open", place, r"at http://\S+")
        try:
            url = re.search(r"at (http://\S+)", page.said)[1]  # type: ignore[attr-defined,index]
            assert until(lambda url=url: urllib.request.urlopen(url).status) == 200
        finally:
            ended(page)
    assert "would" in run(printed[2], place)
    again = COMMAND.findall(run(f"{PACELINE} whatif run", place, status=2))  # of two runs, it names both
    assert [line.split()[-1] for line in again] == ["run/equal", "run/level"]
    for line in again:
        run(line, place)

    # The doctor: its script, its change, and the check of the changed script.
    script = commands.FOLDER / "examples" / "plain_ddp.py"
    (place / "plain_ddp.py").write_text(script.read_text())
    doctor = printed[3].replace("doctor --", "doctor --steps 12 --", 1)
    assert str(script) in doctor
    said = run(doctor.replace(str(script), "plain_ddp.py"), place)
    apply = re.search(r"^  (patch -p0 < \S+)$", said, re.MULTILINE)
    assert apply is not None, said
    run(apply[1], place)
    assert "paceline.torch.Pace(" in (place / "plain_ddp.py").read_text()
    verify = re.search(rf"^  ({re.escape(PACELINE)} verify -- .*plain_ddp\.py)$", said, re.MULTILINE)
    assert verify is not None, said
    run(verify[1], place)


def test_first_request_to_the_service(place: Path) -> None:
    service = served(f"{PACELINE} serve --port 0 --dir state --batch 24 --workers 2", place, r"whole workers")
    try:
        line = re.search(r"a first request, to paste: (.*)", service.said)[1]  # type: ignore[attr-defined,index]
        assert '"name":"first"' in run(line, place)
        assert TOKEN not in line
    finally:
        ended(service)
    service = served(f"env -u PACELINE_TOKEN {PACELINE} serve --port 0 --dir own", place, r"whole workers")
    try:
        line = re.search(r"a first request, to paste: (.*)", service.said)[1]  # type: ignore[attr-defined,index]
        assert '"workers":' in run(line, place)
    finally:
        ended(service)


def test_help_that_mistakes_point_to(place: Path) -> None:
    for command in ("watch", "plan", "whatif"):
        said = run(f"{PACELINE} {command} --no-such-option", place, status=2)
        see = re.search(r"[Ss]ee (.*) --help", said)
        assert see is not None, said
        assert "Usage" in run(f"{see[1]} --help", place)
