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
