"""A rendezvous whose members do not come."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist

from paceline.torch.elastic import link
from paceline.torch.elastic.messages import BEAT, COMES, MembershipEpoch, Signer, Where, WorkerId
from paceline.torch.elastic.supervisor import _store
from support.guarantees import guarantee

SIGNER = Signer("secret")
EPOCHS = [MembershipEpoch(number, (WorkerId(0, 0), WorkerId(1, 1)), True) for number in range(2)]


class Waiting(link.LauncherLink):
    """Worker 0, who alone comes to the first epoch. While it looks who has come, worker 1 gives heartbeats if it is
    among ``living``, and the launcher publishes the next epoch, which ends the wait."""

    def __init__(self, store: dist.TCPStore, living: tuple[int, ...]) -> None:
        self.launcher, self.living = store, living
        super().__init__(Where("127.0.0.1", store.port, 0, 0, 2, SIGNER.secret))

    def posted(self, key: str) -> bool:
        for ident in self.living:
            self.launcher.add(BEAT(ident), 1)
        publish(self.launcher, 1)
        return super().posted(key)


def publish(store: dist.TCPStore, number: int) -> None:
    key = f"membership/{number}"
    store.set(key, SIGNER.signed(key, EPOCHS[number]))
    store.set(COMES(number, 0), "")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    monkeypatch.setattr(link, "LATE_SECONDS", 0.2)
    store = _store(0)
    for ident in range(2):
        store.set(BEAT(ident), "0")
    return store


@guarantee(
    "A member of an elastic run that hangs, but gives heartbeats, is named in a warning while the others wait."
)
@pytest.mark.parametrize(
    ("living", "what"),
    [
        (
            (1,),
            "but gives heartbeats: it may be busy with something else, or hang; if it stays so, kill its process",
        ),
        ((), "and gives no heartbeat; the launcher kills one that gives none after --dead-after"),
    ],
)
def test_member_that_does_not_come_is_named_once(
    store: dist.TCPStore, living: tuple[int, ...], what: str
) -> None:
    waiting = Waiting(store, living)
    publish(store, 0)
    named = re.escape(f"worker 1 has not come to the rendezvous of round 3 for 0 s, {what}")
    with pytest.warns(RuntimeWarning, match=named) as warned:
        assert waiting.meet(EPOCHS[0], {"done": 3}, "round 3") is None
    assert len(warned) == 1
    waiting.close()
