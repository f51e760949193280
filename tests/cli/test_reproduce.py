import json

import pytest
import typer
from typer.testing import CliRunner

from paceline import PacelineError
from paceline.cli import reproduce
from paceline.papers import PAPERS, REQUIRED, experiments, figure, write


def run(*arguments):
    app = typer.Typer()
    app.command()(reproduce.command)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_list_names_every_paper_and_experiment():
    shown = run("--list").stdout
    for paper in PAPERS:
        assert f"{paper}: {', '.join(experiments(paper))}" in shown


def test_an_experiment_writes_its_picture_table_and_result(tmp_path):
    pytest.importorskip("cvxpy")
    result = run("coded", "fig4", "--quick", "--out", tmp_path)
    assert result.exit_code == 0, result.exception
    assert sorted(f.name for f in tmp_path.iterdir()) == ["fig4.csv", "fig4.json", "fig4.png"]
    told = json.loads((tmp_path / "fig4.json").read_text())
    assert set(REQUIRED) <= set(told)
    assert told["ours"] in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nobody"], "expected one of"),
        (["coded", "fig99"], "fig99"),
        ([], "no paper named"),
        (["coded", "--out", "/dev/null/x"], "cannot make the folder"),
    ],
)
def test_bad_requests_are_refused(arguments, says):
    result = run(*arguments)
    assert isinstance(result.exception, PacelineError)
    with pytest.raises(PacelineError, match=says):
        raise result.exception


def test_a_result_must_tell_why(tmp_path):
    with pytest.raises(PacelineError, match="lacks why"):
        write(tmp_path, "x", figure(), [], {"claim": "", "ours": "", "setting": "", "command": ""})
    assert not list(tmp_path.iterdir())
