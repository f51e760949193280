"""Run a paper's experiments again and set our figures beside the paper's."""

from __future__ import annotations

from pathlib import Path

import typer
from typer import Argument, Option


def command(
    paper: str | None = Argument(None, help="The paper; --list shows them."),
    names: list[str] | None = Argument(None, help="Its experiments; all if none is named."),
    out: Path = Option(Path("reproduced"), help="Folder for NAME.png, NAME.csv and NAME.json."),
    quick: bool = Option(False, "--quick", help="Fewer repetitions: minutes become seconds."),
    listing: bool = Option(False, "--list", help="Name the papers and their experiments."),
) -> None:
    """Run a paper's experiments again and set our figures beside the paper's."""
    from paceline.errors import PacelineError, among, saying
    from paceline.files import check_directory
    from paceline.papers import PAPERS, experiments
    from paceline.simulate.plots import figure

    if listing:
        for each in PAPERS if paper is None else [paper]:
            typer.echo(f"{each}: {', '.join(experiments(each))}")
        return
    if paper is None:
        raise PacelineError(f"no paper named: expected one of {', '.join(PAPERS)}, or --list")
    known = experiments(paper)
    for name in names or ():
        if name not in known:
            raise PacelineError(f"experiment {name!r} of {paper!r}: expected one of {among(name, known)}")
    check_directory(out)
    figure()  # which needs matplotlib
    with saying(f"cannot make the folder {out}", "choose another with --out"):
        out.mkdir(parents=True, exist_ok=True)
    for name in names or known:
        result = known[name](out, quick)
        typer.echo(f"{name}")
        typer.echo(f"  paper: {result['claim']}")
        typer.echo(f"  ours:  {result['ours']}")
        typer.echo(f"  why:   {result['why']}")
        typer.echo(f"  files: {out / name}.png, .csv, .json")
