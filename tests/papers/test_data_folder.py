"""Where experiments, benchmarks and tests look for traces and data sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import papers


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a checkout without data, in which ``papers`` is."""
    found = tmp_path / "checkout"
    module = found / "src" / "paceline" / "papers" / "__init__.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(papers, "__file__", str(module))
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    return found


def test_data_folder_without_data_is_in_the_checkout(root: Path) -> None:
    assert papers.data_folder() == root / "shared" / "data"


def test_data_folder_beside_the_checkout_is_found(root: Path) -> None:
    beside = root.parent / "shared" / "data"
    beside.mkdir(parents=True)
    assert papers.data_folder() == beside
    (root / "shared" / "data").mkdir(parents=True)
    assert papers.data_folder() == root / "shared" / "data"


def test_data_folder_of_the_variable_comes_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root.parent / "shared" / "data").mkdir(parents=True)
    monkeypatch.setenv("PACELINE_DATA", "/elsewhere")
    assert papers.data_folder() == Path("/elsewhere")
