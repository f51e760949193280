"""Why do three figures differ from the printed ones? Each cause is tried out: ``python benchmarks/readings.py dbw``.

dbw: training on MNIST as in DBW's Figs. 4 and 6 (``--alphas 0.2 0.7 1``), with other readings of the estimators (eqs.
    (10) to (15)). An update from one gradient gives no estimate. "two", the default: the mean of those of the last
    five updates, one of which is from two gradients or more. "all": the same, but five updates from one gradient each
    make DBW wait for all. "kept": the last estimate stays until there is another one. "available": the last five
    estimates that exist. "ratio": as "two", with the means of what is above and below the bar of eq. (12). "quiet":
    as "two", but each loss is measured on the same 5,000 samples, which no server can do: it shows what noise causes.
curvature: the largest eigenvalue of the Hessian, and the curvature along the gradient, while plain descent (2,000
    samples an update, rate .08) trains the same network: the true L that dbw's estimates go by.
dolbie: how often a realization of the three clusters comes to the printed savings of Fig. 3, with the printed steps
    and with steps that may grow again.
coded: the savings of Fig. 3 for several meanings of "u is randomly selected within [1, 5]".

On the virtual clock, so that nothing else on the machine matters. dbw needs the shared MNIST; a run takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from scaffold import command_line

from paceline.backup import dbw as module
from paceline.backup.dbw import Dbw, DbwState, GainState
from paceline.backup.protocol import Iteration
from paceline.coded import Problem, ShiftedExponential, plan, simulate
from paceline.papers import dbw_training as paper
from paceline.papers import dolbie
from paceline.simulate import run

PRINTED = {"EQU": 89.6, "OGD": 82.2, "LB-BSP": 67.4, "ABS": 47.6}  # per cent, DOLBIE's Fig. 3
HISTORY: list[tuple[float, float]] = []  # of one run: above and below the bar of eq. (12)
READINGS = ("two", "all", "kept", "available", "ratio", "quiet")


def existing(values: np.ndarray, newest: float) -> np.ndarray:
    """The last D estimates that exist."""
    return values if np.isnan(newest) else np.append(values[1:], newest)


def kept(values: np.ndarray, newest: float) -> np.ndarray:
    """Those of the last D updates, or the last one of all."""
    after = np.append(values[1:], newest)
    return values if np.isnan(after).all() else after


def of_means(state: GainState, happened: Iteration, pushed: Any = module.update_gain) -> GainState:
    """Eq. (12) with the means of the last five numerators and denominators: their ratio is the newest value."""
    after: GainState = pushed(state, happened)
    bottom = state.rate**2 * (state.norm2[-1] + state.spread)
    if not np.isnan(after.smoothness[-1]):
        HISTORY.append((after.smoothness[-1] * bottom, bottom))
    if not HISTORY:
        return after
    ratio = sum(top for top, _ in HISTORY[-5:]) / sum(below for _, below in HISTORY[-5:])
    return after._replace(smoothness=np.append(after.smoothness[:-1], ratio))


def train(reading: str, model: str, alpha: float, seed: int, target: float) -> tuple[list[Any], list[float]]:
    """One run under a reading; its updates, and the L that each of its choices went by."""
    from paceline.paramserver.config import ServerConfig
    from paceline.paramserver.samples import Draws
    from paceline.simulate.server import RoundTrips, SimulatedServer

    learns = paper.learner("mnist", model, seed)
    config = ServerConfig(paper.WORKERS, paper.WORKERS * 500, backup="dbw", policy="equal", rate="fixed",
                          lr=paper.MNIST_RATE)  # fmt: skip
    trips = RoundTrips(paper.WORKERS, paper.shifted(alpha), None, seed, ())
    server = SimulatedServer(learns, config, trips, Draws(len(learns.data.x_train), seed))
    same = np.random.default_rng(0).choice(len(learns.data.x_train), 5000, replace=False)
    known, smooth = learns.loss(learns.start(), same), list[float]()
    step, push, gains, least = Dbw.step, module._pushed, module.update_gain, module.fewest

    def measured(self: Dbw, state: DbwState, happened: Iteration) -> tuple[int, DbwState]:
        nonlocal known
        if reading == "quiet":  # the loss before the update, as eq. (12) has it
            happened, known = happened._replace(loss=known), learns.loss(server.parameters.values, same)
        k, after = step(self, state, happened)
        found = after.gain.smoothness
        smooth.append(
            float(found[-1] if reading == "ratio" else np.nanmean(found))
            if not np.isnan(found).all()
            else np.nan
        )
        return k, after

    def only_newest(state: GainState) -> module.Gain:
        found = average(state)
        return found._replace(smoothness=np.maximum(state.smoothness[-1], 0.0))

    average = module.estimate
    HISTORY.clear()
    try:
        Dbw.step = measured  # type: ignore[method-assign]
        if reading in ("available", "kept"):
            module._pushed = existing if reading == "available" else kept
        if reading in ("available", "kept", "all"):
            module.fewest = lambda state: 1
        if reading == "ratio":
            module.update_gain, module.estimate = of_means, only_newest
        losses: list[float] = []

        def stop(update: Any) -> bool:
            losses.append(update.loss)
            return float(np.mean(losses[-paper.SMOOTHED :])) < target

        return server.run(paper.CAP, None, stop), smooth
    finally:
        Dbw.step = step  # type: ignore[method-assign]
        module._pushed, module.update_gain, module.estimate, module.fewest = push, gains, average, least


def dbw(model: str, alpha: float, seeds: int, readings: list[str]) -> None:
    """The table of the readings of L at one spread of the round trips, and the seconds of each seed."""
    target = 0.2 if model == "cnn" else 0.5
    print(f"{model}, alpha = {alpha:g}, to loss {target}: mean of {seeds}")
    print(
        "| reading | seconds | updates | from all 16 | seconds of these | L, median | L, 90 % | each seed |"
    )
    print("|---" * 8 + "|")
    for reading in readings:
        rows = []
        for seed in range(seeds):
            updates, smooth = train(reading, model, alpha, seed, target)
            whole = sum(update.quorum == paper.WORKERS for update in updates)
            known = np.array(smooth)[~np.isnan(smooth)]
            rows.append([updates[-1].ended, len(updates), whole, paper.waited(updates, paper.WORKERS),
                         np.median(known), np.quantile(known, 0.9)])  # fmt: skip
        mean, each = np.mean(rows, axis=0), ", ".join(f"{row[0]:.0f}" for row in rows)
        print(f"| {reading} | " + " | ".join(f"{cell:.1f}" for cell in mean) + f" | {each} |", flush=True)


def curvature(model: str) -> None:
    """The table of the true L, by power iteration with exact Hessian-vector products."""
    import torch

    learns = paper.learner("mnist", model, 0)
    rng, values, count = np.random.default_rng(0), learns.start(), len(learns.data.x_train)
    same = rng.choice(count, 2000, replace=False)
    network, x, y = learns._flat.model, learns._inputs(learns.data.x_train[same]), learns._targets[same]

    def flat(parts: Any) -> Any:
        return torch.cat([part.reshape(-1) for part in parts])

    print(f"{model}, rate {paper.MNIST_RATE:g}, so that 2 / rate is {2 / paper.MNIST_RATE:g}")
    print("| updates | loss | largest eigenvalue | along the gradient |\n|---|---|---|---|")
    for update in range(121):
        if update in (5, 20, 40, 60, 90, 120):
            learns._flat.set(values)
            parameters = list(network.parameters())
            loss = torch.nn.functional.cross_entropy(network(x), y)
            slope = flat(torch.autograd.grad(loss, parameters, create_graph=True))
            direction = along = slope.detach() / slope.detach().norm()
            for step in range(13):
                bent = flat(torch.autograd.grad(slope @ direction, parameters, retain_graph=True)).detach()
                largest = float(bent @ direction)
                if step == 0:  # from the gradient, then from a direction drawn at random
                    here, bent = largest, torch.randn(along.shape, generator=torch.Generator().manual_seed(0))
                direction = bent / bent.norm()
            print(f"| {update} | {loss.item():.2f} | {largest:.1f} | {here:.1f} |", flush=True)
        gradient, _ = learns.gradient(values, rng.integers(count, size=2000))
        values = values - np.float32(paper.MNIST_RATE) * gradient


def reached(realizations: int) -> None:
    """The table of DOLBIE's Fig. 3: savings of round 40, and how many realizations come to the printed ones."""
    rules = {
        "printed": "dolbie:alpha=0.001",
        "may grow": "dolbie:alpha=0.001,monotone=false",
        "`level`": "level",
    }
    print(
        f"{realizations} realizations of each cluster; per cent by which DOLBIE's round 40 is shorter than under"
    )
    print(
        "| cluster | steps | "
        + " | ".join(f"{name} ({per} printed)" for name, per in PRINTED.items())
        + " | all four |"
    )
    print("|---" * 7 + "|")
    for label, scenario in dolbie.settings(realizations).items():
        rivals = [dolbie.POLICIES[name] for name in PRINTED]
        outcome = run(replace(scenario, rounds=40), [*rivals, *rules.values()])
        last = {name: played.latency[39] for name, played in outcome.policies.items()}
        for rule, policy in rules.items():
            saved = np.stack([100 * (1 - last[policy] / last[rival]) for rival in rivals], 1)
            there = saved >= np.array(list(PRINTED.values()))
            cells = [f"{m:.0f}, at most {x:.0f}; {100 * s:.1f} % reach it" for m, x, s in
                     zip(np.median(saved, 0), saved.max(0), there.mean(0), strict=True)]  # fmt: skip
            print(
                f"| {label} | {rule} | " + " | ".join(cells) + f" | {100 * there.all(1).mean():.1f} % |",
                flush=True,
            )
        implied = (1 - PRINTED["EQU"] / 100) / (1 - PRINTED["LB-BSP"] / 100)
        theirs = last[dolbie.POLICIES["LB-BSP"]] / last[dolbie.POLICIES["EQU"]]
        print(f"(LB-BSP over EQU: {implied:.2f} is implied by the printed pair; here {np.median(theirs):.2f}, and "
              f"{100 * np.mean(theirs <= implied):.1f} % of the realizations come to it)")  # fmt: skip


