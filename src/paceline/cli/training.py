"""Carries out ``paceline train``: launches or joins workers, shows progress, and summarizes. Needs PyTorch."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline import tables
from paceline.cli import startup
from paceline.cli.output import ProgressDisplay, check_json, write_json
from paceline.cli.report import comparison_table
from paceline.commands import example, line
from paceline.data import datasets
from paceline.errors import PacelineError, whole
from paceline.files import allow_open, sweep
from paceline.runs import Run, read, report, trace
from paceline.runs.findings import compare, findings
from paceline.runs.words import plural
from paceline.simulate import worth
from paceline.simulate.whatif import usable
from paceline.torch import join, peers
from paceline.train import checkpoint, checks, launch
from paceline.train.config import TrainConfig

SHOWN = 8  # workers whose loads are shown in the progress line

# The most files and connections that a worker has open: its own, for each worker, for each process of its loader.
FILES, FILES_EACH, FILES_LOADER = 32, 8, 32


def launched_ranks() -> int | None:
    """The number of ranks that a launcher such as torchrun has started; None if there is no launcher."""
    if not startup.launched():
        return None
    for name in ("RANK", "WORLD_SIZE"):
        if not os.environ[name].isdecimal():
            raise PacelineError(f"{name}={os.environ[name]!r}: expected a whole number, as torchrun sets it")
    return int(os.environ["WORLD_SIZE"])


class Session:
    """One call of the command.

    target: the file of the figures, "-" for standard output (text then goes to standard error), or None for none.
    interrupted: whether the user has asked for the end.
    """

    def __init__(self, target: str | None, interrupted: Callable[[], bool]) -> None:
        self._target, self._interrupted = target, interrupted
        self._joined, self._leads = startup.launched(), startup.leads()
        self._noted: set[str] = set()
        self._console = Console(stderr=target == "-", quiet=not self._leads, highlight=False, soft_wrap=True)

    def train(self, config: TrainConfig, chosen: list[str], base: Path, port: int, listed: bool) -> None:
        """Train under the chosen policies, one after another, in a new directory. listed: the figures are a list."""
        whole("--port", port, 0, 65535)
        config = dataclasses.replace(config, workers=launched_ranks() or config.workers)
        data = datasets.load(config.data)
        for policy in chosen:
            own = dataclasses.replace(config, policy=policy)
            checks.check(own, data)
            checks.survives(own, self._joined)
        check_json(self._target)
        startup.announce(base, self._target)
        restarted = startup.restarted()
        images, width = len(data.x_train), max(len(policy) for policy in chosen)
        self._console.print(
            f"{data.name}: {images} images; {config.model}; {config.workers} workers; batch {config.global_batch}; "
            f"{config.rounds(images)} steps"
            + (f" at most, local steps with every={config.every or 'auto'}" if config.loop == "local" else "")
            + ("" if len(chosen) == 1 else f" under each of {', '.join(chosen)}")
        )
        results, directories = [], []
        for policy in chosen:
            run_dir = base if len(chosen) == 1 else base / policy.replace(":", "-").replace("/", "-")
            own, label = dataclasses.replace(config, policy=policy), policy.ljust(width)
            results.append(self._run(own, run_dir, label, restarted, port, config.rounds(images)))
            directories.append(run_dir)
        self._sum_up(base, directories, results if listed else results[0])

    def resume(self, run_dir: Path, port: int, changes: dict[str, Any]) -> None:
        """Continue a run from its last checkpoint. changes: the options of its configuration that change."""
        whole("--port", port, 0, 65535)
        check_json(self._target)
        run = read(run_dir)
        config = dataclasses.replace(TrainConfig.from_dict(run.config), **changes)
        config = dataclasses.replace(config, workers=launched_ranks() or config.workers)
        data = datasets.load(config.data)
        checks.check(config, data)
        checks.survives(config, self._joined)
        found = _done(config, run_dir, len(data.x_train))
        if found is not None and found[1]:
            raise PacelineError(f"{run_dir} is finished after {found[0]} steps; there is nothing to resume")
        startup.announce(run_dir, self._target)
        if found is not None:
            self._console.print(f"{run_dir}: continuing from step {found[0]}")
        else:
            self._console.print(f"{run_dir}: no checkpoint yet, starting from the beginning")
        result = self._run(config, run_dir, config.policy, True, port, config.rounds(len(data.x_train)))
        self._sum_up(run_dir, [run_dir], result)

    def _run(
        self, config: TrainConfig, run_dir: Path, label: str, resume: bool, port: int, steps: int
    ) -> dict[str, Any]:
        if not startup.restarted() and (warning := checks.warning(config, self._joined)):
            self._console.print(warning, markup=False)
        if not self._joined:
            least = FILES + FILES_EACH * config.workers + FILES_LOADER * config.loader_workers
            allow_open(least, f"each of {config.workers} workers")
        if resume and self._leads:
            sweep(run_dir)
        with ProgressDisplay(
            label, self._console, unit="step", note="starting workers", lasting=True
        ) as counter:
            counter.begin(0, steps, "starting workers")
            progress = functools.partial(self._show, counter)
            try:
                if config.engine == "ray":
                    from paceline.train import ray_engine

                    return ray_engine.run(config, run_dir, progress, resume)
                if self._joined:
                    if not peers.joined():
                        join()
                    return launch.join(config, run_dir, progress, resume)
                return launch.run(config, run_dir, progress, resume, port, self._interrupted)
            except BaseException:
                self._leave_summary(run_dir)
                raise

    def _show(self, counter: ProgressDisplay, event: dict[str, Any]) -> None:
        if event["type"] == "note":
            if event["text"] in self._noted:  # the runs that are compared say the same
                return
            self._noted.add(event["text"])
        show(counter, event)

    def _leave_summary(self, run_dir: Path) -> None:
        """Write the report of a run that ended early, and print how many of its steps are on record."""
        if self._leads and (run_dir / "rounds.jsonl").exists():
            try:
                run = read(run_dir)
                if len(run.round):
                    report.write(run)
                    many = len(run.round)
                    verb = "is" if many == 1 else "are"
                    self._console.print(f"{plural(many, 'finished step')} {verb} on record in {run_dir}")
            except PacelineError as error:
                self._console.print(str(error))

    def _sum_up(self, base: Path, directories: list[Path], figures: Any) -> None:
        """Print what the runs in these directories show, and write their reports and the figures for ``--json``."""
        if not self._leads:
            return
        runs = [read(directory) for directory in directories]
        tables.print_whole(self._console, comparison_table(runs))
        for sentence in compare(runs)[:1] if len(runs) > 1 else findings(runs[0]):
            tables.say(self._console, sentence)
        for sentence in worth.of_run(runs[-1]):
            tables.say(self._console, sentence)
        page = base / report.REPORT
        written = [self._written(report.write, run) for run in runs]
        for run in runs:
            self._written(trace.write, run)
        if len(runs) > 1:
            written = [self._written(report.write_comparison, runs, page)]
            self._written(trace.write_comparison, runs, base / trace.TRACE)
        if all(written):
            self._console.print(f"Report: {page} (open it in a browser)")
        self._console.print("Next, each a line to paste:")
        tables.show_lines(_next_steps(base, runs), self._console)
        write_json(self._target, figures, indent=2)

    def _written(self, write: Callable[..., Path], *arguments: Any) -> bool:
        """Write a file that is made from the record of a finished run; returns whether it could be written."""
        try:
            write(*arguments)
        except PacelineError as error:
            self._console.print(
                f"{error}; the run is complete, and paceline report makes it again", markup=False
            )
            return False
        return True


def _next_steps(base: Path, runs: list[Run]) -> list[str]:
    """Commands to take next after these runs, each with a comment."""
    steps = [(line("watch", base), f"look at the run{'s' * (len(runs) > 1)} in a browser")]
    with suppress(PacelineError):
        usable(runs[0])
        steps.append((line("whatif", runs[0].path), "what other policies would have cost in this run"))
    script = example("plain_ddp.py", 3)
    steps.append((line("doctor", "--", *script), "what balancing would gain in a script such as yours"))
    return [f"{command}  # {words}" for command, words in steps]


def show(counter: ProgressDisplay, event: dict[str, Any]) -> None:
    """Show an event of a training run on ``counter``."""
    if event["type"] == "starting":
        counter.note(f"starting workers {event['ready']}/{event['workers']}")
    elif event["type"] == "start":
        counter.begin(event["first"], event["rounds"])
    elif event["type"] == "note":
        counter.console.print(event["text"], markup=False)
    elif event["type"] == "test":
        counter.note("testing")
    elif event["type"] == "round":
        result = event["result"]
        loads = "/".join(map(str, result.loads.tolist()[:SHOWN])) + "..." * (len(result.loads) > SHOWN)
        note = f"loss {result.loss:.3f}  {result.seconds * 1e3:.0f} ms  loads {loads}"
        counter(event["round"] + 1, event["rounds"], note)


def _done(config: TrainConfig, run_dir: Path, samples: int) -> tuple[int, bool] | None:
    """The number of steps in the run's checkpoint, and whether these are all; None if there is no checkpoint."""
    if config.engine == "ray":
        from paceline.train import ray_engine

        return ray_engine.done(config, run_dir, samples)
    parts = checkpoint.of_run(run_dir).load()
    if parts is None:
        return None
    steps, epoch = int(parts["pace"]["rounds"]), int(parts["pace"]["epoch"])
    whole = config.loop == "local" and epoch + (parts["pace"]["samples_done"] >= samples) >= config.epochs
    return steps, whole or steps >= config.rounds(samples)
