"""A script of one's own for the launcher: own_script.py FOLDER ROUNDS. It goes on from its checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from paceline.torch import ElasticPace
from support.elastic_runs import BATCH, SAMPLES, Rows, network, optimizers


def main(folder: Path, rounds: int) -> None:
    torch.set_num_threads(1)
    kept, model = folder / "checkpoint.pt", network()
    optimizer, scheduler = optimizers(model)
    pace = ElasticPace(model, BATCH)
    signal.signal(signal.SIGTERM, lambda *_: pace.leave())
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "pace": pace}

    def save() -> None:
        torch.save({name: part.state_dict() for name, part in parts.items()}, kept.with_suffix(".part"))
        kept.with_suffix(".part").rename(kept)

    def loss_of(x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        time.sleep(2e-4 * len(x))
        return (model(x) - y).square().mean()

    with pace, open(folder / f"rounds-{pace.rank}-{os.getpid()}", "a", buffering=1) as told:
        loader = pace.loader(Rows(SAMPLES), seed=3)
        if kept.exists():
            for name, state in torch.load(kept, weights_only=False).items():
                parts[name].load_state_dict(state)
        pace.register(optimizer, scheduler)
        while pace.rounds < rounds:
            for batch in loader:
                pace.round(batch, loss_of)
                if pace.step(optimizer):
                    scheduler.step()
                    told.write(f"{pace.rounds}\n")
                    if pace.chief:
                        save()
                    if pace.rounds >= rounds:
                        break
        pace._loop.settle()
        torch.save(nn.utils.parameters_to_vector(model.parameters()).detach(), folder / f"end-{pace.rank}.pt")
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
