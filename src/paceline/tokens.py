"""Secrets: one token that all participants share, and one secret for each worker of the service.

Only digests are stored if that is enough. The secrets are long and random, so a plain digest cannot be reversed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from paceline import files
from paceline.errors import PacelineError, saying

TOKEN = "PACELINE_TOKEN"  # the environment variable that may hold it
LEAST = 16  # characters of a token or secret that a person chose


def fresh() -> str:
    """A new secret of 256 bits."""
    return secrets.token_urlsafe(32)


def digest(secret: str) -> str:
    """The SHA-256 of a secret in hex, which is stored in its place."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def matches(secret: str, kept: str) -> bool:
    """Whether the digest is that of this secret, compared in constant time."""
    return hmac.compare_digest(digest(secret), kept)


def checked(token: str, what: str = "the token", instead: str = "") -> str:
    """A token that a person chose. Raises PacelineError if it is too short or does not fit into an HTTP header.

    what, instead: how the message begins, and the advice at its end."""
    if len(token) < LEAST or not token.isascii() or not token.isprintable() or " " in token:
        raise PacelineError(
            f"{what} has {len(token)} characters: expected {LEAST} or more, of ASCII and without spaces{instead}"
        )
    return token


def read(path: Path) -> str | None:
    """The token in a file, None if there is no such file. Raises PacelineError if it can't be used."""
    with saying(f"cannot read the token in {path}"):
        try:
            token = files.read(path, files.SMALL).decode().strip()
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            raise PacelineError(f"cannot read the token in {path}: it is not text") from error
    return checked(token, f"the token in {path}", "; write one there, or delete the file")


def kept_in(path: Path, otherwise: str = "choose another --token-file") -> str:
    """The token in a file; if there is none, a new one is written there, readable by the owner alone.

    otherwise: advice for the message if it cannot be written. Raises PacelineError."""
    if (kept := read(path)) is not None:
        return kept
    part = files.part_of(path)
    with saying(f"cannot write the token to {path}", otherwise):
        try:
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(fresh() + "\n")
                file.flush()
                os.fsync(file.fileno())
            files.place_first(part, path)
        finally:
            part.unlink(missing_ok=True)
    kept = read(path)  # another process may have been first
    if kept is None:
        raise PacelineError(f"cannot write the token to {path}: it cannot be read back; {otherwise}")
    return kept
