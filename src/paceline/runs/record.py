"""Writes the record of a run: one line per round, on disk before the next round starts."""

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
from paceline.rounds import RoundResult
from paceline.runs.run import CONFIG, ROUNDS, SUMMARY, fault, read, waits, with_checksum
from paceline.runs.summary import summarize

PerWorker = Sequence[float | None] | np.ndarray


class Recorder:
    """Appends to one run directory; made by ``create``, closed by ``close`` or the end of a ``with`` block.

    Only one process of a run may have a recorder.

    Args:
        run_dir: The run's directory.
        before: Seconds that earlier parts of the run took.
        sum: Checksum of the record's last line.
    """

    def __init__(self, run_dir: Path, before: float, sum: str = "") -> None:
        self.run_dir = run_dir
        self._before = before  # seconds that earlier parts of the run took
        self._sum = sum  # checksum of the last line
        self._finished = False
        self._origin: float | None = None  # when the first round that ``append`` wrote began
        # Unbuffered: the lines that ``round`` wrote survive any end of the process.
        self._file = (run_dir / ROUNDS).open("ab", buffering=0)

    @classmethod
    def create(
        cls, run_dir: str | os.PathLike[str], config: Mapping[str, Any], resume: int | None = None
    ) -> Recorder:
        """Start a run directory, or continue one from round ``resume``.

        Args:
            run_dir: A new directory, or one to continue.
            config: What the run is, for run.json: policy, workers, global_batch, data, model, seed, engine, ...; the
                version and the time of the start are added. On resuming, the first configuration stays and this one
                is appended to its list ``resumed``.
            resume: The round to continue from, as the checkpoint has it; the record from there on is cut off. None
                for a new run.

        Returns:
            The recorder.

        Raises:
            PacelineError: If the directory exists (without resume), is not a run directory or cannot be written; then
                nothing is changed.
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
        """Append one round. A duration below 0, as after a clock was set back, counts as 0.

        Args:
            round: Counted from 0 over the whole run, resumed parts included.
            epoch: Counted from 0 over the whole run.
            time: Seconds from the start of this part of the run to the end of the round; the recorder adds the
                seconds of earlier parts.
            seconds: Wall seconds of the round.
            batch: Samples whose gradients entered the step.
            loads: Samples that each worker ran, shape (n,).
            compute: Seconds that each worker computed, its wait excluded, shape (n,); None or NaN if absent.
            overhead: The part of ``compute`` that does not grow with the load, shape (n,); default 0.
            shares: The next round's plan, shape (n,).
            loss: Mean over the batch, before the step.
            extras: Other fields with JSON values (pieces, quorum, staleness, dropped, events).

        Raises:
            PacelineError: If the line cannot be written, or would be invalid when read (a negative load, lists of
                different lengths).
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
            "wait": waits(seconds, spent),  # for other programs: ``read`` computes it
            "shares": shares,
            "loss": loss,
        }
        whole = plain(line | extras)
        if wrong := fault(whole):
            raise PacelineError(f"cannot record round {int(round):,}: it {wrong}")
        written, found = with_checksum(json.dumps(whole, separators=(",", ":"), allow_nan=False), self._sum)
        data, start = memoryview(written), os.fstat(self._file.fileno()).st_size
        if self._finished:  # the summary is of fewer rounds
            self._finished = False
            (self.run_dir / SUMMARY).unlink(missing_ok=True)
        with self._saying():
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file.fileno(), start)  # half a line would damage the next line
                raise
        self._sum = found

    def append(self, result: RoundResult, events: Sequence[Any] = ()) -> None:
        """Append a finished round of a training engine.

        Args:
            result: The round, as callbacks get it.
            events: What happened in it, as JSON values.

        Raises:
            PacelineError: As ``round`` does.
        """
        if self._origin is None:
            self._origin = result.ended - result.seconds
        rare = ("parts", "ran_out", "links", "dropped_loads")
        self.round(
            round=result.step,
            epoch=result.epoch,
            time=result.ended - self._origin,
            seconds=result.seconds,
            batch=result.batch,
            loads=result.loads.tolist(),
            compute=result.compute,
            overhead=result.overhead,
            shares=result.shares,
            loss=result.loss,
            **({} if result.within is None else result.within._asdict()),
            **{name: value.tolist() for name in rare if (value := getattr(result, name)) is not None},
            **({"events": list(events)} if events else {}),
        )

    def sync(self) -> None:
        """Flush the record to the disk itself, as needed before a checkpoint, which must not outlive its rounds."""
        with self._saying():
            os.fsync(self._file.fileno())

    def _saying(self) -> AbstractContextManager[None]:
        return saying(f"cannot write {self._file.name}", "free some disk space and resume")

    def finish(self, **fields: Any) -> dict[str, Any]:
        """Write summary.json: the summary of the record, updated by ``fields``.

        Args:
            fields: Further figures (test_accuracy, ...).

        Returns:
            The content of summary.json.
        """
        self.sync()  # a summary must not outlive its rounds
        summary = summarize(read(self.run_dir)) | fields
        write_whole(self.run_dir / SUMMARY, _json(summary) + "\n")
        self._finished = True
        return summary

    def close(self) -> None:
        """Call ``sync`` and close the file; further calls do nothing."""
        if not self._file.closed:
            with self._file:
                self.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut(run_dir: Path, config: dict[str, Any], keep: int) -> tuple[float, str]:
    """Cut a record back to its rounds below ``keep``; returns their seconds and the last line's checksum."""
    run = read(run_dir)
    kept = int(np.searchsorted(run.round, keep))
    (run_dir / SUMMARY).unlink(missing_ok=True)  # it includes rounds that are cut off
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
    """Durations as floats in the range that a record may hold; NaN stays."""
    return np.clip(np.array(values, np.float64), 0.0, costs.MOST)


def _json(value: Any) -> str:
    return json.dumps(plain(value), indent=2, allow_nan=False)


def plain(value: Any) -> Any:
    """A value ready for JSON: named tuples become objects, numpy values Python's, NaN and infinities null."""
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
