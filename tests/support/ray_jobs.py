"""What the workers of the tests of Ray Train run; each leaves what it found in a file of its own."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.hosts.ray_train import RayTrainPace
from paceline.torch import peers
from support import hosts
from support.hosts import BATCH, COUNT, EPOCHS, FREE, SEED, UNEVEN, Samples, fresh, optimizer_of

FALLS = 8  # rounds after which a worker fails, once; within the second epoch


class Run:
    """A worker's training loop, as Ray Train's users write it."""

    def __init__(
        self,
        ranks: int,
        dtype: torch.dtype = torch.float64,
        net: nn.Module | None = None,
        loading: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.net = net or fresh(dtype)
        self.model = ray.train.torch.prepare_model(self.net)
        self.optimizer = optimizer_of(self.model)
        options = {"policy": UNEVEN, "limits": FREE[:ranks]} | options
        self.pace = RayTrainPace(self.model, BATCH, **options)
        self.loader = self.pace.loader(Samples(COUNT, dtype), seed=SEED, **loading or {})
        self.used: list[list[int]] = [[] for _ in range(EPOCHS)]
        self.dtypes: set[str] = set()

    def train(
        self, rounds: int | None = None, clip: float | None = None, jitter: float = 0.0, precision: Any = None
    ) -> list[torch.Tensor]:
        """The parameters after all epochs, or so many rounds."""
        loss_of, stalls = nn.CrossEntropyLoss(), random.Random(peers.rank())
        for epoch in range(self.pace.epoch, EPOCHS):
            for x, y, index in self.loader:
                time.sleep(jitter * stalls.expovariate(1.0))
                self.used[epoch] += index.tolist() if self.pace.counts else []
                mixed = torch.autocast("cpu", precision) if precision else contextlib.nullcontext()
                with mixed:
                    logits = self.model(x)
                self.dtypes.add(str(logits.dtype))
                self.pace.backward(loss_of(logits.to(x.dtype), y))
                if clip is not None and self.pace.complete:
                    nn.utils.clip_grad_norm_(self.model.parameters(), clip)
                self.pace.step(self.optimizer)
                if self.pace.rounds == rounds:
                    return list(self.net.parameters())
        return list(self.net.parameters())

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "pace": self.pace}


def loop(config: dict[str, Any]) -> None:
    """All cases; or, where a worker is to fail, a first attempt that ends with that after a checkpoint, and a second
    that goes on from it."""
    rank, ranks = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    kept = ray.train.get_checkpoint()
    if config["fails"] is None:
        _leave(config["folder"], f"first-{rank}", cases(ranks))
    elif kept is None:
        found = plain(ranks)
        run = Run(ranks, policy="level", limits=None)
        run.train(rounds=FALLS)
        found["before"] = run.used
        _leave(config["folder"], f"first-{rank}", found)
        with tempfile.TemporaryDirectory() as folder:
            state = {name: part.state_dict() for name, part in run.parts().items()}
            torch.save(state, Path(folder) / "state.pt")
            made = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
            ray.train.report({"rounds": FALLS}, checkpoint=made)
        run.pace.close()
        ray.train.get_all_reported_checkpoints()  # waits until the checkpoint is on record
        if rank == config["fails"]:
            raise RuntimeError("this worker fails")
    else:
        run = Run(ranks, policy="level", limits=None)
        with kept.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        for name, part in run.parts().items():
            part.load_state_dict(state[name])
        off = hosts.difference(run.train(), hosts.whole_batch())
        run.pace.close()
        _leave(config["folder"], f"second-{rank}", {"off": off, "after": run.used})


def evaluated(ranks: int) -> tuple[Any, Any]:
    """What evaluation gives in mid-epoch of a balanced run, and without Paceline with the same parameters."""

    def evaluation(model: nn.Module) -> Any:
        loader = ray.train.torch.prepare_data_loader(torch.utils.data.DataLoader(Samples(COUNT), 7))
        return hosts.evaluation(model, loader, lambda output: output)

    run = Run(ranks, net=hosts.normed(), limits=None)
    run.train(rounds=3)
    state = copy.deepcopy(run.net.state_dict())
    ours = evaluation(run.model)
    run.pace.close()
    net = hosts.normed()
    net.load_state_dict(state)
    return ours, evaluation(ray.train.torch.prepare_model(net))


def plain(ranks: int) -> dict[str, Any]:
    run = Run(ranks)
    found = {"plain": (hosts.difference(run.train(), hosts.whole_batch()), run.used)}
    run.pace.close()
    return found


def cases(ranks: int) -> dict[str, Any]:
    whole, found = hosts.whole_batch(), plain(ranks)
    run = Run(ranks, micro_batch=3, loop="pieces")
    found["accumulated"] = hosts.difference(run.train(clip=0.3), hosts.whole_batch(clip=0.3))
    run.pace.close()
    run = Run(ranks, loading={"cost": hosts.COSTS})
    found["by cost"] = hosts.difference(run.train(), whole), run.used
    run.pace.close()
    run = Run(ranks, policy="factoring", limits=None, loop="pieces")
    found["moved"] = hosts.difference(run.train(jitter=2e-3), whole), run.used
    run.pace.close()
    run = Run(ranks, torch.float32)
    found["bf16"] = hosts.difference(run.train(precision=torch.bfloat16), whole), sorted(run.dtypes)
    run.pace.close()
    found["evaluated"] = evaluated(ranks)
    try:
        run = Run(ranks)
        run.pace.loader(iter([1, 2]))
    except PacelineError as error:
        found["streamed"] = str(error)
    run.pace.close()
    return found


def _leave(folder: str, name: str, found: dict[str, Any]) -> None:
    (Path(folder) / f"{name}.json").write_text(json.dumps(found))
