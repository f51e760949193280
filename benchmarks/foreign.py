"""Other people's programs, with the doctor's diff or a port applied: lines, seconds, and the same model.

    python benchmarks/foreign.py [NAME...]                  # loops in the shape of well-known programs
    python benchmarks/foreign.py --fetched DIR [NAME...]    # the programs themselves, from DIR/NAME

The loops are those of tests/doctor/foreign. The programs are fetched by you; benchmarks/fetched says which file of
which project each is, what it takes to run it here (gloo, small sizes, made-up data), and which lines Paceline takes
if the doctor's diff does not do. Three gloo ranks, the third of which sleeps four times as long a sample.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import made
from scaffold import command_line

LOOPS = Path(__file__).parents[1] / "tests" / "doctor" / "foreign"
FETCHED = Path(__file__).with_name("fetched")
PORTS = Path(__file__).parents[1] / "examples" / "ports"
NAMES = ("mnist", "imagenet", "dit", "tutorial", "siamese", "graphs", "text", "scaled", "accelerated")
EPOCHS = "24"


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
        print(f"| {name} | {compared(lines(said), before, alone, after)} |", flush=True)


def lines(diff: str) -> tuple[int, int]:
    """Lines that a diff adds or changes, and lines that it leaves out."""
    each = [line.strip() for line in diff.splitlines()]
    added, removed = (sum(line[:1] == sign != line[1:2] for line in each) for sign in "+-")
    return added, max(removed - added, 0)


def compared(counts: tuple[int, int], *runs: list[dict[str, Any]], same: bool = True) -> str:
    """Lines, seconds before and after, and how far the ranks' parameters are from those of one process."""
    before, (alone,), after = runs
    pairs = [pair for each in after for pair in zip(each["parameters"], alone["parameters"], strict=True)]
    old, new = (max(each["seconds"] for each in ranks) for ranks in (before, after))
    apart = max(abs(one - other) for one, other in pairs)
    return f"{counts[0]} | {counts[1]} | {old:.1f} | {new:.1f} | {old / new:.1f}x | {f'{apart:.0e}' if same else '-'}"


# -- the programs themselves ---------------------------------------------------------------------------------


