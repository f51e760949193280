"""Loops in the shape of well-known programs, with the doctor's diff applied: lines, seconds, and the same model.

    python benchmarks/foreign.py [NAME...]

The loops are those of tests/doctor/foreign; three gloo ranks, the third of which sleeps four times as long a sample.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scaffold import command_line

LOOPS = Path(__file__).parents[1] / "tests" / "doctor" / "foreign"
NAMES = ("mnist", "imagenet", "dit", "tutorial", "siamese", "graphs", "text", "scaled", "accelerated")
EPOCHS = "30"


def command(ranks: int, name: str) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*run, f"{name}.py"]


def trained(place: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    """What each rank leaves."""
    with tempfile.TemporaryDirectory() as out:
        environ = os.environ | {"FOREIGN_OUT": out, "FOREIGN_EPOCHS": EPOCHS}
        subprocess.run(command(ranks, name), cwd=place, env=environ, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(ranks)]


def main(names: list[str]) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", FOREIGN_PAUSE="0.004")
    print(
        "| loop | lines added | left out | seconds before | after | as fast | largest difference from one process |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder, "loops")
            shutil.copytree(LOOPS, place)
            doctor = [sys.executable, "-m", "paceline", "doctor", "--steps", "12", "--policy", "level", "--"]
            said = subprocess.run(
                [*doctor, *command(3, name)], cwd=place, capture_output=True, text=True, check=True
            ).stdout
            before, alone = trained(place, name, 3), trained(place, name, 1)
            subprocess.run(["patch", "-p0", "--quiet"], cwd=place, input=said, text=True, check=True)
            after = trained(place, name, 3)
        lines = [line.strip() for line in said.splitlines()]
        added, removed = (sum(line[:1] == sign != line[1:2] for line in lines) for sign in "+-")
        one = alone[0]["parameters"]
        apart = max(abs(a - b) for each in after for a, b in zip(each["parameters"], one, strict=True))
        old, new = (max(each["seconds"] for each in ranks) for ranks in (before, after))
        print(
            f"| {name} | {added} | {max(removed - added, 0)} | {old:.1f} | {new:.1f} | {old / new:.1f}x "
            f"| {apart:.0e} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("names", nargs="*", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    main(parser.parse_args().names or list(NAMES))
