"""Records the events of a run and reports them to the user, in the launcher of the workers or in rank 0."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from paceline.data import datasets
from paceline.errors import PacelineError, WorkerError
from paceline.learners import images, models
from paceline.rounds import RoundResult
from paceline.runs import Recorder, events
from paceline.runs.run import CONFIG
from paceline.torch.elastic.member import Mended
from paceline.torch.elastic.supervisor import Loss
from paceline.train.checkpoint import CHECKPOINT, of_run
from paceline.train.config import TrainConfig

NAMED = 8  # workers that were lost last and are named in an error
Event = dict[str, Any]


class Journal:
    """Records each round once, with the workers that were lost or joined in it.

    After each look at the workers, call ``lost`` with the lost ones, ``take`` with each event of a worker, and then
    ``settle`` with the members that are left. At the end call ``end``, and ``close`` in any case.
    """

    def __init__(
        self, config: TrainConfig, run_dir: Path, on_event: Callable[[Event], None], resume: bool
    ) -> None:
        self._config, self._run_dir, self._notify, self._resume = config, run_dir, on_event, resume
        self._record: Recorder | None = None
        self._kept = of_run(run_dir)
        self._prepared: list[tuple[int, Path]] = []  # checkpoints to commit, with their numbers of rounds
        self._newest, self._epoch = -1, -1
        self._members: tuple[int, ...] = ()  # places
        self._costs = events.Costs()
        self._pending: list[Loss] = []  # losses that the members have not reported yet
        self._events: dict[int, list[str]] = {}  # by round
        self._open: dict[int, dict[int, Event]] = {}  # rounds that are not on record yet, by worker
        self._complaints: dict[int, str] = {}  # by worker
        self._notes: set[str] = set()
        self._ready = 0
        self.over = False  # whether all rounds are done and the checkpoint of the last one is prepared
        self.faults = 0

    def lost(self, losses: Iterable[Loss]) -> None:
        """Note workers that no longer take part."""
        self._pending += [loss for loss in losses if loss.lost or loss.words == "left"]

    def take(self, event: Event, ident: int) -> None:
        """Take a worker's event. Raises PacelineError for an error in the input, WorkerError for another worker that
        keeps this one waiting."""
        kind = event["type"]
        if kind == "ready":
            if self._record is None:
                self._ready += 1
                self._notify({"type": "starting", "ready": self._ready, "workers": self._config.workers})
        elif kind == "start":
            self._start(event)
        elif kind == "round":
            self._open.setdefault(event["round"], {})[ident] = event
        elif kind == "members":
            self._changed(event["mended"])
        elif kind == "test":
            if not self.over:
                self._notify(event)
            self.over = True
        elif kind == "checkpoint":
            self._prepared.append((event["rounds"], event["prepared"]))
        elif kind == "input":
            raise PacelineError(event["message"])
        elif kind == "missed":
            raise WorkerError(f"{event['message']}; the run was ended; {how_to_go_on(self._run_dir)}")
        elif kind == "note":
            if event["text"] not in self._notes:  # all workers may send the same note
                self._notes.add(event["text"])
                self._notify(event)
        elif kind == "fault":
            self._complaints[ident] = event["message"]
        else:
            self._notify(event)

    def settle(self, members: Collection[int], losses: Iterable[Loss], running: bool) -> None:
        """Record the rounds that are certain by now, and end the run if it cannot continue.

        A worker may have completed a round alone before it was lost; the others then run that round again. So a round
        is certain as soon as all members have reported it, or any worker has reported a later one, which needed all
        members, or when the rounds are over. running: whether the run can do without a worker by now. Raises
        WorkerError if a worker has failed by its own error, or if a worker is lost that the run cannot do without.
        """
        for step in sorted(self._open):
            later = {ident for other in self._open if other > step for ident in self._open[other]}
            reports = self._open[step]
            if not (later or self.over or (members and reports.keys() >= set(members))):
                break
            sure = [ident for ident in reports if ident in (later or members)]
            # The same member's from round to round: its clock and waits are those of all of them.
            self._round(self._open.pop(step)[min(sure) if sure else list(reports)[-1]])
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
                self._notify({"type": "note", "text": f"worker {loss.place}: {words}"})

    def end(self) -> dict[str, Any]:
        """The summary, with the test accuracy of the last round's checkpoint. Raises WorkerError if no worker
        finished the run."""
        for step in sorted(self._open):
            # The last report of a round comes from the members that completed it.
            self._round(list(self._open.pop(step).values())[-1])
        self._commit()
        if not self.over or self._record is None:
            # Sorted by place: workers that end at the same time are seen in any order.
            newest = sorted(self._pending[-NAMED:], key=lambda loss: loss.place)
            last = "; ".join(f"worker {loss.place} {loss.words}" for loss in newest)
            raise WorkerError(
                f"no worker is left after round {self._newest} ({last or 'all have ended'}); "
                f"{how_to_go_on(self._run_dir)}"
            )
        for loss in self._pending:  # these were lost after the last change of members
            self.faults += loss.lost
            words = f"worker {loss.place} {loss.words}; it was in no round at that time"
            self._notify({"type": "note", "text": words})
        return self._record.finish(
            test_accuracy=self._accuracy(), run_dir=str(self._run_dir), workers_lost=self.faults
        )

    def _accuracy(self) -> float:
        """The portion of the test set that the model of the last round's checkpoint classifies correctly. Raises
        PacelineError if that checkpoint is missing or damaged."""
        data, parts = datasets.load(self._config.data), self._kept.load()
        if parts is None or parts["pace"]["rounds"] <= self._newest:
            raise PacelineError(
                f"the checkpoint of the last round in {self._run_dir} is missing or damaged, so its model cannot be "
                f"tested; {how_to_go_on(self._run_dir)}"
            )
        model = models.create(self._config.model, data.shape, data.classes)
        model.load_state_dict(parts["model"])
        return images.evaluated(model, data)[1]

    def close(self) -> None:
        """Close the record, and delete the checkpoints that are ahead of it."""
        for _, prepared in self._prepared:
            prepared.unlink(missing_ok=True)
        if self._record is not None:
            self._record.close()

    def _start(self, event: Event) -> None:
        if self._record is None:
            facts = self._config.as_dict() | {"engine": "torch"}
            keep = event["first"] if self._resume else None
            self._newest = event["first"] - 1
            self._record = Recorder.create(self._run_dir, facts, resume=keep)
            self._notify(event)

    def _changed(self, mended: Mended) -> None:
        """Note a change of members when the first member reports it."""
        if mended.membership <= self._epoch:
            return
        before, self._members, self._epoch = self._members, mended.members, mended.membership
        words = self._events.setdefault(mended.step, [])
        for loss in self._pending:
            self.faults += loss.lost
            words.append(f"worker {loss.place} {loss.words}")
        self._pending = []
        if before:
            words += [f"worker {place} joined" for place in mended.members if place not in before]

    def _commit(self) -> None:
        """Commit the checkpoints whose rounds are all on record, so that none is ahead if this process is killed."""
        while self._record is not None and self._prepared and self._prepared[0][0] <= self._newest + 1:
            self._record.sync()
            self._kept.commit(self._prepared.pop(0)[1])

    def _round(self, event: Event) -> None:
        result: RoundResult = event["result"]
        if result.step <= self._newest or self._record is None:
            return
        self._newest = result.step
        steps = sorted(step for step in self._events if step <= result.step)
        happened = [words for step in steps for words in self._events.pop(step)]
        costs = self._costs.of(result.seconds, happened)
        for each in costs:
            self._notify({"type": "note", "text": _sentence(each["what"], result, each["seconds_lost"])})
        self._record.append(result, costs)
        self._notify(event)


def how_to_go_on(run_dir: Path) -> str:
    """Advice on how to continue from what the run has written so far."""
    if (run_dir / CHECKPOINT).exists():
        return f"continue from the last checkpoint with --resume {run_dir}"
    if (run_dir / CONFIG).exists():
        return f"there was no checkpoint yet: start the run from its beginning with --resume {run_dir}"
    return "nothing of the run was written yet: start it again"


def _sentence(words: str, result: RoundResult, late: float) -> str:
    """A sentence on an event in a round, for people."""
    if words.endswith("joined"):
        return f"{words} at round {result.step}"
    ran = ", ".join(str(place) for place, load in enumerate(result.loads.tolist()) if load)
    return (
        f"{words} in round {result.step}; {late:.2f} s lost; no sample lost: the round's {result.batch} were run by "
        f"worker {ran}"
    )