class Program:
    """A fetched program, and what benchmarks/fetched has on it."""

    def __init__(self, name: str, fetched: Path, folder: Path) -> None:
        self.told = tomllib.loads((FETCHED / f"{name}.toml").read_text())
        self.source, self.folder = fetched / name, folder
        self.port = [edit for file in self.told["file"] for edit in file.get("port", [])]

    def laid(self, where: str, ranks: int, port: bool = False) -> Path:
        """A copy that runs here, with Paceline's lines or without them."""
        from port import ported

        place = self.folder / where / "program"
        shutil.copytree(self.source, place)
        if self.told["data"]:
            getattr(made, self.told["data"])(place)
        for file in self.told["file"]:
            path = place / file["path"]
            for edits in ("here", "port")[: 1 + port]:
                filled = json.loads(self._filled(json.dumps(file.get(edits, [])), ranks))
                path.write_text(ported(path.read_text(), filled, file["path"]))
        return place

    def run(self, place: Path, ranks: int, *first: str) -> tuple[subprocess.CompletedProcess[str], Path]:
        """Run it by torchrun, with ``first`` before that; returns the folder with what the ranks leave, too."""
        out = place.parent / "out"
        out.mkdir(exist_ok=True)
        environ = os.environ | {
            "FOREIGN_OUT": str(out),
            "FOREIGN_SLOW": self.told.get("slow", "DistributedDataParallel"),
            "FOREIGN_PAUSE": str(self.told.get("pause", 0.016)),
            "FOREIGN_DOUBLE": "1" if self.told.get("double") else "",
            "ACCELERATE_USE_CPU": "true",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(place.parent / "cache"),
        }
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        arguments = [self._filled(each, ranks) for each in self.told["arguments"]]
        whole = [*first, *run, str(FETCHED / "launched.py"), self.told["program"], *arguments]
        done = subprocess.run(whole, cwd=place, env=environ, capture_output=True, text=True, timeout=300)
        return done, out

    def trained(self, place: Path, ranks: int) -> list[dict[str, Any]]:
        """What each rank leaves."""
        done, out = self.run(place, ranks)
        if done.returncode:
            sys.stderr.write(f"{place}: {self.source.name} on {ranks} ranks\n{done.stderr[-6000:]}\n")
            raise RuntimeError(f"failed on {ranks} ranks ({place.parent.name})")
        return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]

    def _filled(self, text: str, ranks: int) -> str:
        for name, value in (("batch", made.SAMPLES // ranks), ("epochs", EPOCHS), ("ranks", ranks)):
            text = text.replace(f"{{{name}}}", str(value))
        return text


def fetched(names: list[str], where: Path) -> int:
    """Prints the table of the programs that lie there. 1 if one of them has no figures, else 0."""
    failed = 0
    print(
        "| program | the doctor | its diff ran | lines added | left out | before | after | as fast | apart |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = judged(name, where, Path(folder))
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                row, failed = f"{error} | | | | | | | ", 1
        print(f"| {name} | {row} |", flush=True)
    return failed


def judged(name: str, where: Path, folder: Path) -> str:
    """One row."""
    from port import counts

    program = Program(name, where, folder)
    plain, alone = program.laid("plain", 3), program.laid("alone", 1)
    doctor = [sys.executable, "-m", "paceline", "doctor", "--steps", "12", "--policy", "level", "--"]
    watched, _ = program.run(plain, 3, *doctor)
    said, number = watched.stdout, (0, 0)
    sys.stderr.write(f"== {name}\n{said or watched.stderr[-2000:]}\n")
    verdict = (said or watched.stderr[-300:]).strip().partition("\n")[0]
    if program.port:
        place = program.laid("after", 3, port=True)
        for file in program.told["file"]:
            more = counts(*((each / file["path"]).read_text() for each in (plain, place)))
            number = number[0] + more[0], number[1] + more[1]
    elif "--- " in said:
        place, number = program.laid("after", 3), lines(said)
        subprocess.run(["patch", "-p0", "--quiet"], cwd=place, input=said, text=True, check=True)
    else:
        return f"{verdict} | no | | | | | | "
    runs = program.trained(plain, 3), program.trained(alone, 1), program.trained(place, 3)
    sys.stderr.write(
        f"samples {[[each['samples'] for each in run] for run in runs]}, "
        f"steps {[[each['steps'] for each in run] for run in runs]}\n"
    )
    table = compared(number, *runs, same=program.told.get("same", True))
    return f"{verdict} | {'by hand' if program.port else 'yes'} | {table}"


if __name__ == "__main__":
    parser = command_line(__doc__)
    known = sorted(path.stem for path in FETCHED.glob("*.toml"))
    parser.add_argument(
        "--fetched",
        type=Path,
        metavar="DIR",
        help="has a folder for each of the programs: " + ", ".join(known),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    args = parser.parse_intermixed_args()
    if unknown := [name for name in args.names if name not in (known if args.fetched else NAMES)]:
        parser.error(f"{unknown[0]}: expected some of {', '.join(known if args.fetched else NAMES)}")
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", FOREIGN_PAUSE="0.004")
    if args.fetched:
        names = args.names or [name for name in known if (args.fetched / name).is_dir()]
        if missing := [name for name in names or known[:1] if not (args.fetched / name).is_dir()]:
            place = args.fetched / missing[0]
            parser.error(f"{place} is not there; expected a program's files as benchmarks/fetched has them")
        sys.path.insert(0, str(PORTS))
        sys.exit(fetched(names, args.fetched))
    else:
        main(args.names or list(NAMES))
