"""The file with the token: written whole or not at all, and a wrong one is named."""

from __future__ import annotations

import resource
import stat
from pathlib import Path

import pytest

from paceline import PacelineError, tokens
from support.guarantees import guarantee


@guarantee(
    "Files that are written beside other threads leave the umask "
    "alone, and a reader sees a whole file or none."
)
def test_token_on_full_disk_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(PacelineError, match=r"cannot write the token to .*token: File too large; choose"):
            tokens.kept_in(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    token = tokens.kept_in(path)
    assert tokens.kept_in(path) == token
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_token_of_two_that_begin_at_once_is_that_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, first = tmp_path / "token", "token-of-the-first-0123"

    def fresh() -> str:
        path.write_text(first + "\n")  # after this one has looked, and before it writes
        return "token-of-the-second-0123"

    monkeypatch.setattr(tokens, "fresh", fresh)
    assert tokens.kept_in(path) == first
    assert list(tmp_path.iterdir()) == [path]


def test_wrong_token_in_a_file_raises_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch()
    with pytest.raises(PacelineError, match=r"the token in .*/token has 0 characters: .*or delete the file"):
        tokens.kept_in(path)
    path.unlink()
    path.symlink_to(tmp_path / "missing")
    with pytest.raises(PacelineError, match=r"cannot write the token to .*: it cannot be read back; choose"):
        tokens.kept_in(path)
