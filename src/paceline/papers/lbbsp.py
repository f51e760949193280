"""LB-BSP: computation time against batch (Figs. 3 and 6), the quality of NARX's forecasts (Fig. 11), the value of
each forecast (Table 3), and the seconds of a decision relative to an iteration (Fig. 14)."""

from __future__ import annotations

import contextlib
import csv
import time
from typing import Any, NamedTuple

import numpy as np

from paceline import forecast, policies
from paceline.balancer import Balancer
from paceline.commands import installation
from paceline.errors import PacelineError
from paceline.forecast.series import Rating, Series, bursty, google2011, rate, recorded, walk
from paceline.papers import Found, data_folder, table
from paceline.rounds import Array, Cluster
from paceline.simulate.plots import figure

ENOUGH = 20.0  # seconds of one step above which larger batches are not tried
PRINTED = {  # Table 3: RMSE in samples/s, normalised time per update
    "last": (11.85, 0.584),
    "ema": (7.85, 0.489),
    "arima": (9.67, 0.523),
    "recurrent": (8.34, 0.491),
    "recurrent:cell=lstm": (9.19, 0.515),
    "narx": (4.78, 0.423),
}
OWN = ("ratio", "tracking")  # not in the paper
SHAPES = {"lenet5": (1, 28, 28), "resnet18": (3, 32, 32), "vgg16": (3, 32, 32)}


class KneeLine(NamedTuple):
    """The line seconds = slope max(batch, knee) + intercept; knee is 0 if a plain line fits as well."""

    slope: float
    intercept: float
    knee: float
    r2: float


def fit_line(batch: Array, seconds: Array) -> KneeLine:
    """A plain line by least squares on relative errors; r2 is of the seconds."""
    return _with_knee(batch, seconds, 0.0)[0]


def fit_knee(batch: Array, seconds: Array) -> KneeLine:
    """The line that is flat below a knee x^s: the best of 200 places between the second and the last but one batch.

    So the flat part has two or more points. The plain line is kept unless a knee halves the squared error.
    """
    plain, wrong = _with_knee(batch, seconds, 0.0)
    ordered = np.sort(batch)
    places = np.linspace(ordered[1], ordered[-2], 200)
    tried = [_with_knee(batch, seconds, float(k)) for k in places]
    best, less = min(tried, key=lambda each: each[1])
    return best if less < 0.5 * wrong else plain


def _with_knee(batch: Array, seconds: Array, knee: float) -> tuple[KneeLine, float]:
    """The best line with this knee, and its sum of squared relative errors."""
    x = np.maximum(batch, knee)
    design = np.stack([x, np.ones_like(x)], axis=1) / seconds[:, None]
    (slope, intercept), *_ = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)
    fitted = slope * x + intercept
    r2 = 1 - ((seconds - fitted) ** 2).sum() / ((seconds - seconds.mean()) ** 2).sum()
    return KneeLine(float(slope), float(intercept), knee, float(r2)), float(
        ((fitted / seconds - 1) ** 2).sum()
    )


def measure(model: str, batches: list[int], repeats: int, device: str) -> dict[int, float]:
    """Seconds of forward and backward for each batch: the least of ``repeats``, since noise only adds time.

    On a CPU, processor seconds of one thread, without the time of other processes. Stops before a batch that
    does not fit into the memory, or after one that takes too long: the last key is then x^o.
    """
    try:
        import torch

        from paceline.learners import models
    except ImportError:
        raise PacelineError(f"measuring computation time needs torch; {installation('torch')}") from None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as for one of several workers, and with less noise
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


def fig3(quick: bool) -> Found:
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
        why="linear here too, except for the constant cost of a step"
        if straight
        else "less linear here: with large batches much time is spent on getting memory from the system (for "
        "LeNet-5 at 1,024 samples nearly half), and with small ones the constant cost of a step counts",
        setting="forward and backward on one thread of this machine, processor seconds, least of several repeats; "
        "ours are LeNet-5 and ResNet-18, the paper's ResNet-32 and Inception-V3 on EC2 instances",
        figures={"lines": {name: line._asdict() for name, line in lines.items()}},
    )


