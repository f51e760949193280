"""Whatever numbers a record holds, everything made from it is made, without a warning and without a NaN."""

import json
import re
import warnings

import numpy as np
import pytest

from paceline.runs import report, summarize, trace
from paceline.runs.findings import compare, findings
from support.any_run import any_run


@pytest.mark.parametrize("seed", range(40))
def test_any_record(seed, tmp_path):
    random = np.random.default_rng(seed)
    one, other = any_run(random, tmp_path / "one"), any_run(random, tmp_path / "other")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        json.dumps(summarize(one), allow_nan=False)
        texts = [*findings(one), *compare([one, other]), report.render(one)]
        texts.append(report.render_comparison([one, other]))
        json.dumps(list(trace._events(one, 1, "one")), allow_nan=False)
    for text in texts:
        assert not re.search(r"\b(nan|inf|None)\b", re.sub(r'base64,[^"]*', "", text))
