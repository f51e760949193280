"""Training your own model on Ray: a program for the workers, and one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from paceline.errors import PacelineError, expected
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.engine import Update
from paceline.paramserver.samples import Epochs
from paceline.ray.server import Server
from paceline.ray.worker import Delay, Gradient, Program, check_functions
from paceline.rounds import Indices, Vector


def train(
    program: Program,
    samples: int,
    *,
    workers: int = 4,
    global_batch: int = 256,
    epochs: int = 1,
    policy: str = "level",
    seed: int = 0,
    address: str | None = None,
    delay: Delay | None = None,
    replace: bool = False,
    on_update: Callable[[Update], None] | None = None,
    **options: Any,
) -> Vector:
    """Train on Ray.

    Args:
        program: Called once in each worker with its rank; returns the first parameters, flat, and a function
            (parameters, sample numbers) -> (gradient of the mean loss, mean loss). ``torch_program`` makes one.
        samples: Number of samples of the training set; under bsp, each is used exactly once per epoch, even if
            gradients are dropped.
        workers: Number of workers, n.
        global_batch: B, samples in a full round.
        epochs: Passes over the training set.
        policy: The division of the batch, as for ``policies.create``.
        seed: Seed of the order of the samples.
        address: Of a running Ray cluster; without one, Ray is started on this machine, and ended again.
        delay: (worker, update, samples) -> seconds to sleep, to try out uneven workers.
        replace: Start a new worker for each one that dies.
        on_update: Called after each update.
        options: Sync, mode, backup, rate, lr and momentum, as for ``ServerConfig``.

    Returns:
        The trained parameters, one flat vector.

    Raises:
        PacelineError: Before Ray is started, for an option that is unknown or out of range.
    """
    taken = [each.name for each in fields(ServerConfig)]
    for name in options:
        if name not in taken:
            known = dict.fromkeys((*list(inspect.signature(train).parameters)[:-1], *taken))
            raise PacelineError(f"paceline.ray.train has no option {name!r}{expected(name, known)}")
    config = ServerConfig(workers, global_batch, policy=policy, **options)
    pool = Epochs(samples, epochs, seed, config.pairs())
    with Server(program, config, pool, on_update, address=address, delay=delay, replace=replace) as server:
        return server.run()


def torch_program(
    model: Callable[[], Any], inputs: Any, targets: Any, loss: Callable[[Any, Any], Any] | None = None
) -> Program:
    """A program for a torch model and data that fit into each worker's memory.

    Args:
        model: A function that makes the model, whose parameters are all float32 or all float64. It is called in each
            worker, and once here for the checks.
        inputs: One row for each sample.
        targets: One row for each sample.
        loss: A function of outputs and targets, a mean over samples; by default the cross entropy.

    Returns:
        The program, for ``train``.

    Raises:
        PacelineError: For data without rows or of different lengths, arguments that are no functions, parameters of
            another dtype or of several, layers that keep running statistics, since ``train`` returns parameters only,
            and a loss with parameters. A model that changes other buffers, and a loss that is no plain mean over the
            samples, end the training with an error.
    """
    check_functions("loss", model=model, loss=loss)
    rows, labels = (len(each) if np.ndim(each) else 0 for each in (inputs, targets))
    if not 0 < rows == labels:
        raise PacelineError(
            f"inputs of {rows} and targets of {labels} rows: expected as many, one per sample"
        )
    _check(model, loss)

    def program(worker: int) -> tuple[Vector, Gradient]:
        import torch

        from paceline.learners.flat_model import FlatModel, check_trainable, check_unchanged
        from paceline.learners.mean_loss import MeanLoss

        torch.set_num_threads(1)
        torch.manual_seed(0)
        made = model()
        check_trainable(made)
        flat = FlatModel(made, None if loss is None else MeanLoss(loss))
        first = {name: each.clone() for name, each in made.named_buffers() if each.is_floating_point()}
        x, y = torch.tensor(np.asarray(inputs)), torch.tensor(np.asarray(targets))

        def gradient(values: Vector, samples: Indices) -> tuple[Vector, float]:
            flat.set(values)
            chosen = torch.from_numpy(np.array(samples))
            found = flat.gradient(x[chosen], y[chosen])
            check_unchanged(made, first)
            return found

        return flat.values(), gradient

    return program


def _check(model: Callable[[], Any], loss: Any) -> None:
    """Raises PacelineError for a model or a loss that the workers would refuse, before they start."""
    import torch

    from paceline.learners.flat_model import check_trainable
    from paceline.learners.mean_loss import check_loss

    check_loss(loss)
    if isinstance(model, torch.nn.Module):
        raise PacelineError(
            f"model is a {type(model).__name__}: expected a function that makes one, as each worker has its own; "
            "write lambda: model"
        )
    with torch.random.fork_rng(devices=[]):  # the program's own random numbers stay as they are
        try:
            made = model()
        except Exception:  # it may need what only the workers have; an error there is quoted
            return
    check_trainable(made)