def fig6(quick: bool) -> Found:
    """Computation time against batch on GPUs: flat to x^s, then a line, up to x^o (LB-BSP, Fig. 6)."""
    try:
        import torch

        name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    except ImportError:
        name = None
    if name is None:
        measured = _gavel()
        source = "published measurements of Gavel (ResNet-18, CIFAR-10); no GPU was found here"
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
        why="the linear part is confirmed; if no knee is found, it is below the smallest batch measured, "
        "and the constant part b plays the same role in the balance",
        setting=source,
        figures={
            "lines": {label: line._asdict() for label, line in lines.items()},
            "largest_batch": {label: max(points) for label, points in measured.items()},
        },
    )


def _gavel() -> dict[str, dict[int, float]]:
    """Seconds per step of ResNet-18 on one V100 and one P100, by batch, as measured by Gavel."""
    path = data_folder() / "traces" / "gavel_isolated_throughputs.csv"
    if not path.is_file():
        raise PacelineError(
            f"no GPU was found, and {path} is missing; set PACELINE_DATA to the folder with traces/"
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
    column: str, measured: dict[str, dict[int, float]], lines: dict[str, KneeLine]
) -> tuple[Any, list[dict[str, Any]]]:
    """The picture and the table of the measurements, with the fitted lines."""
    picture, rows = figure(len(measured)), []
    for axes, (label, points) in zip(picture.axes, measured.items(), strict=True):
        line, (batch, seconds) = lines[label], _arrays(points)
        fine = np.linspace(0, batch.max(), 200)
        axes.plot(fine, 1e3 * (line.slope * np.maximum(fine, line.knee) + line.intercept), color="grey")
        axes.plot(batch, 1e3 * seconds, "o")
        axes.set(title=f"{label} (R² {line.r2:.4f})", xlabel="batch (samples)", ylabel="computation (ms)")
        rows += table(**{column: label}, batch=points, seconds=seconds)
    return picture, rows


def _found(quick: bool) -> dict[str, Series]:
    """The series on which forecasts are rated; those whose data are missing are left out."""
    made = {"bursty (synthetic)": bursty(np.random.default_rng(40), rounds=800 if quick else 2000)}
    with contextlib.suppress(PacelineError):  # the result names the series that were used
        hold = 3 if quick else 10
        made["Google 2011 (semi-synthetic)"] = google2011(data_folder(), np.random.default_rng(0), hold=hold)
        made["recorded"] = recorded(data_folder())
    return made


def fig11(quick: bool) -> Found:
    """Actual and forecast speed of one worker, rounds 1200 to 1300 (LB-BSP, Fig. 11)."""
    series = bursty(np.random.default_rng(40), rounds=1300)
    found = {name: walk(forecast.create(name), *series[:3]) for name in ("ema", "narx")}
    shown = slice(1200, 1300)
    jumps = (np.abs(np.diff(series.cpu[shown], axis=0)) > 0.2).sum(axis=0)
    worker = int(np.argmax(jumps))  # one whose processors' share changes in the period
    picture = figure(1, width=9)
    axes = picture.axes[0]
    rounds = np.arange(1200, 1300)
    lines = {"actual": series.speed, **found}
    for label, values in lines.items():
        axes.plot(rounds, values[shown, worker], label=label, linewidth=2 if label == "actual" else 1.2)
    axes.set(xlabel="round", ylabel="speed (samples/s)", title=f"worker {worker}")
    axes.legend()
    error = {
        label: float(np.sqrt(np.mean((values - series.speed)[shown, worker] ** 2)))
        for label, values in found.items()
    }
    # the round right after a jump of the processors' share shows which forecast follows at once
    jump = 1 + np.flatnonzero(np.abs(np.diff(series.cpu[500:, worker])) > 0.2) + 500
    missed = {label: float(np.abs(v - series.speed)[jump, worker].mean()) for label, v in found.items()}
    return Found(
        picture,
        table(round=rounds, **{label: values[shown, worker] for label, values in lines.items()}),
        claim="NARX fluctuates much less than the speed during spikes, and catches up promptly with lasting "
        "changes",
        ours=f"RMSE in the period: narx {error['narx']:.1f}, ema {error['ema']:.1f} samples/s; mean error in the "
        f"very round of a jump: narx {missed['narx']:.1f}, ema {missed['ema']:.1f}",
        why="the same behaviour on another series: the paper's instance and its load are not public, and here, "
        "by construction, the readings show a jump before the round",
        setting="bursty synthetic series of 9 workers (regimes of 40 rounds, 3 % spikes), the worker with most "
        "jumps; one pooled NARX of 6 inputs",
        figures={"rmse": error, "error_at_jumps": missed},
    )


