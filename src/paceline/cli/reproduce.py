"""Run a paper's experiments again and set our figures beside the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    paper: Annotated[str | None, typer.Argument(help="The paper; --list shows them.")] = None,
    names: Annotated[
        list[str] | None, typer.Argument(help="Its experiments; all where none is named.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for NAME.png, NAME.csv and NAME.json.")] = Path(
        "reproduced"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer repetitions: minutes become seconds.")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="Name the papers and their experiments.")] = False,
) -> None:
    """Run a paper's experiments again and set our figures beside the paper's."""
    from paceline.errors import PacelineError, among
    from paceline.papers import PAPERS, experiments

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
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PacelineError(
            f"cannot make the folder {out}: {error.strerror}; choose another with --out"
        ) from error
    for name in names or known:
        result = known[name](out, quick)
        typer.echo(f"{name}")
        typer.echo(f"  paper: {result['claim']}")
        typer.echo(f"  ours:  {result['ours']}")
        typer.echo(f"  why:   {result['why']}")
        typer.echo(f"  files: {out / name}.png, .csv, .json")
