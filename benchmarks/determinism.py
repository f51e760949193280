"""Does ``Pace(deterministic=True)`` give the same bits whoever ran what, whatever kernels torch and MKL choose?

    python benchmarks/determinism.py [--repetitions 200] [--only avx2] [--case convolution] [--here]

Under each of ATEN_CPU_CAPABILITY=default, avx2 and avx512, with MKL_CBWR unset and COMPATIBLE (with --here, under the
environment's own settings), in fresh processes: real gloo ranks train small networks again and again for three rounds
each, by turns with chunks of one and of six samples. Every micro-step stalls at random, so that others claim other
chunks each time, and blocks of memory of random sizes are kept, so that tensors lie elsewhere. Half of the
repetitions are run by 3 ranks, a quarter by 2, a quarter by one alone. All must end in parameters of the same bits;
two settings may differ. Ten minutes on two idle cores. The status is 1 where bits differ.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from scaffold import command_line

from paceline.torch.callbacks import OnRound
from support.ranks import run_ranks

if TYPE_CHECKING:
    import torch

CAPABILITIES, REPRODUCIBILITY = ("default", "avx2", "avx512"), ("", "COMPATIBLE")
SAMPLES, BATCH = 60, 24  # three rounds, the last of them short
CASES = (
    "perceptron",
    "double precision",
    "convolution",
    "attention",
    "arrays at any address",
    "a loader process",
)
RANKS = {3: 0.5, 2: 0.25, 1: 0.25}  # how many run together in what part of the repetitions
STALL = 5e-4  # seconds a sample, on average


class Outcome(NamedTuple):
    """Of one repetition."""

    case: str
    digest: str  # of the parameters
    division: str  # who ran what


def network(case: str) -> torch.nn.Module:
    """Small, with sizes that are no multiples of a vector register, for inputs of (batch, 10, 15) numbers."""
    import torch
    from torch import nn

    torch.manual_seed(3)
    if case == "convolution":
        return nn.Sequential(
            nn.Unflatten(1, (1, 10)),
            nn.Conv2d(1, 5, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(120, 7),
        )
    if case == "attention":
        layer = nn.TransformerEncoderLayer(15, 3, 31, dropout=0.0, batch_first=True)
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(150, 7))
    layers = nn.Sequential(nn.Flatten(), nn.Linear(150, 31), nn.Tanh(), nn.Linear(31, 7))
    return layers.double() if case == "double precision" else layers


def numpy_batch(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collates into memory that begins anywhere, as that of numpy's arrays does."""
    import numpy as np
    import torch

    x = np.stack([x.numpy() for x, _ in samples])
    start = random.randrange(32)
    memory = np.empty(start + x.size, x.dtype)
    memory[start:] = x.ravel()
    return torch.from_numpy(memory)[start:].view(*x.shape), torch.stack([y for _, y in samples])


def trained(case: str, quantum: int, rank: int, repetition: int) -> Outcome:
    """One repetition."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from paceline.torch import Pace, RoundResult

    model = network(case)
    kind = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 10, 15, generator=generator, dtype=torch.float64).to(kind)
    data = torch.utils.data.TensorDataset(x, torch.randint(7, (SAMPLES,), generator=generator))
    ddp = DistributedDataParallel(model) if torch.distributed.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stalls = random.Random(1000 * repetition + rank)
    rounds: list[RoundResult] = []
    pace = Pace(
        ddp,
        BATCH,
        "factoring",
        loop="pieces",
        deterministic=True,
        quantum=quantum,
        callbacks=[OnRound(rounds.append)],
    )
    options: dict[str, Any] = {}
    if case == "arrays at any address":
        options["collate_fn"] = numpy_batch
    if case == "a loader process":
        options |= {"num_workers": 1, "multiprocessing_context": "fork"}
    kept: list[torch.Tensor] = []
    for x, y in pace.loader(data, seed=5, **options):
        kept.append(torch.empty(stalls.randrange(1, 5000), dtype=torch.uint8))
        time.sleep(STALL * stalls.expovariate(1.0) * len(x))
        pace.backward(torch.nn.functional.cross_entropy(ddp(x), y))
        pace.step(optimizer)
    pace.host.flush()
    pace.host.detach()
    pace.host.release()
    parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    division = str([result.loads.tolist() for result in rounds])
    return Outcome(
        f"{case}, chunks of {quantum}" if quantum > 1 else case, digest(parameters), digest(division.encode())
    )


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def plan(repetitions: int, cases: list[str]) -> Iterator[tuple[str, int, int]]:
    """(case, quantum, number) of each repetition. Loader processes take long to start: a fifth of the rest."""
    for number in range(repetitions):
        for case in cases:
            if case != "a loader process" or number % 10 < 2:
                yield case, (1, 6)[number % 2], number


def life(rank: int, ranks: int, first: int, repetitions: int, cases: list[str]) -> list[Outcome]:
    """Of one rank: every repetition. One alone trains without a process group."""
    from paceline.torch import leave

    if ranks == 1:
        leave()
    outcomes = [
        trained(case, quantum, rank, first + number) for case, quantum, number in plan(repetitions, cases)
    ]
    leave()
    return outcomes


def measure(repetitions: int, cases: list[str]) -> bool:
    """Under the environment's settings; prints what was found, True where all bits are the same."""
    outcomes: list[Outcome] = []
    first, began = 0, time.perf_counter()
    for ranks, part in RANKS.items():
        count = max(1, round(part * repetitions))
        found = run_ranks(ranks, life, first, count, cases, seconds=None)
        outcomes += itertools.chain.from_iterable(found)
        first += count
    settings = [f"{name} {os.environ.get(name) or 'unset'}" for name in ("ATEN_CPU_CAPABILITY", "MKL_CBWR")]
    print(f"\n{', '.join(settings)}: {time.perf_counter() - began:.0f} s")
    same = True
    for case in sorted({outcome.case for outcome in outcomes}):
        found = Counter(outcome.digest for outcome in outcomes if outcome.case == case)
        divisions = {outcome.division for outcome in outcomes if outcome.case == case}
        same &= len(found) == 1
        verdict = "the same bits" if len(found) == 1 else f"{len(found)} UNLIKE RESULTS"
        print(f"  {case:36}{found.total():5} results of {len(divisions):4} divisions: {verdict}", flush=True)
    return same


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--only", action="append", choices=CAPABILITIES, help="repeat for several")
    parser.add_argument("--case", action="append", choices=CASES, help="repeat for several")
    parser.add_argument("--here", action="store_true", help="under the environment's settings alone")
    args = parser.parse_args()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if args.here:
        os.environ.update(environment)
        return int(not measure(args.repetitions, args.case or list(CASES)))
    failed = False
    for capability, reproducibility in itertools.product(args.only or CAPABILITIES, REPRODUCIBILITY):
        setting = {"ATEN_CPU_CAPABILITY": capability, "MKL_CBWR": reproducibility}
        cases = [word for case in args.case or () for word in ("--case", case)]
        command = [sys.executable, __file__, "--here", "--repetitions", str(args.repetitions), *cases]
        unset = {name: value for name, value in environment.items() if name != "MKL_CBWR"}
        status = subprocess.run(
            command, env=unset | {k: v for k, v in setting.items() if v}, check=False
        ).returncode
        failed |= status != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