def table3(quick: bool) -> Found:
    """RMSE of each forecast, and time per round over the equal split's (LB-BSP, Table 3)."""
    ratings: dict[str, dict[str, Rating]] = {}
    for label, series in _found(quick).items():
        ratings[label] = {
            name: rate(walk(forecast.create(name), *series[:3]), series.speed) for name in (*PRINTED, *OWN)
        }
        if series.expected is not None:
            ratings[label]["(noise-free)"] = rate(series.expected, series.speed)
    names = [*PRINTED, *OWN, "(noise-free)"]
    picture = figure(2, width=7)
    width = 0.8 / (len(ratings) + 1)
    columns: dict[str, dict[str, tuple[float, float]]] = {"paper": PRINTED}
    columns |= {label: {n: (r.rmse, r.time) for n, r in each.items()} for label, each in ratings.items()}
    for i, (label, values) in enumerate(columns.items()):
        at = [names.index(n) + (i - len(columns) / 2 + 0.5) * width for n in values]
        picture.axes[0].bar(at, [e / values["ema"][0] for e, _ in values.values()], width, label=label)
        picture.axes[1].bar(at, [t for _, t in values.values()], width, label=label)
    for axes, text in zip(picture.axes, ("RMSE / RMSE of ema", "time / time of equal split"), strict=True):
        labels = [n.replace("recurrent:cell=", "") for n in names]
        axes.set_xticks(range(len(names)), labels, rotation=30, ha="right")
        axes.set_ylabel(text)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False)
    rows: list[dict[str, Any]] = [
        {
            "series": label,
            "forecast": name,
            "rmse": r.rmse,
            "rmse_over_ema": r.rmse / each["ema"].rmse,
            "time_over_equal": r.time,
            "time_over_oracle": r.over_oracle,
        }
        | dict(zip(("paper_rmse", "paper_time"), PRINTED.get(name, ()), strict=False))
        for label, each in ratings.items()
        for name, r in each.items()
    ]

    def sentence(label: str) -> str:
        each = ratings[label]
        order = sorted(PRINTED, key=lambda name: each[name].rmse)
        gain = 100 * (1 - each["narx"].rmse / each["ema"].rmse)
        saved = 100 * (1 - each["narx"].time / each["ema"].time)
        return (
            f"{label}: RMSE narx {each['narx'].rmse:.2f} against ema {each['ema'].rmse:.2f} ({gain:.0f} % less), "
            f"time {each['narx'].time:.3f} against {each['ema'].time:.3f} ({saved:.1f} % less); "
            f"best to worst {', '.join(order)}"
        )

    return Found(
        picture,
        rows,
        claim="RMSE 11.85 / 7.85 / 9.67 / 8.34 / 9.19 / 4.78 and normalised time 0.584 / 0.489 / 0.523 / 0.491 / "
        "0.515 / 0.423 for memoryless, EMA, ARIMA, SimpleRNN, LSTM, NARX",
        ours="; ".join(sentence(label) for label in ratings),
        why="NARX gains if the reading of processors shows a change before the round (bursty); if the load "
        "drifts slowly (Google) or the reading is as old as the speed (recorded), the moving average is within a "
        "few percent of it, and most of the remaining error is noise that no forecast can know",
        setting="rated from round 500 on; " + "; ".join(ratings) + "; the Google series drives an assumed "
        "contention model",
        figures={
            "ratings": {label: {n: r._asdict() for n, r in each.items()} for label, each in ratings.items()}
        },
    )


def fig14(quick: bool) -> Found:
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
        why="one decision in arrays instead of remote calls and log parsing, relative to the iteration stated; "
        "measurements are exchanged together with the gradients and are not in these figures",
        setting=f"a policy's step and its rounding to whole samples, processor time, {rounds} rounds of a "
        "bursty series, over an "
        f"iteration of {1e3 * iteration:.0f} ms: 128 samples of ResNet-18 as measured on one thread here, on 8 cores",
        figures={"iteration_seconds": iteration, "percent_of_iteration_96": largest},
    )


def _deciding(name: str, workers: int, rounds: int) -> Array:
    """Processor seconds of each decision of a run: the report of a round, and whole samples for the next."""
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
