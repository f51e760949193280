"""Messages of a run: what a launcher tells its workers, and values that carry an HMAC."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
from typing import Any

import pytest

from paceline.errors import PacelineError, WorkerError
from paceline.torch.elastic import messages
from paceline.torch.elastic.messages import (
    BEAT,
    COMES,
    ENDING,
    HAS,
    WHERE,
    MembershipEpoch,
    Signer,
    Unread,
    Where,
    WorkerId,
    settings,
)


def test_launchers_settings_come_back_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    where = Where("10.0.0.7", 2950, 5, 2, 4, "secret")
    ((name, value),) = where.environment().items()
    assert name == "PACELINE_WHERE" == WHERE
    monkeypatch.setenv(name, value)
    assert settings() == where
    monkeypatch.setenv(name, json.dumps(["host", 1, 2, 3, 4]))
    assert settings().secret == ""


@pytest.mark.parametrize("value", [None, "no json", "[1, 2]", "7", '["a", 1, 2, 3, 4, "x", 9]'])
def test_worker_without_a_launchers_settings_raises(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WHERE, raising=False)
    if value is not None:
        monkeypatch.setenv(WHERE, value)
    with pytest.raises(PacelineError, match=r"start the script with python -m paceline.torch.launcher"):
        settings()


def test_membership_epoch_comes_back_from_json() -> None:
    epoch = MembershipEpoch(3, (WorkerId(0, 0), WorkerId(7, 2)), True)
    assert MembershipEpoch.of(json.loads(json.dumps(epoch))) == epoch
    assert epoch.places == (0, 2)
    assert epoch.members[1].ident == 7


def test_signed_value_is_the_hmac_of_key_and_text_and_the_text() -> None:
    """SHA-256 under the secret, over the key, a zero byte and the text, by the standard library's other interface."""
    signer, words = Signer("of the run"), {"done": 3, "ran": [[1, 2]]}
    text = json.dumps(words).encode()
    expected = hmac.new(b"of the run", b"said/1/2\0" + text, hashlib.sha256)
    assert signer.mac("said/1/2", text) == expected.digest()
    signed = signer.signed("said/1/2", words)
    assert signed == expected.hexdigest() + text.decode()
    for raw in (signed, signed.encode(), bytearray(signed.encode())):
        assert signer.verified("said/1/2", raw, "worker 2") == words  # type: ignore[arg-type]
    proof = hmac.new(b"", b"group/1/0/1\0proof", hashlib.sha256).digest()
    assert Signer().mac("group/1/0/1") == proof
    assert Signer().secret == ""


def test_value_of_another_key_secret_or_text_is_refused() -> None:
    signer = Signer("of the run")
    signed = signer.signed("said/1/2", [1, 2])
    other = signed.replace("[1, 2]", "[1, 3]")
    flipped = ("1" if signed[0] == "0" else "0") + signed[1:]
    last = signed[:63] + ("1" if signed[63] == "0" else "0") + signed[64:]
    for key, raw, by in (
        ("said/1/3", signed, signer),
        ("said/1/2", signed, Signer("of another")),
        *(("said/1/2", raw, signer) for raw in (other, flipped, last, signed[:64], signed[1:], "", "[1, 2]")),
    ):
        with pytest.raises(
            WorkerError, match=r"in the run's store, which belongs to worker 2, was not written by it"
        ):
            by.verified(key, raw, "worker 2")


def test_class_that_is_not_read_is_named() -> None:
    for thing, name in ((datetime.date(2020, 1, 2), "datetime.date"), (len, "len")):
        with pytest.raises(Unread, match=f"the state holds {name}, which is not read"):
            messages.unpack(bytes(messages.pack(thing)), "the state")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (BEAT(3), "beat/3"),
        (ENDING(3), "ending/3"),
        (HAS(3), "has/3"),
        (COMES(2, 3), "notice/2/3"),
    ],
)
def test_keys_of_the_store(key: Any, text: str) -> None:
    assert key == text
