"""The record of a run as it is written: one line a round, on disk before the next round starts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np

import paceline
from paceline import costs
from paceline.errors import PacelineError, saying
from paceline.files import write_whole
from paceline.runs.run import CONFIG, ROUNDS, SUMMARY, fault, read, seal, waits
from paceline.runs.summary import summarize

PerWorker = Sequence[float | None] | np.ndarray


class Recorder:
    """Appends to one run directory; made by ``create``, ended by ``close`` or the end of a ``with``.

    Only one process of a run may hold one.
    """

    def __init__(self, run_dir: Path, before: float, sum: str = "") -> None:
        self.run_dir = run_dir
        self._before = before  # seconds that an earlier part of the run took
        self._sum = sum  # of the last line
        self._finished = False
        # Unbuffered: what ``round`` wrote outlives the process, however it ends.
        self._file = (run_dir / ROUNDS).open("ab", buffering=0)

    @classmethod
    def create(
        cls, run_dir: str | os.PathLike[str], config: Mapping[str, Any], resume: int | None = None
    ) -> Recorder:
        """Start a run directory, or with ``resume`` go on with one from round ``resume``.

        config: what the run is: policy, workers, global_batch, data, model, seed, engine, ...; the version
            and the time of the start are added. On resuming, the first configuration stays and this one
            joins its list ``resumed``.
        resume: the round to go on from, as the checkpoint has it; the record from there on is cut off.

        Raises PacelineError when the directory exists (without resume), is no run or
        cannot be written; nothing is changed then.
        """
        run_dir = Path(run_dir)
        stamp = {"version": paceline.__version__, "started": datetime.now(UTC).isoformat(timespec="seconds")}
        with saying(f"cannot write the run directory {run_dir}", "choose another"):
            if resume is not None:
                return cls(run_dir, *_cut(run_dir, stamp | dict(config), resume))
            if run_dir.is_dir() and any(run_dir.iterdir()):
                raise PacelineError(
                    f"run directory {run_dir} exists; choose another, or resume the run in it"
                )
            run_dir.mkdir(parents=True, exist_ok=True)
            write_whole(run_dir / CONFIG, _json(stamp | dict(config)) + "\n")
            return cls(run_dir, 0.0)

    def round(
        self,
        *,
        round: int,
        epoch: int,
        time: float,
        seconds: float,
        batch: int,
        loads: PerWorker,
        compute: PerWorker,
        overhead: PerWorker | None = None,
        shares: PerWorker | None = None,
        loss: float | None = None,
        **extras: Any,
    ) -> None:
        """Append one round.

        round, epoch: counted from 0 over the whole run, resumed parts included.
        time: seconds since this part of the run started, at the end of the round; the record adds what
            earlier parts took.
        seconds: wall seconds of the round.
        batch: samples whose gradients entered the step.
        loads: samples that each worker ran, shape (n,).
        compute: seconds that each computed, its wait excluded, shape (n,); None or NaN if absent.
        overhead: the part of compute that does not grow with the load, shape (n,); default 0.
        shares: the next round's plan, shape (n,).
        loss: mean over the batch, before the step.
        extras: anything else that JSON holds (pieces, quorum, staleness, dropped, events).

        A duration below 0, as of a clock that was set back, counts as 0. Raises PacelineError if the line cannot
        be written, or could not be read again (a negative load, lists of unlike lengths).
        """
        spent = _durations(compute)
        line = {
            "round": int(round),
            "epoch": int(epoch),
            "time": self._before + float(_durations([time])[0]),
            "seconds": float(_durations([seconds])[0]),
            "batch": int(batch),
            "loads": loads,
            "compute": spent,
            "overhead": np.where(np.isnan(spent), np.nan, 0.0) if overhead is None else overhead,
            "wait": waits(seconds, spent),  # for other readers: ours work it out from the two
            "shares": shares,
            "loss": loss,
        }
        whole = plain(line | extras)
        if wrong := fault(whole):
            raise PacelineError(f"round {int(round):,} cannot go on record: it {wrong}")
        written, found = seal(json.dumps(whole, separators=(",", ":"), allow_nan=False), self._sum)
        data, start = memoryview(written), os.fstat(self._file.fileno()).st_size
        if self._finished:  # the summary spoke of fewer rounds
            self._finished = False
            (self.run_dir / SUMMARY).unlink(missing_ok=True)
        with self._saying():
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file.fileno(), start)  # half a line would spoil the one after it
                raise
        self._sum = found

    def sync(self) -> None:
        """Put the record on the disk itself, as before a checkpoint, which must not outlive its rounds."""
        with self._saying():
            os.fsync(self._file.fileno())

    def _saying(self) -> AbstractContextManager[None]:
        return saying(f"cannot write {self._file.name}", "make room and resume")

    def finish(self, **fields: Any) -> dict[str, Any]:
        """Write summary.json: the summary of the record, and ``fields`` (test_accuracy, ...) over it."""
        self.sync()  # a summary must not outlive the rounds that it tells of
        summary = summarize(read(self.run_dir)) | fields
        write_whole(self.run_dir / SUMMARY, _json(summary) + "\n")
        self._finished = True
        return summary

    def close(self) -> None:
        """``sync``, and let go of the file; further calls do nothing."""
        if not self._file.closed:
            with self._file:
                self.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut(run_dir: Path, config: dict[str, Any], keep: int) -> tuple[float, str]:
    """Cut a record back to its rounds below ``keep``; the seconds that they took, and the last one's sum."""
    run = read(run_dir)
    kept = int(np.searchsorted(run.round, keep))
    (run_dir / SUMMARY).unlink(missing_ok=True)  # it speaks of rounds that will be gone
    path, last = run_dir / ROUNDS, b""
    if path.exists():
        with path.open("r+b") as file:
            for _ in range(kept):
                last = file.readline()
            file.truncate(file.tell())
    resumed = [*run.config.get("resumed", []), config | {"round": keep}]
    write_whole(run_dir / CONFIG, _json(run.config | {"resumed": resumed}) + "\n")
    return (float(run.time[kept - 1]), json.loads(last)["sum"]) if kept else (0.0, "")


def _durations(values: PerWorker) -> np.ndarray:
    """As floats that a record may hold; NaN if nothing is known."""
    return np.clip(np.array(values, np.float64), 0.0, costs.MOST)


def _json(value: Any) -> str:
    return json.dumps(plain(value), indent=2, allow_nan=False)


def plain(value: Any) -> Any:
    """For JSON: named tuples as objects, numpy's arrays and numbers as Python's, NaN and infinities as null."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value
