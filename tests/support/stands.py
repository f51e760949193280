"""A worker for launchers and keepers that is no process."""

from __future__ import annotations

from paceline.torch.elastic.messages import Where


class Stands:
    """A worker that does nothing until it is told to."""

    def __init__(self, where: Where) -> None:
        self.where, self.over, self.told, self.pid = where, None, list[str](), None

    def poll(self) -> int | None:
        return self.over

    def kill(self) -> None:
        self.told.append("kill")
        self.over = -9

    def terminate(self) -> None:
        self.told.append("leave")
