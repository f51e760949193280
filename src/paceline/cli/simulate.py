"""``paceline simulate``: how long each policy would take on a cluster that is only described."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from paceline import tables
from paceline.cli.options import Json, options_of
from paceline.cli.output import ProgressDisplay, check_json, console_for, write_json
from paceline.costs import Array
from paceline.errors import PacelineError, saying
from paceline.files import check_directory
from paceline.runs import words
from paceline.runs.words import number
from paceline.simulate import dealt, worth
from paceline.simulate.dealt import COUNT, DealtOutcome
from paceline.simulate.measures import (
    estimate,
    idle_share,
    oracle_ratio,
    regret,
    regret_bound,
    seconds_at,
    to_json,
)
from paceline.simulate.rounds import Outcome, run
from paceline.simulate.scenario import Scenario
from paceline.simulate.toml import of_trace, read
from paceline.train.config import TrainConfig, dashed

if TYPE_CHECKING:
    from paceline.simulate.learning import Learnt

DEFAULT = ("equal", "dolbie", "level", "optimum")
Played = Outcome | DealtOutcome
LEARN = "With --learn"
COORDINATED = ("sync", "backup", "mode", "rate", "lr")  # options of a parameter server
DEFAULT_BY_COST = ("equal", "level", "optimum")


@options_of(TrainConfig, *COORDINATED, "data", "model", panel=LEARN)
def command(
    scenarios: list[Path] | None = Argument(
        None, help="The cluster, as a TOML file, or several of them.", metavar="SCENARIO.toml"
    ),
    trace: Path | None = Option(
        None,
        help="Play recorded speeds instead: round,worker,seconds_per_sample,overhead_seconds",
        metavar="FILE.csv",
    ),
    policy: list[str] | None = Option(
        None, help="NAME or NAME:key=value,...; repeat for several, or give one with --learn."
    ),
    global_batch: int | None = Option(None, help="Samples in each round."),
    rounds: int | None = Option(None, help="How many rounds."),
    realizations: int | None = Option(None, help="Repetitions, each with other random draws."),
    seed: int | None = Option(None, help="Seed of all random draws."),
    fractional: bool | None = Option(
        None, "--fractional/--whole", help="Divide into fractions, or whole samples."
    ),
    decision_delay: int | None = Option(None, help="Rounds by which plans are late."),
    json_: Json = None,
    plot: Path | None = Option(None, help="Draw latency, regret and shares into this folder.", metavar="DIR"),
    verbose: bool = Option(
        False, "--verbose", help="Also show regrets, their bounds and the time of the policies."
    ),
    learn: bool = Option(
        False, "--learn", help="Train for real on the virtual clock; --rounds counts updates."
    ),
    loss: float | None = Option(None, help="Stop at this training loss.", rich_help_panel=LEARN),
    every: str | None = Option(
        None,
        help="Local steps of each worker, merged every 8 (steps), '2 s' or auto; changes the trajectory.",
        rich_help_panel=LEARN,
    ),
    outer: str | None = Option(
        None,
        help="With --every: mean (the default), or nesterov:lr=0.7,momentum=0.9.",
        rich_help_panel=LEARN,
    ),
    **given: Any,
) -> None:
    """Play every policy on the same rounds of a described cluster, or of a recorded trace.

    For example: paceline simulate examples/scenarios/mixed.toml --policy equal --policy level
    """
    changed = {"global_batch": global_batch, "rounds": rounds, "realizations": realizations, "seed": seed}
    changed |= {"fractional": fractional, "decision_delay": decision_delay}
    changes = {name: value for name, value in changed.items() if value is not None}
    training = {"every": every, "outer": outer, "loss": loss} | given
    if not learn and (unused := _first_given(training)):
        raise PacelineError(
            f"--{dashed(unused)} is for training: expected --learn with it; add it, or leave --{dashed(unused)} out"
        )
    playing: dict[str, Any] = {"realizations": realizations, "decision_delay": decision_delay}
    playing |= {"whole" if fractional is False else "fractional": fractional, "verbose": verbose or None}
    if learn and (unused := _first_given(playing)):
        raise PacelineError(
            f"--{dashed(unused)} is for rounds that are played, and --learn trains for real; leave one of them out"
        )
    if outer is not None and every is None:
        raise PacelineError(
            f"--outer {outer} is for merges: expected --every with it; add it, or leave --outer out"
        )
    if bool(scenarios) == (trace is not None):
        raise PacelineError("name SCENARIO.toml files, or one --trace FILE.csv; expected one of the two")
    described = [replace(read(path), **changes) for path in scenarios or ()]  # type: ignore[arg-type]
    if trace is not None:
        described = [of_trace(trace, **changes)]
    if plot is not None:
        from paceline.simulate.plots import figure

        check_directory(plot)
        figure()  # which needs matplotlib
    check_json(json_)
    console = console_for(json_)
    if learn:
        from paceline.simulate.learning import learn as train
        from paceline.simulate.learning import server_config

        if len(policy or ()) > 1:
            raise PacelineError(
                f"--policy was given {len(policy or ())} times; expected it once with --learn"
            )
        if len(described) > 1:
            raise PacelineError(f"{len(described)} scenarios were given; expected one with --learn")
        what = described[0]
        if what.samples:
            raise PacelineError(
                f"{what.name} has [samples], which --learn does not play; leave one of them out"
            )
        config = TrainConfig(**given)
        coordinated = {name: getattr(config, name) for name in COORDINATED}
        by = server_config(what, policy=(policy or ["equal"])[0], **coordinated)
        outer = "mean" if outer is None else outer
        learnt = train(what, by, config.data, config.model, loss, every, outer)
        write_json(json_, _show_learnt(what, learnt, console, plot))
        return
    by_cost = any(what.samples for what in described)
    if by_cost and not all(what.samples for what in described):
        raise PacelineError("some of these scenarios have [samples] and others have not; simulate them apart")
    if by_cost and plot is not None:
        raise PacelineError("--plot draws no scenario with [samples]; leave it out")
    play: Callable[..., Played] = dealt.run if by_cost else run
    outcomes = []
    for what in described:
        names = list(policy or what.policies or (DEFAULT_BY_COST if by_cost else DEFAULT))
        with ProgressDisplay(f"simulating {what.name}") as progress:
            outcomes.append(play(what, names, progress))
    show(console, outcomes, verbose)
    if plot is not None:
        from paceline.simulate import plots

        for outcome, place in zip(outcomes, _places(plot, described), strict=True):
            for path in plots.draw(outcome, place):  # type: ignore[arg-type]  # none of these is by cost
                console.print(f"Picture: {path}")
    figures = [
        (_json_by_cost(each) if isinstance(each, DealtOutcome) else to_json(each))
        | {"verdict": verdict(each)}
        for each in outcomes
    ]
    write_json(json_, figures[0] if len(figures) == 1 else figures)


def _first_given(options: dict[str, Any]) -> str | None:
    """The name of the first of these options that has a value."""
    return next((name for name, value in options.items() if value is not None), None)


def show(console: Console, outcomes: Sequence[Played], verbose: bool) -> None:
    """Print every verdict first, then the heading and the figures of each scenario."""
    for outcome in outcomes:
        name = f"{outcome.scenario.name}: " if len(outcomes) > 1 else ""
        tables.say(console, name + verdict(outcome))
    for outcome in outcomes:
        console.print()
        tables.say(console, heading(outcome.scenario))
        if isinstance(outcome, DealtOutcome):  # each policy by count and by cost
            tables.print_whole(console, _table_by_cost(outcome))
            continue
        tables.print_whole(console, table(outcome))
        if verbose:
            tables.print_whole(console, _details(outcome))
        for sentence in [*worth.of_scenario(outcome.scenario), *(bounds(outcome) if verbose else ())]:
            tables.say(console, sentence)


def _verdict_by_cost(outcome: DealtOutcome) -> str:
    """The verdict of a scenario by cost; the oracle, which knows speeds and costs in advance, is left out."""
    totals = {key: float(each.latency.sum(0).mean()) for key, each in outcome.ways.items()}
    real = [key for key in totals if key[0].split(":")[0] != "optimum"] or list(totals)
    best = min(real, key=lambda key: totals[key])
    usual = min((key for key in real if key[1] == COUNT), key=lambda key: totals[key])
    figures = f"{words.seconds(totals[best])}, {words.percent(outcome.of_bound(*best))} of the bound"
    if best == usual:
        return f"Dividing by cost gains nothing here: {' '.join(best)} takes {figures}."
    gain = words.times(totals[usual] / totals[best])
    return f"{' '.join(best)} takes {figures}, and is {gain} as fast as {' '.join(usual)}."


def _table_by_cost(outcome: DealtOutcome) -> Table:
    """The figures of every policy, divided by count and by cost, the fastest first."""
    figures = ("total (s)", "of the bound", "waiting", "micro-batches")
    shown = tables.begun("policy", "divided", figures=figures)
    for (name, way), each in sorted(outcome.ways.items(), key=lambda item: item[1].latency.sum(0).mean()):
        bound, waiting = words.percent(outcome.of_bound(name, way), 1), words.percent(float(each.wait.mean()))
        shown.add_row(name, way, _spread(each.latency), bound, waiting, f"{each.micro_batches:.1f}")
    return shown


def _json_by_cost(outcome: DealtOutcome) -> dict[str, Any]:
    """All figures, for a file."""
    return {
        "scenario": outcome.scenario.name,
        "bound_seconds": outcome.bound.sum(0).tolist(),
        "policies": [
            {"policy": name, "divided": way, "of_bound": outcome.of_bound(name, way)}
            | {"total_seconds": each.latency.sum(0).tolist(), "waiting": each.wait.tolist()}
            | {"micro_batches": each.micro_batches, "round_seconds": each.latency[:, 0].tolist()}
            for (name, way), each in outcome.ways.items()
        ],
    }


def _show_learnt(scenario: Scenario, learnt: Learnt, console: Console, plot: Path | None) -> dict[str, Any]:
    """Print the result and draw it; returns the figures for JSON."""
    figures = learnt.to_json()
    last, dropped = learnt.updates[-1], figures["gradients_dropped"]
    lost = ", ".join(f"{count} {what}" for what, count in sorted(dropped.items())) or "none"
    local = "every" in figures
    names = ("sync", "backup", "policy", "mode")
    way = ", ".join(str(figures[name]) for name in names)
    if local:
        way = f"local steps merged every {figures['every']} ({figures['outer']}), {figures['policy']}"
    console.print(
        f"{scenario.name}: {scenario.size} workers, batch {scenario.global_batch}; {way}; {figures['model']} on "
        f"{figures['data']}",
        markup=False,
    )
    console.print(
        f"{figures['updates']} {'merges' if local else 'updates'} in {last.ended:.4g} virtual seconds; loss "
        f"{learnt.updates[0].loss:.3f} -> {last.loss:.3f}; test accuracy {words.percent(learnt.test_accuracy, 1)}"
    )
    if local:
        used = (
            f"{figures['gradients_used']} local steps used, lost: {lost}; {min(figures['steps'])} to "
            f"{max(figures['steps'])} of each worker; links took "
            f"{words.percent(figures['link_seconds'] / last.ended)} of the time"
        )
    else:
        used = (
            f"{figures['gradients_used']} gradients used, dropped: {lost}; waited for "
            f"{np.mean([u.quorum for u in learnt.updates]):.1f} of {scenario.size} on average; mean staleness "
            f"{figures['mean_staleness']:.2f}"
        )
    console.print(used)
    if plot is not None:
        console.print(f"Picture: {_draw_learnt(learnt, plot)}")
    return figures


def _draw_learnt(learnt: Learnt, folder: Path) -> Path:
    """learning.png: loss, and gradients waited for (or workers that merged), against virtual time."""
    from paceline.simulate.plots import figure, save

    with saying(f"cannot make the folder {folder}", "choose another"):
        folder.mkdir(parents=True, exist_ok=True)
    picture = figure(2)
    now = [u.ended for u in learnt.updates]
    picture.axes[0].plot(now, [u.loss for u in learnt.updates])
    picture.axes[0].set(xlabel="virtual seconds", ylabel="loss")
    picture.axes[1].plot(now, [u.quorum for u in learnt.updates], drawstyle="steps-post")
    counted = "workers that merged" if "every" in learnt.settings else "gradients waited for"
    picture.axes[1].set(xlabel="virtual seconds", ylabel=counted, ylim=(0, None))
    return save(picture, folder / "learning.png")


def _places(folder: Path, described: list[Scenario]) -> list[Path]:
    """The folder for the pictures of each scenario; the given folder itself if there is only one scenario."""
    if len(described) == 1:
        return [folder]
    names = [re.sub(r"[\W_]", "-", each.name) for each in described]
    return [folder / f"{number}-{name}" for number, name in enumerate(names, 1)]


def verdict(outcome: Played) -> str:
    """The answer in one sentence; the oracle's policy, which knows each round in advance, is left out."""
    if isinstance(outcome, DealtOutcome):
        return _verdict_by_cost(outcome)
    totals = {name: float(played.latency.sum(0).mean()) for name, played in outcome.policies.items()}
    real = [name for name in totals if name.split(":")[0] != "optimum"] or list(totals)
    best = min(real, key=lambda name: totals[name])
    limit = words.times(float(oracle_ratio(outcome.policies[best], outcome).mean()))
    mean = " on average" if outcome.scenario.realizations > 1 else ""
    figures = f"{words.seconds(totals[best])}{mean}, which is {limit} the least possible time"
    if len(real) == 1:
        return f"{best} takes {figures}."
    base = "equal" if "equal" in real else max(real, key=lambda name: totals[name])
    gain = totals[base] / totals[best]
    if best == base or gain < 1.005:
        return f"No policy is faster than {base}: it takes {figures}."
    return f"{best} is the fastest: it takes {figures}, and is {words.times(gain)} as fast as {base}."


