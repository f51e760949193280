"""What does ``ElasticPace`` cost while nothing happens, beside plain DistributedDataParallel on even ranks?

    python benchmarks/elastic.py [--pairs 20] [--ranks 2] [--model lenet5,wide]

Blocks of plain DDP and of an elastic Pace under "equal" alternate in the same processes, each with its own model:
LeNet-5 on 1,024 images a rank, or a perceptron of 27 million parameters on 64 samples a rank. Printed: the time
of a step of each, and the median over pairs of their ratio with its quartiles; the same of the processor time of
the first rank, all threads, which says more on a busy machine.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import numpy as np
from scaffold import command_line, forks

BLOCK = 4  # rounds
SAMPLES = {"lenet5": 1024, "wide": 64}  # of a rank in a round


def network(name: str) -> Any:
    """The model."""
    import torch
    from torch import nn

    from paceline.learners import models

    torch.manual_seed(0)
    if name == "lenet5":
        return models.create("lenet5", (1, 28, 28))
    layers = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 2048), *layers, nn.Linear(2048, 10))


def work(where: Any, folder: str, name: str, pairs: int, pipe: Any) -> None:
    """A rank: both ways in turn; the first sends the seconds of each block."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from paceline.torch import ElasticPace

    os.environ.update(where.environment())
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), where.places)
    dist.init_process_group("gloo", store=store, rank=where.place, world_size=where.places)
    each, loss_of = SAMPLES[name], nn.CrossEntropyLoss()
    batch = each * where.places
    images, labels = torch.randn(batch * 4, 1, 28, 28), torch.randint(10, (batch * 4,))

    class Images:
        def __len__(self) -> int:
            return len(images)

        def __getitems__(self, indices: list[int]) -> tuple[Any, Any]:
            return images[indices], labels[indices]

    ddp, model = DistributedDataParallel(network(name)), network(name)
    plain, optimizer = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (ddp, model))

    def plainly() -> Any:
        while True:
            order = torch.randperm(len(images)).tolist()
            for start in range(where.place * each, len(images), batch):
                x, y = Images().__getitems__(order[start : start + each])
                loss_of(ddp(x), y).backward()
                plain.step()
                plain.zero_grad()
                yield

    pace = ElasticPace(model, batch, "equal", loop="pieces")
    loader = pace.loader(Images(), collate_fn=lambda batch: batch)
    pace.register(optimizer)

    def paced() -> Any:
        while True:
            for x, y in loader:
                pace.backward(loss_of(model(x), y))
                if pace.step(optimizer):
                    yield

    ways, seconds = (plainly(), paced()), []
    for pair in range(pairs + 1):
        took = []
        for way in ways:
            dist.barrier()
            began, busy = time.perf_counter(), time.process_time()
            for _ in range(BLOCK):
                next(way)
            took += [(time.perf_counter() - began) / BLOCK, (time.process_time() - busy) / BLOCK]
        if pair:  # the first is for warming up
            seconds.append(took)
    dist.barrier()
    if where.place == 0:
        pipe.send(seconds)
    dist.barrier()
    os._exit(0)


def main() -> None:
    """Run both ways and print what each step takes."""
    from paceline.torch.elastic.supervisor import Supervisor

    parser = command_line(__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="lenet5,wide")
    asked = parser.parse_args()
    context = forks()
    for name in asked.model.split(","):
        ours, theirs = context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory() as folder:

            class Started:
                def __init__(self, where: Any) -> None:
                    arguments = (where, folder, name, asked.pairs, theirs)  # noqa: B023 - used at once
                    self.process = context.Process(target=work, args=arguments)
                    self.process.start()
                    self.pid = self.process.pid

                def poll(self) -> int | None:
                    return None if self.process.is_alive() else self.process.exitcode or 0

                def terminate(self) -> None:
                    self.process.terminate()

                def kill(self) -> None:
                    self.process.kill()

            keeper = Supervisor(asked.ranks, Started, dead=30.0)
            while keeper.workers:
                for loss in keeper.look():
                    if loss.lost:
                        print(f"worker {loss.place} {loss.words}")
                time.sleep(0.01)
            seconds = np.array(ours.recv())
        for what, plain, elastic in (("step", *seconds[:, ::2].T), ("processor time", *seconds[:, 1::2].T)):
            low, middle, high = np.percentile(elastic / plain, [25, 50, 75])
            print(
                f"{name}, {asked.ranks} ranks, {what}: plain {np.median(plain) * 1e3:.1f} ms, elastic "
                f"{np.median(elastic) * 1e3:.1f} ms; ratio {middle:.3f} ({low:.3f} to {high:.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
