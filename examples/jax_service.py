"""JAX, data-parallel on three processes of uneven speed, balanced by ``paceline serve``.

    python examples/jax_service.py

Starts the service and the three processes on this machine. Each asks the service for its part of a round,
computes the gradient of these samples alone, and reports how long that took; the gradients, weighted by b_i / B,
are summed over the processes by JAX (``process_allgather`` over jax.distributed's own CPU collectives). Process 2
sleeps four times as long for each sample as the others. In the end process 0 trains once more by itself, with
whole batches, and compares the parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np

from paceline.client import Worker
from paceline.data.datasets import load

BATCH, QUANTUM, RATE = 768, 64, 0.2
SLEEP = (0.25e-3, 0.25e-3, 1e-3)  # seconds a sample, by process
TOKEN = "token-of-the-jax-example"


def train(rank: int, address: str, url: str, rounds: int) -> None:
    """One process."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, len(SLEEP), rank)
    import jax.numpy as jnp
    from jax.experimental.multihost_utils import process_allgather

    digits = load("digits")
    images = digits.x_train.reshape(len(digits.x_train), -1)
    labels = digits.y_train

    def loss(parameters, x, y):
        hidden = jnp.tanh(x @ parameters["in"])
        scores = jax.nn.log_softmax(hidden @ parameters["out"])
        return -scores[jnp.arange(len(y)), y].mean()

    gradient = jax.jit(jax.value_and_grad(loss))
    rng = np.random.default_rng(0)
    start = {
        "in": jnp.asarray(rng.normal(0, 0.1, (images.shape[1], 32)), jnp.float32),
        "out": jnp.asarray(rng.normal(0, 0.1, (32, 10)), jnp.float32),
    }

    def samples(round: int, offset: int, count: int):
        chosen = np.arange(round * BATCH + offset, round * BATCH + offset + count) % len(images)
        return images[chosen], labels[chosen]

    def step(parameters, gradients):
        return jax.tree.map(lambda value, slope: value - RATE * slope, parameters, gradients)

    for count in range(QUANTUM, BATCH + 1, QUANTUM):  # compile before the clock runs
        gradient(start, *samples(0, 0, count))
    nothing = jax.tree.map(jnp.zeros_like, start)

    parameters, losses, loads = start, [], []
    with Worker(url, token=TOKEN, name=f"process-{rank}", place=rank) as worker:
        for part in worker.rounds(rounds):
            began = time.perf_counter()
            mean, slopes = 0.0, nothing
            if part.samples:
                mean, slopes = gradient(parameters, *samples(part.round, part.offset, part.samples))
                jax.block_until_ready(slopes)
                time.sleep(SLEEP[rank] * part.samples)
            worker.report(time.perf_counter() - began)
            weighted = jax.tree.map(lambda slope, weight=part.weight: weight * slope, (mean, slopes))
            mean, slopes = jax.tree.map(lambda parts: parts.sum(0), process_allgather(weighted))
            parameters = step(parameters, slopes)
            losses.append(float(mean))
            loads.append(part.samples)
        everybody = process_allgather(np.array(loads)).T.tolist()
    if rank == 0:
        alone = start
        for round in range(rounds):
            alone = step(alone, gradient(alone, *samples(round, 0, BATCH))[1])
        flat, other = (
            np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (parameters, alone)
        )
        difference = np.linalg.norm(flat - other) / np.linalg.norm(other)
        print(json.dumps({"loads": everybody, "losses": losses, "difference": float(difference)}), flush=True)
    jax.distributed.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--process", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.process:
        rank, address, url = given.process
        train(int(rank), address, url, given.rounds)
        return
    environment = os.environ | {"PACELINE_TOKEN": TOKEN, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as scratch:
        options = ["--batch", str(BATCH), "--quantum", str(QUANTUM), "--workers", str(len(SLEEP))]
        service = subprocess.Popen(
            [sys.executable, "-m", "paceline", "serve", "--port", "0", "--dir", scratch, *options],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        processes = []
        try:
            url = service.stdout.readline().split(" at ")[1].split()[0]
            for rank in range(len(SLEEP)):
                command = [sys.executable, __file__, "--rounds", str(given.rounds)]
                processes.append(
                    subprocess.Popen(
                        [*command, "--process", str(rank), address, url],
                        stdout=subprocess.PIPE,
                        text=True,
                        env=environment,
                    )
                )
            said = [process.communicate(timeout=240)[0] for process in processes]
        finally:
            for process in [*processes, service]:
                process.terminate()
                process.wait()
        if any(process.returncode for process in processes):
            sys.exit("a process failed; see above")
        result = json.loads(said[0].splitlines()[-1])
    first, last = result["loads"][0], result["loads"][-1]
    print(f"loads {first} -> {last}")
    print(f"loss {result['losses'][0]:.3f} -> {result['losses'][-1]:.3f}")
    print(f"difference from one process with whole batches: {result['difference']:.1e} (relative)")


if __name__ == "__main__":
    main()
