"""What happens in a run, put on record and told to the user: by the launcher of the workers, or by rank 0."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from paceline.data import datasets
from paceline.errors import PacelineError, WorkerError
from paceline.learners import images, models
from paceline.rounds import RoundResult
from paceline.runs import Recorder
from paceline.runs.run import CONFIG
from paceline.torch.elastic.member import Mended
from paceline.torch.elastic.supervisor import Loss
from paceline.torch.measuring.recorder import RoundRecorder
from paceline.train.checkpoint import CHECKPOINT, of_run
from paceline.train.config import TrainConfig

RECENT = 20  # rounds, whose median is what one usually takes
NAMED = 8  # of the workers that were lost last
Event = dict[str, Any]


class Journal:
    """Each round once, with who was lost in it and came back.

    After each look at the workers: ``lost`` with those that take part no more, ``take`` with each word of a worker,
    and then ``settle`` with the members that are left. Last ``end``, and ``close`` in any case.
    """

    def __init__(
        self, config: TrainConfig, run_dir: Path, on_event: Callable[[Event], None], resume: bool
    ) -> None:
        self._config, self._run_dir, self._tell, self._resume = config, run_dir, on_event, resume
        self._record: RoundRecorder | None = None
        self._kept = of_run(run_dir)
        self._prepared: list[tuple[int, Path]] = []  # checkpoints to commit, by how many rounds they count
        self._newest, self._epoch = -1, -1
        self._members: tuple[int, ...] = ()  # places
        self._usual: deque[float] = deque(maxlen=RECENT)
        self._pending: list[Loss] = []  # seen by the launcher, and not yet by the members
        self._events: dict[int, list[str]] = {}  # by round
        self._open: dict[int, dict[int, Event]] = {}  # rounds that are not on record, by worker
        self._complaints: dict[int, str] = {}  # by worker
        self._notes: set[str] = set()
        self._ready = 0
        self.over = False  # all rounds are done, and the checkpoint of the last one is prepared
        self.faults = 0

    def lost(self, losses: Iterable[Loss]) -> None:
        """Workers take part no more."""
        self._pending += [loss for loss in losses if loss.lost or loss.words == "left"]

    def take(self, event: Event, ident: int) -> None:
        """What a worker says. Raises PacelineError for what is wrong with the input, WorkerError for another worker
        that keeps this one waiting."""
        kind = event["type"]
        if kind == "ready":
            if self._record is None:
                self._ready += 1
                self._tell({"type": "starting", "ready": self._ready, "workers": self._config.workers})
        elif kind == "start":
            self._start(event)
        elif kind == "round":
            self._open.setdefault(event["round"], {})[ident] = event
        elif kind == "members":
            self._changed(event["mended"])
        elif kind == "test":
            if not self.over:
                self._tell(event)
            self.over = True
        elif kind == "checkpoint":
            self._prepared.append((event["rounds"], event["prepared"]))
        elif kind == "input":
            raise PacelineError(event["message"])
        elif kind == "missed":
            raise WorkerError(f"{event['message']}; the run was ended; {how_to_go_on(self._run_dir)}")
        elif kind == "note":
            if event["text"] not in self._notes:  # all workers may say the same
                self._notes.add(event["text"])
                self._tell(event)
        elif kind == "fault":
            self._complaints[ident] = event["message"]
        else:
            self._tell(event)

    def settle(self, members: Collection[int], losses: Iterable[Loss], running: bool) -> None:
        """Put on record what is certain by now, and end the run where it cannot go on.

        A worker may have completed a round alone before it was lost; then the others run it once more. So a round is
        certain as soon as all members tell of it, or any worker of a later one, which needed them all, or when the
        rounds are over. running: whether the run can do without a worker by now. Raises WorkerError if a worker has
        failed by an error of its own, and for one that is lost if the run cannot do without it.
        """
        for step in sorted(self._open):
            later = {ident for other in self._open if other > step for ident in self._open[other]}
            told = self._open[step]
            if not (later or self.over or (members and told.keys() >= set(members))):
                break
            sure = [ident for ident in told if ident in (later or members)]
            self._round(self._open.pop(step)[sure[-1] if sure else list(told)[-1]])
        self._commit()
        for loss in losses:
            when = "before the first round was done" if self._newest < 0 else f"after round {self._newest}"
            words = self._complaints.get(loss.ident, "")
            if loss.failed:
                kept = (self._run_dir / CHECKPOINT).exists()
                raise WorkerError(
                    f"worker {loss.place} failed {when}: {(words or loss.words).rstrip('.')}; the other workers were "
                    "ended" + (f"; {how_to_go_on(self._run_dir)}" if kept else "")
                )
            if loss.lost and not (running or self.over):
                raise WorkerError(
                    f"worker {loss.place} {loss.words} {when}; the other workers were ended; "
                    f"{how_to_go_on(self._run_dir)}"
                )
            if words:
                self._tell({"type": "note", "text": f"worker {loss.place}: {words}"})

    def end(self) -> dict[str, Any]:
        """The summary, with the accuracy of the last round's checkpoint. Raises WorkerError if nobody came to the
        end."""
        for step in sorted(self._open):
            # Who tells last has it from those who were there last.
            self._round(list(self._open.pop(step).values())[-1])
        self._commit()
        if not self.over or self._record is None:
            # By their numbers: of several that end in one instant, any may be seen first.
            newest = sorted(self._pending[-NAMED:], key=lambda loss: loss.place)
            last = "; ".join(f"worker {loss.place} {loss.words}" for loss in newest)
            raise WorkerError(
                f"no worker is left after round {self._newest} ({last or 'all have ended'}); "
                f"{how_to_go_on(self._run_dir)}"
            )
        for loss in self._pending:  # whom no members of a round have missed
            self.faults += loss.lost
            words = f"worker {loss.place} {loss.words}; it was in no round by then"
            self._tell({"type": "note", "text": words})
        return self._record.close(
            test_accuracy=self._accuracy(), run_dir=str(self._run_dir), workers_lost=self.faults
        )

    def _accuracy(self) -> float:
        """Portion of the test set that the model of the last round's checkpoint gets right. Raises PacelineError if
        that is gone or damaged."""
        data, parts = datasets.load(self._config.data), self._kept.load()
        if parts is None or parts["pace"]["rounds"] <= self._newest:
            raise PacelineError(
                f"the checkpoint of the last round in {self._run_dir} is gone or damaged, so its model cannot be "
                f"tested; {how_to_go_on(self._run_dir)}"
            )
        model = models.create(self._config.model, data.shape, data.classes)
        model.load_state_dict(parts["model"])
        return images.evaluated(model, data)[1]

    def close(self) -> None:
        """Leave the record whole, and no checkpoint that is ahead of it."""
        for _, prepared in self._prepared:
            prepared.unlink(missing_ok=True)
        if self._record is not None:
            self._record.recorder.close()

    def _start(self, event: Event) -> None:
        if self._record is None:
            facts = self._config.as_dict() | {"engine": "torch"}
            keep = event["first"] if self._resume else None
            self._newest = event["first"] - 1
            self._record = RoundRecorder(Recorder.create(self._run_dir, facts, resume=keep))
            self._tell(event)

    def _changed(self, mended: Mended) -> None:
        """The members have changed, as the first of them tells."""
        if mended.membership <= self._epoch:
            return
        before, self._members, self._epoch = self._members, mended.members, mended.membership
        told = self._events.setdefault(mended.step, [])
        for loss in self._pending:
            self.faults += loss.lost
            told.append(f"worker {loss.place} {loss.words}")
        self._pending = []
        if before:
            told += [f"worker {place} joined" for place in mended.members if place not in before]

    def _commit(self) -> None:
        """The checkpoints whose rounds are all on record: so none is ahead of it, whenever this process is killed."""
        while self._record is not None and self._prepared and self._prepared[0][0] <= self._newest + 1:
            self._record.recorder.sync()
            self._kept.commit(self._prepared.pop(0)[1])

    def _round(self, event: Event) -> None:
        result: RoundResult = event["result"]
        if result.step <= self._newest or self._record is None:
            return
        self._newest = result.step
        told = [step for step in self._events if step <= result.step]
        said = [words for step in sorted(told) for words in self._events.pop(step)]
        usual = statistics.median(self._usual) if self._usual else result.seconds
        late = max(result.seconds - usual, 0.0)
        for words in said:
            self._tell({"type": "note", "text": _sentence(words, result, late)})
        if not said:
            self._usual.append(result.seconds)
        events = [{"what": words, "seconds_lost": round(late, 4)} for words in said]
        self._record.round(result, events)
        self._tell(event)


def how_to_go_on(run_dir: Path) -> str:
    """What a user can do with what the run has written so far."""
    if (run_dir / CHECKPOINT).exists():
        return f"go on from the last checkpoint with --resume {run_dir}"
    if (run_dir / CONFIG).exists():
        return f"there was no checkpoint yet: start the run from its beginning with --resume {run_dir}"
    return "nothing of the run was written yet: start it again"


def _sentence(words: str, result: RoundResult, late: float) -> str:
    """What happened in a round, for people."""
    if words.endswith("joined"):
        return f"{words} at round {result.step}"
    ran = ", ".join(str(place) for place, load in enumerate(result.loads.tolist()) if load)
    return (
        f"{words} in round {result.step}; {late:.2f} s lost; no sample lost: the round's {result.batch} were run by "
        f"worker {ran}"
    )
