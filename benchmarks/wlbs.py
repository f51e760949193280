"""What do LSP and WLBS bring on real workers of which one lags and one dies?

Five Ray workers sleep for their samples (2 ms each); worker 1 becomes four times slower at update 10, worker 4 is
killed 3 s in. Digits, perceptron, B = 250, as in ``paceline reproduce wlbs`` on its virtual clock. Printed: seconds
of the run and to a loss that all reach, loss and accuracy at the end, samples a second, the longest time between two
updates, and whether every sample was used once an epoch.
Workers sleep, so two cores suffice; on a busy machine repeat.
"""

from __future__ import annotations

import os
import signal
import time

import numpy as np
from scaffold import command_line, counter

NODES, BATCH, LOSS = 5, 250, 0.8
SCHEMES = {
    "BSP, equal": ("bsp", "equal"),
    "LSP, equal": ("lsp:3:3", "equal"),
    "LSP, WLBS": ("lsp:3:3", "wlbs:period=3,epoch=20"),
    "LSP, level": ("lsp:3:3", "level"),
    "BSP, WLBS": ("bsp", "wlbs:period=3,epoch=20"),
    "BSP, level": ("bsp", "level"),
}


class Lagging:
    """Seconds that a worker sleeps for a task."""

    def __call__(self, worker: int, update: int, samples: int) -> float:
        return 2e-3 * samples * (4.0 if worker == 1 and update >= 10 else 1.0)


def one(name: str, epochs: int) -> None:
    """Train under one scheme; print its line."""
    from paceline.data import datasets
    from paceline.learners.images import Images
    from paceline.paramserver.config import ServerConfig
    from paceline.paramserver.engine import Update
    from paceline.paramserver.samples import Epochs
    from paceline.ray import Server
    from paceline.train.config import TrainConfig
    from paceline.train.ray_engine import images_program

    sync, policy = SCHEMES[name]
    data = datasets.load("digits")
    pool, log = Epochs(len(data.x_train), epochs, seed=0), list[Update]()
    killed: list[float] = []
    show = counter(f"{name}, samples")

    def on_update(update: Update) -> None:
        log.append(update)
        show(sum(each.batch for each in log), epochs * len(data.x_train))
        if update.ended > log[0].ended + 3.0 and not killed:
            killed.append(time.perf_counter())
            os.kill(server.processes[4], signal.SIGKILL)

    config = ServerConfig(NODES, BATCH, sync=sync, policy=policy, lr=0.2, momentum=0.5)
    program = images_program(TrainConfig(), data)
    with Server(program, config, pool, on_update, delay=Lagging()) as server:
        values = server.run()
    took = log[-1].ended - log[0].ended + log[0].seconds
    samples = np.cumsum([u.batch for u in log])
    loss = np.array([u.loss for u in log])
    smooth = np.array([loss[max(0, i - 4) : i + 1].mean() for i in range(len(loss))])
    below = np.flatnonzero(smooth < LOSS)
    reached = f"{log[below[0]].ended:.1f}" if len(below) else "-"
    loss_, accuracy = Images(data, "mlp", 0, standardize=False).test(values)
    gaps = np.diff([u.ended for u in log])
    print(
        f"{name:>12} {took:8.1f} {reached:>12} {loss_:8.3f} {accuracy:9.1%} {samples[-1] / took:10.0f} "
        f"{gaps.max():12.2f} {'yes' if set(pool.uses) == {epochs} else 'no':>6}"
    )


def main() -> None:
    """The table."""
    import ray

    parser = command_line(__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    asked = parser.parse_args()
    ray.init("local", num_cpus=NODES + 1, include_dashboard=False, log_to_driver=False)
    print(
        f"{'':>12} {'seconds':>8} {'s to ' + str(LOSS):>12} {'loss':>8} {'accuracy':>9} {'samples/s':>10} "
        f"{'longest wait':>12} {'once':>6}"
    )
    for name in asked.schemes:
        one(name, asked.epochs)
    ray.shutdown()


if __name__ == "__main__":
    main()
