"""How much of the engine must one read to follow a step? Counts what makes ``paceline.torch`` easy or hard to follow.

    python benchmarks/structure.py [--policy auto] [--walks]

Files and lines; assignments to an attribute of another object, found in the syntax tree; options and public members
of ``Pace``; and, for real steps of two gloo ranks, the files that a step touches and its calls from one file into
another: of a light step, as most short rounds are, and of the step that decides. And for a round of ``ElasticPace``
in which one of three ranks is killed, those of a survivor, under policy equal; there each function counts once, since
a survivor waits by calling some again and again. --walks prints these calls in order.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from instructions import RANKS, WARM_UP, rounds_of
from scaffold import command_line, forks, join, policy_name

SOURCE = Path(__file__).parents[1] / "src" / "paceline"
ROUNDS = 200  # among which there are light steps and one that decides
KILLED_AT, SURVIVORS_FILE = (
    20,
    "survivor.json",
)  # the round in which a rank is killed, and the walk of another

Call = tuple[str, str]
"""A call from one file into another: the file that is entered, and the function."""


def writes(tree: ast.AST) -> Iterator[str]:
    """The targets of assignments to an attribute of something other than ``self``."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for each in targets:
            for one in each.elts if isinstance(each, ast.Tuple | ast.List) else [each]:
                own = isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)
                if isinstance(one, ast.Attribute) and not (own and one.value.id in ("self", "cls")):  # type: ignore[attr-defined]
                    yield ast.unparse(one)


def walk(run: Callable[[], object]) -> list[Call]:
    """The calls from one of our files into another while this runs on this thread."""
    found: list[Call] = []
    ours = str(SOURCE) + os.sep

    def called(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(ours):
            return
        by = frame.f_back
        while by is not None and not by.f_code.co_filename.startswith(ours):
            by = by.f_back  # torch, in between, belongs to the call
        if by is not None and by.f_code.co_filename != name:
            found.append((name.removeprefix(ours), frame.f_code.co_qualname))

    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def rank_of(rank: int, directory: str, policy: str, pipe: Any) -> None:
    from paceline.torch import leave

    join(rank, RANKS, directory)
    each = rounds_of(policy, RANKS, "loss")
    for _ in range(WARM_UP):
        next(each)
    if rank:
        for _ in range(ROUNDS):
            next(each)
    else:
        pipe.send([walk(lambda: next(each)) for _ in range(ROUNDS)])
    leave()
    os._exit(0)


def walks(policy: str) -> tuple[list[Call], list[Call]]:
    """The calls of a light step, the one in the middle, and of one that decides within an epoch."""
    context = forks()
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as directory:
        workers = [
            context.Process(target=rank_of, args=(rank, directory, policy, theirs)) for rank in range(RANKS)
        ]
        for worker in workers:
            worker.start()
        if not ours.poll(600):
            raise SystemExit("a rank has failed; see above")
        found = sorted(ours.recv(), key=len)
        for worker in workers:
            worker.join()
    names = [{function for _, function in each} for each in found]
    deciding = [
        each
        for each, these in zip(found, names, strict=True)
        if "Balancer.report" in these and "Progress.open" not in these
    ]
    if not deciding:
        raise SystemExit(f"no decision within an epoch fell into {ROUNDS} rounds; run it again")
    return found[len(found) // 2], deciding[len(deciding) // 2]


def survivor(folder: Path) -> None:
    """One of three ranks, of which the last is killed; the first writes the calls of the round in which it was."""
    import torch

    from paceline.torch import ElasticPace
    from paceline.torch.callbacks import Callback

    class Members(Callback):
        changed = False

        def on_members(self, change: Any) -> None:
            self.changed = True

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, members = torch.nn.Linear(8, 1), Members()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(24 * 2 * KILLED_AT, 8))
    pace = ElasticPace(model, 24, "equal", callbacks=[members])
    loader = pace.loader(data)
    pace.register(optimizer)

    def loss(x: torch.Tensor) -> torch.Tensor:
        if pace.rank == 2 and pace.rounds == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return model(x).square().mean()

    rounds = iter(loader)

    def step() -> None:
        pace.round(next(rounds), loss)
        pace.step(optimizer)

    for number in range(2 * KILLED_AT - 1):
        members.changed = False
        calls = walk(step)
        if members.changed and number and not pace.rank:
            (folder / SURVIVORS_FILE).write_text(json.dumps(calls))
    os._exit(0)


def killed() -> list[Call]:
    """The calls of a survivor in the round in which another rank is killed."""
    with tempfile.TemporaryDirectory() as directory:
        launcher = [sys.executable, "-m", "paceline.torch.launcher", "--workers=3", "--max-restarts=0"]
        ran = subprocess.run(
            [*launcher, __file__, "--survivor", directory], capture_output=True, text=True, timeout=300
        )
        found = Path(directory) / SURVIVORS_FILE
        if not found.exists():
            raise SystemExit(f"no rank has survived: {ran.stderr}")
        return list(dict.fromkeys((file, function) for file, function in json.loads(found.read_text())))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--policy", type=policy_name, default="auto")
    parser.add_argument("--walks", action="store_true")
    parser.add_argument("--survivor", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.survivor is not None:
        survivor(options.survivor)

    from paceline.torch import Pace

    everywhere, torch = sorted(SOURCE.rglob("*.py")), sorted((SOURCE / "torch").rglob("*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in everywhere}
    members = [name for name in dir(Pace) if not name.startswith("_")]
    lines = {file: text.count("\n") for file, text in texts.items()}
    rows = [
        ("torch/: files", len(torch)),
        ("torch/: lines", sum(lines[file] for file in torch)),
        ("src: modules", len(everywhere)),
        ("src: lines", sum(lines.values())),
        (
            "writes to another object's attributes in torch/",
            sum(1 for file in torch for _ in writes(ast.parse(texts[file]))),
        ),
        ("options of Pace", len(inspect.signature(Pace).parameters)),
        ("public members of Pace", len(members)),
    ]
    for name, number in rows:
        print(f"{name:50}{number:8}", flush=True)
    kinds = "a light step", "a step that decides", "a rank is killed"
    for name, calls in zip(kinds, (*walks(options.policy), killed()), strict=True):
        print(f"{f'{name}: files':50}{len({file for file, _ in calls}):8}")
        print(f"{f'{name}: calls from one file into another':50}{len(calls):8}")
        for file, function in calls if options.walks else ():
            print(f"    {file}: {function}")


if __name__ == "__main__":
    main()
