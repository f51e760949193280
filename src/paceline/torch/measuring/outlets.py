"""Where else the finished rounds of ``Pace`` go: see ``paceline.runs.sinks``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.runs import sinks
from paceline.torch.measuring.open_rounds import RoundResult


class Outlets:
    """Sends each finished round to sinks. One that fails is told of once and left out: no training ends for it."""

    def __init__(self, asked: Sequence[str], place: Path, config: Mapping[str, Any]) -> None:
        self._sinks: dict[str, sinks.Sink] = {}
        try:
            for text in asked:
                self._sinks[text] = sinks.create(text, place, config)
        except PacelineError:
            self.close()
            raise

    @property
    def where(self) -> list[str]:
        """Where the rounds go, a line for each sink."""
        return [sink.where for sink in self._sinks.values()]

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
        """Send what is still held. Safe to call twice."""
        for text, sink in list(self._sinks.items()):
            del self._sinks[text]
            try:
                sink.close()
            except Exception as error:
                warnings.warn(f"{text} failed at its end: {error}", stacklevel=2)


def asked(report_to: str | Sequence[str], metrics_port: int | str | None) -> list[str]:
    """The sinks that ``Pace`` is told of. Raises PacelineError for what is neither a name nor a port."""
    names = [report_to] if isinstance(report_to, str) else list(report_to)
    if not all(isinstance(name, str) and name for name in names):
        raise PacelineError(
            f"report_to={report_to!r}: expected names of sinks, such as wandb or mlflow:uri=mlruns"
        )
    if metrics_port is not None:
        host, _, port = str(metrics_port).rpartition(":")
        if not port.isdecimal():
            raise PacelineError(
                f"metrics_port={metrics_port!r}: expected a port, or HOST:PORT such as 0.0.0.0:9100"
            )
        names.append(f"prometheus:port={port}" + (f",host={host}" if host else ""))
    return names
