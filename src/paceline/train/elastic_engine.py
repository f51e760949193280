"""What each worker of an elastic ``paceline train`` runs: a plain model, in a loop that others leave and join."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from paceline.torch.elastic.link import Left, Link
from paceline.torch.elastic.member import Mended
from paceline.torch.measuring.open_rounds import RoundResult
from paceline.train import contents, judging, torch_engine
from paceline.train.config import TrainConfig
from paceline.train.torch_engine import Emit


def train(config: TrainConfig, run_dir: Path, emit: Emit, resume: bool, link: Link) -> None:
    """Train as one of the workers of a launcher, which writes the record.

    emit: takes each finished round ("round"), each change of members ("members"), and at the end the accuracy
    ("judged"), as dicts; all members tell of the rounds, one of the accuracy and of checkpoints ("checkpoint").
    """
    data, model, loss_of, slowed, optimizer = torch_engine.prepared(config)
    last, guard = config.rounds(len(data.x_train)), torch_engine.Guard()

    def told(mended: Mended) -> None:
        emit({"type": "members", "mended": mended})

    def finished(result: RoundResult) -> None:
        emit({**torch_engine.progress(result, last), "result": result})

    guard.listeners.append(finished)
    pace = torch_engine.paced(config, model, guard, elastic=True, on_members=told)
    signal.signal(signal.SIGTERM, lambda *_: pace.leave())
    with pace:
        loader = torch_engine.loading(config, pace, data)
        kept = contents.of_run(run_dir)
        if resume and (note := torch_engine.go_on(kept, model, optimizer, pace, len(data.x_train))):
            emit({"type": "note", "text": note})
        first = pace.rounds
        pace.register(optimizer)
        emit({"type": "start", "rounds": last, "first": first, "policy": config.policy})
        due, written = pace.rounds, first  # when a checkpoint was due, and of when this worker knows one

        def keep() -> Path | None:
            """Prepare a checkpoint, which the launcher commits when its rounds are on record."""
            nonlocal written
            if pace.rounds <= written:  # the two that are kept are of different rounds
                return None
            prepared = kept.prepare(torch_engine.packed(model, optimizer, pace))
            emit({"type": "checkpoint", "rounds": pace.rounds, "prepared": prepared})
            written = pace.rounds
            return prepared

        try:
            while pace.rounds < last:
                for images, labels in loader:
                    if slowed is not None:
                        time.sleep(slowed(pace.rank, pace.rounds, len(labels), first=pace.first))
                    pace.backward(loss_of(model(images), labels))
                    if pace.step(optimizer):
                        if pace.rounds - due >= config.checkpoint_every:
                            due = pace.rounds
                            if pace.chief:
                                keep()
                        if pace.rounds >= last:
                            break
        except Left:
            pace.abandon()
            if pace.chief:  # all may have been told to leave
                keep()
            raise
        pace.flush()

        def end() -> None:
            emit({"type": "test"})
            prepared = keep()
            while prepared is not None and prepared.exists():
                time.sleep(judging.LOOK)

        def as_kept() -> None:
            if any(True for _ in model.buffers()) and (parts := kept.load()) is not None:
                model.load_state_dict(parts["model"])

        accuracy = judging.judge(link, model, data, end, as_kept)
        if accuracy is not None:
            emit({"type": "judged", "accuracy": accuracy})
            judging.told(link)
