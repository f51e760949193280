"""LB-BSP: computation time against batch (Figs. 3 and 6), and what deciding costs beside an iteration (Fig. 14)."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline import policies
from paceline.balancer import Balancer
from paceline.errors import PacelineError
from paceline.forecast.series import bursty
from paceline.papers import Found, data_folder, table
from paceline.rounds import Array, Cluster
from paceline.simulate.plots import figure

ENOUGH = 20.0  # seconds of one step at which larger batches are not tried
SHAPES = {"lenet5": (1, 28, 28), "resnet18": (3, 32, 32), "vgg16": (3, 32, 32)}


class Line(NamedTuple):
    """seconds = slope max(batch, knee) + intercept; knee 0 if a plain line fits as well."""

    slope: float
    intercept: float
    knee: float
    r2: float


def fit_line(batch: Array, seconds: Array) -> Line:
    """Least squares on relative errors; r2 of the seconds."""
    return _with_knee(batch, seconds, 0.0)[0]


def fit_knee(batch: Array, seconds: Array) -> Line:
    """The line that is flat below a knee x^s: the best of 200 places between the second and the last but one batch.

    So the flat part has two points or more. A knee must halve the squared error, or the plain line is kept.
    """
    plain, wrong = _with_knee(batch, seconds, 0.0)
    ordered = np.sort(batch)
    places = np.linspace(ordered[1], ordered[-2], 200)
    tried = [_with_knee(batch, seconds, float(k)) for k in places]
    best, less = min(tried, key=lambda each: each[1])
    return best if less < 0.5 * wrong else plain


def _with_knee(batch: Array, seconds: Array, knee: float) -> tuple[Line, float]:
    """The best line with this knee, and its sum of squared relative errors."""
    x = np.maximum(batch, knee)
    design = np.stack([x, np.ones_like(x)], axis=1) / seconds[:, None]
    (slope, intercept), *_ = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)
    said = slope * x + intercept
    r2 = 1 - ((seconds - said) ** 2).sum() / ((seconds - seconds.mean()) ** 2).sum()
    return Line(float(slope), float(intercept), knee, float(r2)), float(((said / seconds - 1) ** 2).sum())


def measure(model: str, batches: list[int], repeats: int, device: str) -> dict[int, float]:
    """Seconds of forward and backward for each batch: the least of ``repeats``, since noise only adds.

    On a processor, seconds of one thread's work, so that others on the machine do not count. Stops before a
    batch that the memory cannot hold, or after one that takes too long: the last key is then x^o.
    """
    try:
        import torch

        from paceline.learners import models
    except ImportError:
        raise PacelineError("measuring computation time needs torch: pip install 'paceline[torch]'") from None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a worker of its own; and steadier
    network = models.create(model, SHAPES[model]).to(device)
    found: dict[int, float] = {}
    try:
        for batch in batches:
            images = torch.rand(batch, *SHAPES[model], device=device)
            labels = torch.zeros(batch, dtype=torch.long, device=device)
            spent = []
            for _ in range(repeats + 1):  # the first warms up
                start = _now(device)
                torch.nn.functional.cross_entropy(network(images), labels).backward()
                spent.append(_now(device) - start)
            found[batch] = min(spent[1:])
            if found[batch] > ENOUGH:
                break
    except torch.OutOfMemoryError:
        pass
    finally:
        torch.set_num_threads(threads)
    return found


def _now(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def _cuda() -> str | None:
    """The name of the GPU at hand, if there is one."""
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def fig3(out: Path, quick: bool) -> Found:
    """Computation time against batch on a processor: a line through (nearly) zero (LB-BSP, Fig. 3)."""
    batches = {
        "lenet5": [16, 32, 64, 128, 256] if quick else [16, 32, 64, 128, 256, 512, 1024],
        "resnet18": [2, 4, 8, 16] if quick else [8, 16, 32, 64, 96, 128],
    }
    measured = {name: measure(name, sizes, 3 if quick else 5, "cpu") for name, sizes in batches.items()}
    lines = {name: fit_line(*_arrays(points)) for name, points in measured.items()}
    straight = min(line.r2 for line in lines.values()) > 0.99
    return Found(
        *_drawn("model", measured, lines),
        claim="on CPU workers computation time is proportional to the batch (strong linearity)",
        ours="; ".join(
            f"{name}: {1e3 * line.slope:.3g} ms a sample and {1e3 * line.intercept:.3g} ms a step, R^2 {line.r2:.4f}"
            for name, line in lines.items()
        ),
        why="linear here too, but for what a step costs whatever its batch"
        if straight
        else "less of a line here: with large batches much time goes into getting memory from the system (for "
        "LeNet-5 at 1,024 samples nearly half), and small ones show what a step costs whatever its batch",
        setting="forward and backward on one thread of this machine, processor seconds, least of several repeats; "
        "ours are LeNet-5 and ResNet-18, the paper's ResNet-32 and Inception-V3 on EC2 instances",
        figures={"lines": {name: line._asdict() for name, line in lines.items()}},
    )


def fig6(out: Path, quick: bool) -> Found:
    """Computation time against batch on GPUs: flat to x^s, then a line, up to x^o (LB-BSP, Fig. 6)."""
    name = _cuda()
    if name is None:
        measured = _gavel()
        source = "published measurements of Gavel (ResNet-18, CIFAR-10); no GPU at hand here"
    else:
        sizes = [2**k for k in range(14 if quick else 18)]
        repeats = 3 if quick else 5
        measured = {f"{name} {m}": measure(m, sizes, repeats, "cuda") for m in ("lenet5", "resnet18")}
        source = (
            f"forward and backward on {name}, batches doubled until memory or {ENOUGH:.0f} s are exceeded"
        )
    lines = {label: fit_knee(*_arrays(points)) for label, points in measured.items()}
    return Found(
        *_drawn("gpu", measured, lines),
        claim="on GPUs computation time is constant below x^s, linear between x^s and x^o, impossible above",
        ours="; ".join(
            f"{label}: {1e3 * line.intercept:.3g} + {1e3 * line.slope:.3g} b ms, R^2 {line.r2:.4f}, "
            + (f"x^s {line.knee:.0f}" if line.knee else f"no flat part from batch {min(measured[label])} on")
            for label, line in lines.items()
        ),
        why="the linear part is there; a GPU's knee lies below the smallest batch measured where none is found, "
        "and its constant part b plays the same role in the balance",
        setting=source,
        figures={
            "lines": {label: line._asdict() for label, line in lines.items()},
            "largest_batch": {label: max(points) for label, points in measured.items()},
        },
    )


def _gavel() -> dict[str, dict[int, float]]:
    """Seconds a step of ResNet-18 on one V100 and one P100, by batch, as Gavel measured them."""
    path = data_folder() / "traces" / "gavel_isolated_throughputs.csv"
    if not path.is_file():
        raise PacelineError(
            f"no GPU at hand and {path} is missing; set PACELINE_DATA to the folder with traces/"
        )
    found: dict[str, dict[int, float]] = {"v100": {}, "p100": {}}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["model"] == "ResNet-18" and row["num_gpus"] == "1" and row["accelerator"] in found:
                found[row["accelerator"]][int(row["batch_size"])] = 1 / float(row["steps_per_s"])
    return {name.upper(): dict(sorted(points.items())) for name, points in found.items()}


def _arrays(points: dict[int, float]) -> tuple[Array, Array]:
    return np.array(list(points), float), np.array(list(points.values()))


def _drawn(
    column: str, measured: dict[str, dict[int, float]], lines: dict[str, Line]
) -> tuple[Any, list[dict[str, Any]]]:
    """The picture and the table of what was measured, with the fitted lines."""
    picture, rows = figure(len(measured)), []
    for axes, (label, points) in zip(picture.axes, measured.items(), strict=True):
        line, (batch, seconds) = lines[label], _arrays(points)
        fine = np.linspace(0, batch.max(), 200)
        axes.plot(fine, 1e3 * (line.slope * np.maximum(fine, line.knee) + line.intercept), color="grey")
        axes.plot(batch, 1e3 * seconds, "o")
        axes.set(title=f"{label} (R² {line.r2:.4f})", xlabel="batch (samples)", ylabel="computation (ms)")
        rows += table(**{column: label}, batch=points, seconds=seconds)
    return picture, rows


def fig14(out: Path, quick: bool) -> Found:
    """Seconds to decide, over those of an iteration, with 32, 64 and 96 workers (LB-BSP, Fig. 14)."""
    sample = measure("resnet18", [8] if quick else [32], 3, "cpu")
    (batch, seconds), *_ = sample.items()
    iteration = 128 * seconds / batch / 8  # the paper's batch of 128 on the 8 cores of its workers
    chosen = ("lbbsp-cpu", "lbbsp-cpu:forecast=narx", "level")
    sizes = (32, 64, 96)
    rounds = 200 if quick else 1000
    spent = {name: {n: _deciding(name, n, rounds) for n in sizes} for name in chosen}
    picture = figure(1, width=7)
    axes = picture.axes[0]
    rows = []
    for i, (name, each) in enumerate(spent.items()):
        means = [100 * float(np.mean(each[n])) / iteration for n in sizes]
        low, high = (
            np.array([100 * float(np.quantile(each[n], q)) / iteration for n in sizes]) for q in (0.05, 0.95)
        )
        at = np.arange(len(sizes)) + (i - 1) * 0.26
        errors = np.abs(np.stack([means - low, high - means]))
        axes.bar(at, means, 0.26, yerr=errors, capsize=3, label=name)
        took = [1e3 * np.mean(each[n]) for n in sizes]
        rows += table(policy=name, workers=sizes, mean_ms=took, percent=means, percent_5=low, percent_95=high)
    axes.set_xticks(range(len(sizes)), [f"{n} workers" for n in sizes])
    axes.set_ylabel("deciding (% of an iteration)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)
    largest = {name: 100 * float(np.mean(each[96])) / iteration for name, each in spent.items()}
    return Found(
        picture,
        rows,
        claim="log processing and batch size updating together take less than 1.1 % of an iteration, even with "
        "96 workers",
        ours="with 96 workers: " + ", ".join(f"{name} {value:.2f} %" for name, value in largest.items()),
        why="one decision in arrays instead of remote calls and log parsing, on the iteration stated; the "
        "exchange of measurements travels beside the gradients and is not in these figures",
        setting=f"a policy's step and its rounding to whole samples, processor time, {rounds} rounds of a "
        "bursty series, over an "
        f"iteration of {1e3 * iteration:.0f} ms: 128 samples of ResNet-18 as measured on one thread here, on 8 cores",
        figures={"iteration_seconds": iteration, "percent_of_iteration_96": largest},
    )


def _deciding(name: str, workers: int, rounds: int) -> Array:
    """Processor seconds of each decision of a run: report of what happened, whole samples for the next round."""
    series = bursty(np.random.default_rng(workers), rounds=rounds + 1, workers=workers)
    batch = 128 * workers
    balancer = Balancer(policies.create(name, Cluster(workers, batch)))
    loads, spent = balancer.loads(0, batch), np.empty(rounds)
    for k in range(rounds):
        seconds = np.maximum(loads, 1) / series.speed[k]
        start = time.process_time()
        balancer.report(k, loads, seconds, cpu=series.cpu[k + 1], memory=series.memory[k + 1])
        loads = balancer.loads(k + 1, batch)
        spent[k] = time.process_time() - start
    return spent
