"""The checks of the pages notice what is wrong: an option that is gone, a file, a language, an indented block."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from support import blocks
from support.shell import Shell, check


@pytest.mark.parametrize(
    "command",
    [
        "paceline fly",
        "paceline train --wings 2",
        "paceline plan workers.csv --rows many",
        "paceline simulate missing.toml",
        "paceline doctor --wings -- torchrun train.py",
        "python benchmarks/missing.py",
        "python benchmarks/within.py --wings",
        "make tea",
        "pip install 'paceline[wings]'",
        "rm -rf /",
    ],
)
def test_wrong_commands(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError):
        check(shlex.split(command))


def test_wrong_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError):
        Shell().run("torchrun --nproc-per-node 2 missing.py")
    with pytest.raises(AssertionError):
        Shell().run("torchrun --nproc-per-node 2 -m paceline train --wings 2")
    with pytest.raises(SystemExit):
        Shell().run("torchrun --wings 2 examples/train_ddp.py")


def test_blocks_that_no_test_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("Text\n\n    indented\n\n```\nnothing\n```\n\n```ruby\nputs 1\n```\n")
    assert [each.split(":")[1] for each in blocks.complaints(page)] == ["3", "5", "9"]
    script = '```python title="lonely.py"\npass\n```\n'
    page.write_text(script)
    assert "lonely.py is written, and no command runs it" in blocks.complaints(page)[0]
    page.write_text(script + "\n```bash\ntorchrun --nproc-per-node 2 \\\n  lonely.py\n```\n")
    assert blocks.complaints(page) == []


def test_python_fails_where_it_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\na = 1\n```\n\nthen\n\n```python\nassert a == 2\n```\n")
    first, second = blocks.document(page)
    first.evaluate()
    with pytest.raises(AssertionError):
        second.evaluate()