def heading(scenario: Scenario) -> str:
    """One line on what was simulated."""
    kind = "fractions" if scenario.fractional else "whole samples"
    times = "1 realization" if scenario.realizations == 1 else f"{scenario.realizations} realizations"
    return (
        f"{scenario.name}: {scenario.size} workers, batch {scenario.global_batch} in {kind}, "
        f"{scenario.rounds} rounds, {times}, seed {scenario.seed}"
    )


def _fastest_first(outcome: Outcome) -> list[tuple[str, Any]]:
    return sorted(outcome.policies.items(), key=lambda item: float(item[1].latency.sum(0).mean()))


def table(outcome: Outcome) -> Table:
    """The figures of every policy, the fastest first; the best possible time is the oracle's."""
    rounds = list(seconds_at(next(iter(outcome.policies.values()))))
    ends = list(dict.fromkeys((rounds[0], rounds[-1])))
    at = (f"round {t} (s)" for t in ends)
    shown = tables.begun("policy", figures=("total (s)", "of best possible", "waiting", *at))
    for name, played in _fastest_first(outcome):
        shown.add_row(
            name,
            _spread(played.latency),
            words.percent(float(1 / oracle_ratio(played, outcome).mean())),
            words.percent(float(idle_share(played).mean())),
            *(number(seconds_at(played)[t].mean) for t in ends),
        )
    return shown


