"""Actors that outlive their run: the next run takes their processes, which take a second each to start."""

from __future__ import annotations

import ray
from ray.exceptions import RayError

from paceline.ray.shards import Shards
from paceline.ray.worker import Crew

SECONDS = 60.0  # for what an actor is still at


def anew(actor, *arguments):
    """What the actor's class makes of these arguments takes the place of what it has; False where it is dead."""

    def begin(self, *given):
        self.__init__(*given)

    try:
        ray.get(actor.__ray_call__.remote(begin, *arguments), timeout=SECONDS)
    except RayError:
        return False
    return True


class KeptCrew(Crew):
    """Workers; a replacement, and one who joins, is always a new process."""

    spare: list = []  # noqa: RUF012  # of all runs

    def start(self):
        self._begins = True
        try:
            return super().start()
        finally:
            self._begins = False

    def _actor(self, place):
        while self._begins and self.spare:
            actor = self.spare.pop()
            if anew(actor, place, self._program, self._pieces, self._delay):
                self.actors[place] = actor
                return actor.process.remote()
        return super()._actor(place)

    _begins = False

    def close(self):
        self.spare.extend(self.actors.values())
        self.actors.clear()


class KeptShards(Shards):
    """Server actors."""

    spare: list = []  # noqa: RUF012  # of all runs

    def _actor(self, *arguments):
        while self.spare:
            actor = self.spare.pop()
            if anew(actor, *arguments):
                return actor
        return super()._actor(*arguments)

    def close(self):
        self.spare.extend(self.actors)
