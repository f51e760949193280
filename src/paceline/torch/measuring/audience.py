"""The listeners of each finished round, besides the policy and the user's own function."""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import PacelineError
from paceline.rounds import RoundResult
from paceline.runs import sinks
from paceline.torch import peers
from paceline.torch.measuring.recorder import record_run


class _Listener(Protocol):
    def round(self, result: RoundResult, /) -> None: ...

    def close(self) -> object: ...


class Audience:
    """The run's record and sinks, on rank 0; the garbage collector, on all ranks. See ``Pace`` for their options.

    listeners: the list to which each of them adds its function. facts: policy, workers and global batch of the run.
    Collective. Raises PacelineError, on every rank, if a record or a sink cannot be begun.
    """

    def __init__(
        self,
        listeners: list[Callable[[RoundResult], None]],
        facts: dict[str, Any],
        *,
        record: str | Path | None,
        sinks: Sequence[str],
        collect_every: int | None,
    ) -> None:
        self._members: list[_Listener] = []
        self._listeners = listeners
        if record is not None:
            self._add(peers.on_rank_0(lambda: record_run(record, **facts)))
        if sinks:
            self._add(peers.on_rank_0(lambda: Outlets(sinks, Path(record or "training"), facts)))
        if collect_every is not None:  # last: it changes the process, and the others may raise
            self._add(Collecting(collect_every))

    def _add(self, member: _Listener | None) -> None:
        """Add a listener; None if it belongs to another rank."""
        if member is not None:
            self._members.append(member)
            self._listeners.append(member.round)

    def close(self) -> None:
        """Finish the record, send what is buffered, and collect garbage by count again. Safe to call twice."""
        members, self._members = self._members, []
        for member in members:
            member.close()


class Collecting:
    """Runs Python's garbage collection in the same rounds on all ranks: one pause that all take together, instead of
    one that each rank takes when its own count is full, while the others wait for it.

    Turns automatic collection off, and collects after every k-th round, until ``close``.
    """

    def __init__(self, every: int) -> None:
        self._every, self._automatic = every, gc.isenabled()
        self._collected = -math.inf
        gc.collect()
        gc.disable()

    def round(self, result: RoundResult) -> None:
        """A round is over on every rank, and the next has not begun."""
        if (result.step + 1) % self._every == 0 and not result.ended < self._collected:
            gc.collect()
            self._collected = time.perf_counter()  # once for short rounds that are settled together

    def close(self) -> None:
        """Collect by count again, if that was so before. Safe to call twice."""
        if self._automatic:
            gc.enable()


class Outlets:
    """Sends each finished round to sinks. A sink that fails is warned about once and removed; training goes on."""

    def __init__(self, asked: Sequence[str], place: Path, config: Mapping[str, Any]) -> None:
        self._sinks: dict[str, sinks.Sink] = {}
        try:
            for text in asked:
                self._sinks[text] = sinks.create(text, place, config)
        except PacelineError:
            self.close()
            raise

    def round(self, result: RoundResult) -> None:
        """Send one round."""
        for text, sink in list(self._sinks.items()):
            try:
                sink.round(
                    round=result.step,
                    seconds=result.seconds,
                    batch=result.batch,
                    loads=result.loads.tolist(),
                    compute=result.compute,
                    loss=result.loss,
                )
            except Exception as error:
                del self._sinks[text]
                warnings.warn(f"nothing more is sent to {text}, which failed: {error}", stacklevel=2)

    def close(self) -> None:
        """Send what is still buffered. Safe to call twice."""
        for text, sink in list(self._sinks.items()):
            del self._sinks[text]
            try:
                sink.close()
            except Exception as error:
                warnings.warn(f"{text} failed at its end: {error}", stacklevel=2)


def asked(report_to: str | Sequence[str], metrics_port: int | str | None) -> list[str]:
    """The sinks that these options of ``Pace`` name. Raises PacelineError for what is neither a name nor a port."""
    names = [report_to] if isinstance(report_to, str) else report_to
    if not isinstance(names, Sequence) or not all(isinstance(name, str) and name for name in names):
        raise PacelineError(
            f"report_to={report_to!r}: expected names of sinks, such as wandb or mlflow:uri=mlruns"
        )
    if metrics_port is not None:
        host, _, port = str(metrics_port).rpartition(":")
        if not port.isdecimal():
            raise PacelineError(
                f"metrics_port={metrics_port!r}: expected a port, or HOST:PORT such as 0.0.0.0:9100"
            )
        names = [*names, f"prometheus:port={port}" + (f",host={host}" if host else "")]
    return list(names)