def _details(outcome: Outcome) -> Table:
    """The rounds between the first and the last of ``table``, the regret, and what deciding took."""
    between = list(seconds_at(next(iter(outcome.policies.values()))))[1:-1]
    at = (f"round {t} (s)" for t in between)
    shown = tables.begun("policy", figures=(*at, "regret (s)", "deciding"))
    for name, played in _fastest_first(outcome):
        lost = float(regret(played, outcome)[-1].mean())
        figures = (number(seconds_at(played)[t].mean) for t in between)
        shown.add_row(
            name, *figures, number(lost if lost > 1e-9 else 0.0), words.seconds(played.decide_seconds)
        )
    return shown


def bounds(outcome: Outcome) -> list[str]:
    """Sentences on the bounds that Theorem 1 of DOLBIE gives for the regrets; empty if it does not apply."""
    found = {name: regret_bound(played, outcome) for name, played in outcome.policies.items()}
    return [
        f"The regret of {name} is proven not to exceed {bound.mean():,.0f} s (DOLBIE, Theorem 1)."
        for name, bound in found.items()
        if bound is not None
    ]


def _spread(latency: Array) -> str:
    """The seconds of all rounds as text, mean and deviation over the realizations. latency: shape (T, R)."""
    total = estimate(latency.sum(0))
    return f"{total.mean:.4g}" + (f" ±{total.half:.2g}" if total.half else "")
