"""Plan coded matrix products on uneven workers: who computes how many rows for whom."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Argument, Option

from paceline.cli.output import check_json
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.coded import CodedPlan, Fit


def command(
    workers: Path | None = Argument(
        None, metavar="[WORKERS.csv]", help="Columns master,worker,u,a (per ms, ms per row)."
    ),
    rows: list[str] | None = Option(
        None, help="Rows of every master's matrix, or master=L; may be repeated."
    ),
    assign: str = Option("iterated", help="uniform, simple, iterated, exact or probabilistic."),
    uncoded: bool = Option(False, "--uncoded", help="No redundancy: wait for every worker."),
    json: str | None = Option(None, metavar="FILE|-", help="Write the plan as JSON; - prints it."),
    fit: Path | None = Option(
        None, metavar="TIMES.csv", help="Fit first: columns master,worker,rows,milliseconds."
    ),
    family: str | None = Option(
        None, help="With --fit: shifted-exponential (the default), weibull or empirical."
    ),
    deadline: float | None = Option(
        None, help="Search for loads that are likely to be done by this many ms, instead of the least time."
    ),
    survive: int = Option(0, help="Workers of each master that may be lost, whichever they are."),
    redundancy: float | None = Option(
        None, help="Rows given out, divided by L; 2 with a delivery in 6 messages is a good choice."
    ),
) -> None:
    """Plan coded matrix products on uneven workers: who computes how many rows for whom."""
    from paceline.coded import plan, read_problem, read_times, stretched
    from paceline.coded.deadline import by_deadline, never_done
    from paceline.files import write_whole

    if family is not None and fit is None:
        raise PacelineError(
            f"--family {family} is for measured times: expected --fit TIMES.csv with it; add it, or leave --family "
            "out"
        )
    check_json(json)
    if fit is not None and workers is None:
        family = "shifted-exponential" if family is None else family
        problem, fitted = read_times(fit, _rows(rows), family)
    elif workers is not None and fit is None:
        problem, fitted = read_problem(workers, _rows(rows)), None
    else:
        wanted = "a file WORKERS.csv with columns master,worker,u,a or --fit TIMES.csv"
        raise PacelineError(f"expected either {wanted}")
    made = plan(problem, assign, coded=not uncoded)
    if redundancy is not None or survive:
        if deadline is not None:
            raise PacelineError("--deadline chooses the rows itself: leave out --survive and --redundancy")
        made = stretched(made, redundancy, survive)
    chances = None
    if deadline is not None:
        made, chances = by_deadline(made, deadline)
    for name, never in zip(problem.masters, never_done(made), strict=True):
        if never > 0:
            chance = f"is never done with probability {never:.2g}, when the workers drawn hold too few rows"
            typer.echo(f"warning: master {name!r} {chance}; 'exact' divides no worker", err=True)
    for m, name in enumerate(problem.masters):
        if made.coded and problem.rows[m] < (many := len(made.workers_of(m))):
            few = f"has L = {problem.rows[m]:.0f} for {many} workers: t* is that of fractions of rows, and whole rows"
            typer.echo(f"warning: master {name!r} {few} take longer; plan with fewer workers", err=True)
    text = made.dumps()
    if json == "-":
        typer.echo(text, nl=False)
        return
    if json is not None:
        write_whole(json, text)
    _show(made, fitted)
    if chances is not None:
        for name, chance in zip(problem.masters, chances, strict=True):
            typer.echo(f"{name}: done by {deadline:g} ms with probability {chance:.4f}")


def verdict(made: CodedPlan) -> str:
    """The answer in one sentence."""
    problem, last = made.problem, int(made.t_star.argmax())
    kind = "Coded" if made.coded else "Uncoded"
    redundancy = f", with {made.redundancy.max():.2f} times the rows at most" if made.coded else ""
    who = f"the master {problem.masters[0]}"
    if len(problem.masters) > 1:
        who = f"the last of {len(problem.masters)} masters, {problem.masters[last]},"
    return (
        f"{kind} plan {made.assign}: {who} is expected to be done after "
        f"t* = {made.t_star[last]:.6g} ms{redundancy}."
    )


def explained(made: CodedPlan) -> str:
    """Sentences on the meaning of t*, L and the redundancy in this plan."""
    if "by deadline" in made.assign:
        what = "t* is the deadline"
    elif made.coded:
        what = "t* is the time at which the expected number of finished rows reaches L"
    else:
        what = "t* is the mean time until all workers of a master are done"
    text = f"{what}. L is the number of rows that a master needs."
    if not made.coded:
        return text
    lost = [f"{name} {most}" for name, most in zip(made.problem.masters, made.may_lose.tolist(), strict=True)]
    return (
        f"{text} The redundancy is the number of rows given out, divided by L. "
        f"Workers that may be lost, whichever they are: {', '.join(lost)}."
    )


def _rows(given: list[str] | None) -> dict[str, float]:
    """Rows by master; the key "" means all other masters."""
    if not given:
        raise PacelineError("no rows: give --rows L for every master, or --rows master=L for each")
    wanted: dict[str, float] = {}
    for item in given:
        name, _, number = item.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            raise PacelineError(f"--rows {item}: expected a whole number, or master=L") from None
        if name in wanted:
            raise PacelineError(
                f"--rows {item}: the rows of {name or 'every master'} are given twice; keep one"
            )
        wanted[name] = value
    return wanted


def _show(made: CodedPlan, fitted: Fit | None) -> None:
    from rich.console import Console

    from paceline import tables
    from paceline.runs import words

    console = Console(highlight=False, soft_wrap=True)
    tables.say(console, verdict(made))
    tables.say(console, explained(made))
    console.print()
    whole, problem = made.rows_assigned, made.problem
    drawn = bool((made.probability[whole > 0] < 1).any())
    last = ("serves with probability",) if drawn else ()
    table = tables.begun("master", figures=("L (rows)", "t* (ms)", "redundancy", "worker", "rows", *last))
    table.columns[4].justify = "left"
    for m, name in enumerate(problem.masters):
        about = (name, f"{problem.rows[m]:,.0f}", f"{made.t_star[m]:.6g}", f"{made.redundancy[m]:.2f}")
        for i, n in enumerate(made.workers_of(m)):
            row = about if i == 0 else ("", "", "", "")
            chance = (words.percent(made.probability[m, n]),) if drawn else ()
            table.add_row(*row, problem.workers[n], f"{whole[m, n]:,}", *chance)
    tables.print_whole(console, table)
    if fitted is not None and fitted.standard_errors:
        console.print("\nThe fitted parameters, with their standard errors:")
        errors = tables.begun("master", "worker", figures=tuple(fitted.standard_errors))
        for m, name in enumerate(problem.masters):
            for n, worker in enumerate(problem.workers):
                cells = [
                    f"{getattr(fitted.delay, p)[m, n]:.5g} ± {error[m, n]:.2g}"
                    for p, error in fitted.standard_errors.items()
                ]
                errors.add_row(name, worker, *cells)
        tables.print_whole(console, errors)