MEANINGS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "u uniform on [1, 5]": lambda rng: rng.uniform(1, 5, (4, 50)),
    "u one of 1, 2, 3, 4, 5": lambda rng: rng.integers(1, 6, (4, 50)).astype(float),
    "u 1 or 5": lambda rng: rng.choice([1.0, 5.0], (4, 50)),
    "1 / u uniform on [0.2, 1]": lambda rng: 1 / rng.uniform(0.2, 1, (4, 50)),
    "log u uniform": lambda rng: np.exp(rng.uniform(0, np.log(5), (4, 50))),
    "u uniform on [1, 5], one a worker": lambda rng: np.tile(rng.uniform(1, 5, 50), (4, 1)),
}


def meanings(draws: int) -> None:
    """The table of the coded paper's Fig. 3."""
    names = tuple(f"m{m}" for m in range(4)), tuple(f"w{n}" for n in range(50))
    print(
        f"4 masters, 50 workers, {draws} draws of u, 2,000 products of each; per cent saved by iterated greedy"
    )
    print(
        "| | over uncoded (80) | over coded uniform (49) | the most | both, of the draws | 1 - E u / E max u |"
    )
    print("|---" * 6 + "|")
    for name, drawn in MEANINGS.items():
        rows = []
        for seed in range(draws):
            rng = np.random.default_rng(seed)
            u = drawn(rng)
            problem = Problem(*names, np.full(4, 1e5), ShiftedExponential(u, 1 / u))
            plans = plan(problem, "iterated"), plan(problem, "uniform", coded=False), plan(problem, "uniform")
            mine, *others = (simulate(each, 2000, rng).times.max(1).mean() for each in plans)
            rows.append([100 * (1 - mine / other) for other in others])
        many = np.stack([drawn(np.random.default_rng(1000 + seed)) for seed in range(2000)], -1)
        limit = 100 * (1 - many.mean() / many.max(0).mean())
        (mean, than), (most, above) = np.mean(rows, axis=0), np.max(rows, axis=0)
        both = 100 * np.mean((np.array(rows) >= [80, 49]).all(1))
        cells = f"{mean:.0f} | {than:.0f} | {most:.0f} and {above:.0f} | {both:.0f} % | {limit:.0f}"
        print(f"| {name} | {cells} |", flush=True)


def main() -> None:
    """One of the tables."""
    parser = command_line(__doc__)
    parser.add_argument("which", nargs="?", choices=["dbw", "curvature", "dolbie", "coded"], default="dolbie")
    parser.add_argument("--model", choices=["cnn", "mlp"], default="cnn")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--alphas", type=float, nargs="*", default=[1.0], help="spreads of the round trips")
    parser.add_argument(
        "--draws", type=int, default=0, help="of the clusters; 0 takes 1000 of DOLBIE's, 20 coded ones"
    )
    parser.add_argument("--readings", nargs="*", choices=READINGS, default=list(READINGS))
    asked = parser.parse_args()
    if asked.which == "dbw":
        for alpha in asked.alphas:
            dbw(asked.model, alpha, asked.seeds, asked.readings)
    elif asked.which == "curvature":
        curvature(asked.model)
    elif asked.which == "dolbie":
        reached(asked.draws or 1000)
    else:
        meanings(asked.draws or 20)


if __name__ == "__main__":
    main()
