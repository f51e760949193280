"""Every test that docs/guarantees.md names is there."""

from __future__ import annotations

import re

from support.blocks import ROOT

NAMED = re.compile(r"`((?:[\w/]+\.py)?)((?:::\w+)?)`")


def test_the_page_names_tests_that_exist() -> None:
    file, missing, seen = "", [], 0
    for line in (ROOT / "docs" / "guarantees.md").read_text().splitlines():
        for path, name in NAMED.findall(line):
            if path and not path.startswith("benchmarks/"):
                file = path
            if not (path or name) or path.startswith("benchmarks/"):
                continue
            source = ROOT / "tests" / file
            seen += 1
            if not source.is_file() or (name and f"def {name[2:]}(" not in source.read_text()):
                missing.append(file + name)
    assert seen > 50
    assert missing == []
