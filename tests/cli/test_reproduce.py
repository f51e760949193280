import functools
import json

import pytest

from paceline.papers import PAPERS, experiments
from support.commands import assert_refused, paceline

run = functools.partial(paceline, "reproduce")


def test_list_names_every_paper_and_experiment():
    shown = run("--list").stdout
    for paper in PAPERS:
        assert f"{paper}: {', '.join(experiments(paper))}" in shown


def test_an_experiment_writes_its_picture_table_and_result(tmp_path):
    pytest.importorskip("cvxpy")
    result = run("coded", "fig4", "--quick", "--out", tmp_path)
    assert result.status == 0, result.stderr
    assert sorted(f.name for f in tmp_path.iterdir()) == ["fig4.csv", "fig4.json", "fig4.png"]
    told = json.loads((tmp_path / "fig4.json").read_text())
    assert {"claim", "ours", "why", "setting", "command"} <= set(told)
    assert told["ours"] in result.stdout


def test_fig2_shows_the_printed_seconds_at_a_tenth_of_the_printed_rows(tmp_path):
    """Sun et al., Fig. 2."""
    result = experiments("coded")["fig2"](tmp_path, True)
    printed, short = result["seconds_98"].values()
    for method in ("iterated", "exact", "probabilistic"):
        assert 1.3 < short[method] < 1.55  # 1.40 and 1.38 in the paper; four clusters
        assert printed[method] == pytest.approx(10 * short[method], rel=0.01)
    assert short["exact"] < 0.85 * short["uniform"] < 0.5 * short["uncoded"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nobody"], "expected one of"),
        (["coded", "fig99"], "fig99"),
        ([], "no paper named"),
        (["coded", "--out", "/dev/null/x"], "cannot write /dev/null/x: /dev/null is not a directory"),
    ],
)
def test_bad_requests_are_refused(arguments, says):
    result = run(*arguments)
    assert_refused(result, says)
