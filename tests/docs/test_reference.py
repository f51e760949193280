"""What is public is said once, in ``__all__``, and the build of the site stops where the reference has a hole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.blocks import ROOT

pytestmark = pytest.mark.xdist_group("site")

GUARANTEES = ("A public name or method without a docstring stops the build of the site.",)


HOLES = [
    (
        "src/paceline/options.py",
        '"""',
        '__all__ = ["bare"]\n\n\ndef bare() -> None:\n    return\n\n\n"""',
        "paceline.options.bare is public and has no docstring",
    ),
    (
        "src/paceline/client.py",
        '        """Take part from the next plan on."""\n',
        "",
        "paceline.client.Worker.join is public and has no docstring",
    ),
    (
        "docs/training.md",
        "\n",
        "\n```python\nfrom paceline.balancer import Balancer\n```\n",
        "docs/training.md imports paceline.balancer.Balancer, which no __all__ says to be public",
    ),
]


def test_build_stops_and_names_each_undocumented_name_method_and_import(tmp_path: Path) -> None:
    for part in ("src", "docs", "examples", "README.md", "mkdocs.yml"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    for file, old, new, _ in HOLES:
        text = (tmp_path / file).read_text(encoding="utf-8")
        assert old in text
        (tmp_path / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=tmp_path, capture_output=True, text=True, timeout=500, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode != 0
    assert [sentence for *_, sentence in HOLES if sentence not in done.stderr] == []
    assert not (tmp_path / "site").exists()
