"""Faults at named instants of a run whose ranks may be lost: each worker looks for an order at each of them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.torch import claims
from paceline.torch.elastic import buckets, group, handover, link, member, recovery
from paceline.torch.elastic.supervisor import Supervisor
from support.elastic_runs import REST, Fault, Plan, Told

# Instants of a usual round, of a change of members, and in the life of one that joins.
ROUND = ("piece", "backward", "sums", "committed", "step")
CLAIMS = ("claiming", "counted")  # where work moves within the round
CHANGE = ("claim", "meeting", "met", "connecting", "connected", "entering")
JOINER = ("start", "meeting", "met", "connecting", "connected", "handed over", "taken", "entering")
BEGINNER = ("registering", "registered", *JOINER[1:])  # from ``register`` on, when it can be told to leave
KINDS = ("kill", "freeze", "thaw", "leave", "fail", "two", "joiner", "joiner freezes", "first", "stall")
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "thaw": signal.SIGSTOP, "leave": signal.SIGTERM}
STALL_SECONDS = 2.0  # that the launcher stands still
PATIENCE = 4.0  # seconds until an order whose instant has not come is taken back


class Orders:
    """A worker's part: carries out what its file says when the instant comes that it names."""

    def __init__(self, out: Path, ident: int, say: Callable[..., None]) -> None:
        self._path, self._say = out / f"order-{ident}", say

    def at(self, phase: str) -> bool:
        """This instant has come. True where what is under way is to fail."""
        if not self._path.exists():
            return False
        try:
            order = json.loads(self._path.read_text())
        except OSError:
            return False  # it was taken back
        if order["phase"] != phase:
            return False
        if order["after"]:
            order["after"] -= 1
            write(self._path, order)
            return False
        self._path.unlink(missing_ok=True)
        self._say(kind="hit", what=order["kind"], phase=phase, at=time.time())
        if order["kind"] == "fail":
            return True
        os.kill(os.getpid(), SIGNALS[order["kind"]])
        return False

    def watch(self) -> None:
        """From now on all instants are looked at."""
        buckets.FIRST_BYTES, buckets.BYTES = 512, 4096  # several sums a round

        def around(owner: Any, name: str, before: str | None, after: str | None = None) -> None:
            real = getattr(owner, name)

            def watched(*arguments: Any, **named: Any) -> Any:
                if before is not None and self.at(before):
                    return False
                result = real(*arguments, **named)
                if after is not None:
                    self.at(after)
                return result

            setattr(owner, name, watched)

        around(buckets.Buckets, "_start", "backward")
        around(group.Group, "all_done", "sums")
        around(member.Member, "_over", None, "committed")
        around(member.Member, "claim", "claim")
        around(claims.Claims, "take", "claiming")
        around(member.LauncherCounter, "add", None, "counted")
        around(link.LauncherLink, "meet", "meeting", "met")
        around(group, "connect", "connecting", "connected")
        around(link.LauncherLink, "entered", "entering")
        around(recovery, "send", "handed over")
        around(handover.Handover, "register", "registering", "registered")
        around(handover.Handover, "take", "taken")


def write(path: Path, order: dict[str, Any]) -> None:
    """So that the other side sees all of it or nothing."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(order))
    part.rename(path)


def phased(
    out: Path,
    many: int,
    *,
    seed: int = 0,
    kinds: tuple[str, ...] = KINDS,
    dead: float = 0.5,
    phases: tuple[str, ...] = ROUND,
) -> Plan:
    """The run ends some rounds after the last of ``many`` faults at named instants, chosen at random.

    One after the other, each when all members are there and have the model, and at least two of them are let alone:
    a run of which nobody is left who has the model ends.
    """
    chance = random.Random(seed)
    state: dict[str, Any] = {"next": 0.0, "until": 0.0, "seen": set(), "kind": "", "thaw": [], "orders": []}

    def order(ident: int, kind: str, phase: str, after: int = 0) -> None:
        path = out / f"order-{ident}"
        write(path, {"kind": kind, "phase": phase, "after": after})
        state["orders"].append(path)

    def plan(keeper: Supervisor, told: Told, newest: int) -> None:
        now, there = time.monotonic(), keeper.members
        hits = [(who, line) for who, line in told.of("hit")]
        for who, line in hits:
            if (who, line["at"]) in state["seen"]:
                continue
            state["seen"].add((who, line["at"]))
            place = keeper.placed[who] if who in keeper.workers else -1
            told.faults.append(Fault(state["kind"], who, line["at"], place, line["phase"]))
            if line["what"] == "leave":
                keeper.start(told.places[who])
            if line["what"] == "thaw":
                state["thaw"].append((now + dead * chance.uniform(0.7, 1.4), who))
        for when, who in list(state["thaw"]):
            if now >= when:
                state["thaw"].remove((when, who))
                if who in keeper.workers:
                    with suppress(ProcessLookupError):
                        os.kill(keeper.workers[who].process.pid, signal.SIGCONT)  # type: ignore[attr-defined]
        told.places.update(keeper.placed)
        begun = {who for who, _ in told.of("joined")}
        whole = len(there) == keeper._places and {m.ident for m in there} <= begun and newest >= 2
        gone = {who for who, line in hits if line["what"] in ("kill", "freeze", "leave")}
        waits = any(path.exists() for path in state["orders"])
        if waits and now > state["until"]:
            for path in state["orders"]:
                path.unlink(missing_ok=True)
        if not whole or waits or state["thaw"] or gone & {m.ident for m in there}:
            state["next"] = now + 0.1 + 0.1 * chance.random()
            return
        if now < state["next"]:
            return
        if len(told.faults) >= many:
            if not (out / "last").exists():
                write(out / "last", newest + REST)  # type: ignore[arg-type]
            return
        state["orders"] = []
        state["kind"] = kind = chance.choice(kinds)
        state["until"], state["next"] = now + PATIENCE, now + 0.3
        who, other = (m.ident for m in chance.sample(there, 2))
        phase, after = chance.choice(phases), chance.randrange(4)
        if kind in ("kill", "freeze", "thaw", "leave"):
            order(who, kind, phase, after)
        elif kind == "fail":
            order(who, "fail", "sums", after)
        elif kind == "first":
            order(there[0].ident, chance.choice(["kill", "freeze", "leave"]), phase, after)
        elif kind == "two":
            order(
                other,
                chance.choice(["kill", "freeze", "leave"]),
                chance.choice(phases + CHANGE),
                chance.randrange(2),
            )
            order(who, chance.choice(["kill", "kill", "leave"]), phase, after)
        elif kind in ("joiner", "joiner freezes", "joiner leaves", "joiner is killed"):
            what = {"joiner freezes": "freeze", "joiner leaves": "leave"}.get(kind, "kill")
            instants = {"joiner": JOINER, "joiner freezes": JOINER[1:]}.get(kind, BEGINNER)
            order(len(keeper.placed), what, chance.choice(instants))
            order(who, chance.choice(["kill", "leave"]), phase, after)
        else:
            told.faults.append(Fault(kind, -1, time.time(), -1, "any"))
            pid = os.getpid()
            command = f"kill -STOP {pid}; sleep {STALL_SECONDS}; kill -CONT {pid}"
            told.stalls.append(subprocess.Popen(["sh", "-c", command]))
            if chance.random() < 0.5:
                order(who, "kill", phase, after)
            state["next"] = now + STALL_SECONDS + 0.5

    return plan
