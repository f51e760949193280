"""Rounds to Trackio."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.runs.sinks.scalars import Sink, missing


@dataclass
class Trackio(Sink):
    """A run in a project of Trackio, which keeps it on this machine (in TRACKIO_DIR).

    project: its name; ``trackio show --project NAME`` opens it.
    """

    project: str = "paceline"
    _run: Any = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        try:
            import trackio
        except ImportError as error:
            raise missing("Trackio", "trackio", error) from error
        plain = {name: value for name, value in self.config.items() if not name.startswith("_")}
        self._run = trackio.init(project=self.project, name=self.place.name, config=plain, embed=False)

    @property
    def where(self) -> str:
        return f"Trackio, project {self.project}: trackio show --project {self.project}"

    def close(self) -> None:
        self._run.finish()

    def _log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)
