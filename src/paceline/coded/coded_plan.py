"""A coded plan: which workers serve which master, with how many rows, by when; how its loads follow from an
assignment; and how ``plan(problem, "iterated")`` makes one.

It extends Theorem 1 of Sun et al. (2019): the expected rows by time t are sum_n k_n l_n F_n((t - d_n) / l_n),
with d the latency. The loads are separate terms of that sum, so each can be maximized alone, at l_n = (t - d_n) /
phi_n, with which a worker brings rate_n (t - d_n) rows in expectation. The paper's multiplier method requires that
-l F(t / l) is convex; here no convexity is needed.

A load of more than L rows is of no use to a master. Theorem 1 does not limit the loads; the plans here do, unless
``rule="printed"`` asks for the theorem itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.coded.assign import exact, iterated, probabilistic, simple, uniform
from paceline.coded.delay import Array, Delay
from paceline.coded.problem import Problem, problem_from_json
from paceline.costs import Linear
from paceline.errors import PacelineError, among, choice, refuse, short, switches
from paceline.files import open_file
from paceline.shares import water_level

ASSIGNMENTS: dict[str, Callable[[Array], Array]] = {
    "uniform": uniform,
    "simple": simple,
    "iterated": iterated,
    "exact": exact,
    "probabilistic": probabilistic,
}


@dataclass(frozen=True)
class CodedPlan:
    """An assignment with its loads.

    Attributes:
        problem: The masters and workers that it is for.
        assign: The assignment's name, one of ``ASSIGNMENTS``.
        coded: Whether rows are coded; if not, a master waits for all its workers.
        probability: k, the probability with which each worker serves each master, shape (M, N); 1 for a dedicated
            worker.
        loads: Rows as planned, fractional, shape (M, N).
        t_star: Milliseconds by which each master's rows are expected, shape (M,), from the fractional loads; for an
            uncoded plan the mean time until all its workers are done with their whole rows.
        survive: Workers of a master that may be lost, whichever they are; ``coded.stretched`` plans for them.
    """

    problem: Problem
    assign: str
    coded: bool
    probability: Array
    loads: Array
    t_star: Array
    survive: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.problem, Problem):
            raise PacelineError(f"problem={short(self.problem)}: expected a paceline.coded.Problem")
        switches(coded=self.coded)
        pairs = "an array of shape {} x {}, masters x workers".format(*self.problem.shape)
        for name, given in (("probability", self.probability), ("loads", self.loads)):
            refuse(f"{name}={short(given)}", {f"expected {pairs}": np.shape(given) != self.problem.shape})

    @property
    def rows_assigned(self) -> NDArray[np.int64]:
        """Loads in whole rows, shape (M, N): rounded up if coded, otherwise with the exact sum L."""
        if self.coded:
            return np.ceil(self.loads - 1e-9 * np.maximum(self.loads, 1.0)).astype(np.int64)
        whole = np.floor(self.loads).astype(np.int64)
        for m, missing in enumerate(self.problem.rows.astype(np.int64) - whole.sum(1)):
            largest = np.argsort(whole[m] - self.loads[m], kind="stable")[:missing]
            whole[m, largest] += 1
        return whole

    @property
    def dedicated(self) -> bool:
        """Whether each worker serves at most one master."""
        return not ((self.probability > 0) & (self.probability < 1)).any()

    @property
    def redundancy(self) -> Array:
        """Planned rows over L, weighted by the probability of the workers, shape (M,); 1 for an uncoded plan."""
        return (self.probability * self.loads).sum(1) / self.problem.rows

    @property
    def copies(self) -> Array:
        """Stored rows over L, whatever the probabilities are: copies of each master's matrix, shape (M,)."""
        return self.rows_assigned.sum(1) / self.problem.rows

    @property
    def may_lose(self) -> NDArray[np.int64]:
        """Workers of each master that may be lost, whichever they are, so that the others hold L rows, shape (M,)."""
        left = np.cumsum(np.sort(self.rows_assigned, axis=1), axis=1)[
            :, ::-1
        ]  # without the 0, 1, ... largest loads
        return np.asarray((left >= self.problem.rows[:, None]).sum(1) - 1 if self.coded else 0 * left[:, 0])

    def workers_of(self, master: int | str) -> NDArray[np.intp]:
        """The workers that may serve a master.

        Args:
            master: A position from 0, or a name.

        Returns:
            Their positions, from 0.

        Raises:
            PacelineError: For a master that is not in the plan.
        """
        return np.flatnonzero(self.probability[self.master(master)] > 0)

    def master(self, master: int | str) -> int:
        """Find a master by position or name.

        Args:
            master: A position from 0, or a name.

        Returns:
            Its position, from 0.

        Raises:
            PacelineError: For a master that is not in the plan.
        """
        names = self.problem.masters
        if isinstance(master, str) and master in names:
            return names.index(master)
        if not isinstance(master, str) and 0 <= master < len(names):
            return int(master)
        raise PacelineError(f"master {master!r} is not in the plan: expected one of {', '.join(names)}")

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data.

        Returns:
            The overall ``t_star`` and one entry for each master, in milliseconds and rows.
        """
        whole, redundancy, copies, may_lose = self.rows_assigned, self.redundancy, self.copies, self.may_lose
        masters = [
            {
                "master": name,
                "t_star": float(self.t_star[m]),
                "rows": int(self.problem.rows[m]),
                "redundancy": float(redundancy[m]),
                "copies": float(copies[m]),
                "may_lose": int(may_lose[m]),
                "workers": [
                    {
                        "worker": self.problem.workers[n],
                        "load": float(self.loads[m, n]),
                        "rows_assigned": int(whole[m, n]),
                        "probability": float(self.probability[m, n]),
                    }
                    for n in self.workers_of(m)
                ],
            }
            for m, name in enumerate(self.problem.masters)
        ]
        return {
            "t_star": float(self.t_star.max()),
            "assign": self.assign,
            "coded": self.coded,
            "survive": self.survive,
            "masters": masters,
            "problem": self.problem.to_json(),
        }

    def dumps(self) -> str:
        """The plan as text, which ``read_plan`` reads from a file.

        Returns:
            ``to_json`` as JSON.
        """
        return json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"


def read_plan(path: Path) -> CodedPlan:
    """Read a plan that ``paceline plan --json`` or ``dumps`` has written.

    Args:
        path: A JSON file.

    Returns:
        The plan.

    Raises:
        PacelineError: For a file that cannot be read, or is not a plan.
    """
    try:
        with open_file(path) as file:
            found = json.load(file)
        problem = problem_from_json(found["problem"])
        k, loads = np.zeros(problem.shape), np.zeros(problem.shape)
        for m, master in enumerate(found["masters"]):
            for each in master["workers"]:
                n = problem.workers.index(each["worker"])
                k[m, n], loads[m, n] = each["probability"], each["load"]
        t_star = np.array([master["t_star"] for master in found["masters"]], float)
        return CodedPlan(problem, found["assign"], found["coded"], k, loads, t_star, found["survive"])
    except OSError as error:
        raise PacelineError(f"cannot read {path}: {error.strerror}; give the file of plan --json") from error
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PacelineError(
            f"{path} is not a plan ({error!r}): expected the file that paceline plan --json writes"
        ) from error


RULES = ("capped", "printed")


def finish(
    problem: Problem, assign: str, k: Array, coded: bool, phi: Array, rate: Array, rule: str = "capped"
) -> CodedPlan:
    """The plan for a given k: loads and times. Raises PacelineError if a master's rows are not covered.

    Without a code, L is divided among a master's workers: equally (Sun et al., benchmark 1), or else by mean speed.
    """
    if not coded:
        weight = (k > 0) / (1.0 if assign == "uniform" else problem.delay.mean())
        loads = problem.rows[:, None] * weight / weight.sum(1, keepdims=True)
        made = CodedPlan(problem, assign, coded, k, loads, problem.rows)
        return replace(made, t_star=expected_completion(problem, made.rows_assigned.astype(float)))
    t = completion(problem, k, rate)
    if not np.isfinite(t).all():
        name = problem.masters[int(np.argmax(~np.isfinite(t)))]
        raise PacelineError(
            f"the plan cannot cover the rows of master {name!r}: {assign!r} leaves it without workers; choose "
            "another assignment or add workers"
        )
    loads = coded_loads(problem, k, t, phi)
    if rule == "capped":
        loads, t = capped(problem, k, t, phi)
    k = np.where(loads > 0, k, 0.0)  # a worker whose latency exceeds t* is not used
    return CodedPlan(problem, assign, coded, k, loads, t)


def completion(problem: Problem, k: Array, rate: Array) -> Array:
    """t*, shape (M,): milliseconds until L rows are expected, sum_n k rate (t - d)+ = L; inf without workers.

    rate: rows per millisecond, shape (M, N), from ``Delay.peak``. Sun et al., eq. (3), Theorem 1.
    """
    brings = k * rate
    served = brings.sum(1) > 0
    # HiGHS may give -0.0 for k.
    slope = np.divide(1.0, brings, out=np.full(brings.shape, np.inf), where=brings > 0)
    cost = Linear(slope[served], problem.wait[served])
    result = np.full(len(brings), np.inf)
    result[served] = water_level(cost, problem.rows[served], most=np.inf).seconds
    return result


def coded_loads(problem: Problem, k: Array, t: Array, phi: Array) -> Array:
    """(t_m - d)+ / phi rows where k > 0, (M, N), not whole (Sun et al., eqs. (4), (5), (7), Lemma 1)."""
    spare = np.maximum(np.where(np.isfinite(t), t, 0.0)[:, None] - problem.wait, 0.0)
    return np.where(k > 0, spare / phi, 0.0)


def brought(problem: Problem, phi: Array, t: Array, masters: Any = slice(None)) -> Array:
    """Rows that each pair is expected to bring by t with its best load of at most L rows, (masters, N).

    For each t the best load is the smaller of L and (t - d) / phi, since l F((t - d) / l) rises up to there.
    t: milliseconds, one for each of the masters at this numpy index.
    """
    spare = np.maximum(t[:, None] - problem.wait[masters], 0.0)
    z = np.maximum(phi[masters], spare / problem.rows[masters][:, None])
    return spare / z * problem.delay.take(masters).cdf(z)


def capped(problem: Problem, k: Array, t: Array, phi: Array) -> tuple[Array, Array]:
    """(loads of at most L rows, (M, N); t*, (M,)), from the t* of Theorem 1, which does not limit the loads.

    t* is the least t for which L rows are expected. If a master's probabilities sum to 1 or less, no t suffices (a
    single worker brings L rows or none): its loads are cut to L, and t* stays that of the theorem.
    """
    t = t.copy()
    largest = coded_loads(problem, k, t, phi).max(1)
    over = np.flatnonzero((k.sum(1) > 1 + 1e-9) & (largest >= problem.rows))
    if len(over):

        def enough(at: Array) -> NDArray[np.bool_]:
            """Whether L rows are expected by then, for each of these masters."""
            return np.asarray((k[over] * brought(problem, phi, at, over)).sum(1) >= problem.rows[over])

        late = t[over]
        while not (done := enough(late)).all():
            late = np.where(done, late, 2 * late)
        # Measured times have steps: the end of the interval at which the rows suffice is kept.
        early = late / 2
        for _ in range(100):
            middle = 0.5 * (early + late)
            done = enough(middle)
            early, late = np.where(done, early, middle), np.where(done, middle, late)
        t[over] = late
    return np.minimum(coded_loads(problem, k, t, phi), problem.rows[:, None]), t


def expected_completion(problem: Problem, loads: Array) -> Array:
    """E[time until all of a master's workers are done], (M,), the integral of P[T > t]: an uncoded plan's t*."""
    result = np.zeros(len(loads))
    for m in range(len(loads)):
        mine = np.flatnonzero(loads[m] > 0)
        delay, load, wait = problem.delay.take((m, mine)), loads[m, mine], problem.wait[m, mine]

        def late(t: Array, delay: Delay = delay, load: Array = load, wait: Array = wait) -> Array:
            """P[some worker later than t]."""
            return 1 - np.prod(delay.cdf(np.maximum(t[:, None] - wait, 0.0) / load), axis=1)

        middle = end = float((wait + load * delay.mean()).max())
        while late(np.array([end]))[0] > 1e-12:
            end *= 1.5
        edges = np.concatenate([np.linspace(0.0, middle, 1001), np.geomspace(middle, end, 1001)[1:]])
        nodes, weights = np.polynomial.legendre.leggauss(4)
        half = 0.5 * np.diff(edges)
        t = (edges[:-1, None] + half[:, None] * (nodes + 1)).ravel()
        result[m] = float(late(t) @ (half[:, None] * weights).ravel())
    return result


def plan(problem: Problem, assign: str = "iterated", coded: bool = True, rule: str = "capped") -> CodedPlan:
    """Assign the workers and divide the rows so that the slowest master's t* is least (Sun et al., eq. (6)).

    Args:
        problem: The masters, their rows, and the workers.
        assign: One of ``ASSIGNMENTS``.
        coded: False divides L without redundancy, so that a master waits for all its workers; equally for "uniform",
            as in the paper's benchmark, otherwise by mean speed.
        rule: "capped" gives no worker more than L rows; "printed" has the loads of Theorem 1, which may be many times
            L.

    Returns:
        The plan, with fractional loads.

    Raises:
        PacelineError: For an unknown name, an uncoded probabilistic plan, and a master that cannot be covered.
    """
    switches(coded=coded)
    choice("rule", rule, *RULES)
    if not isinstance(assign, str) or assign not in ASSIGNMENTS:
        raise PacelineError(f"assign={assign!r}: expected one of {among(assign, ASSIGNMENTS)}")
    if not coded and assign == "probabilistic":
        raise PacelineError(
            f"an uncoded plan waits for all its workers, so {assign!r} cannot share workers between masters; "
            "choose uniform, simple, iterated or exact"
        )
    phi, rate = problem.delay.peak()
    k = assignment(problem, assign, phi, rate, rule if coded else "printed")
    return finish(problem, assign, k, coded, phi, rate, rule)


def assignment(problem: Problem, assign: str, phi: Array, rate: Array, rule: str = "capped") -> Array:
    """k for a problem (Sun et al., eq. (8)).

    With latencies, or if a load is cut to L, the value of a pair depends on the time: it is the portion of L rows
    that the pair brings by then. The assignment for one t gives a shorter t, and so on until t is no longer reduced
    (Dinkelbach's method: exact for the exact assignments, if each master has more than one worker).
    """
    choose = ASSIGNMENTS[assign]
    values = rate / problem.rows[:, None]
    k = choose(values)
    if assign == "uniform":
        return k

    def shortened(k: Array, portions: Callable[[float], Array], time: Callable[[Array], Array]) -> Array:
        t = time(k).max()
        for _ in range(50):
            if not np.isfinite(t):
                break
            trial = choose(np.maximum(portions(t) / t, values.max() * 1e-15))
            shorter = time(trial).max()
            if not shorter < t * (1 - 1e-12):
                break
            k, t = trial, shorter
        return k

    def printed(k: Array) -> Array:
        return completion(problem, k, rate)

    if problem.latency is not None:
        k = shortened(k, lambda t: values * np.maximum(t - problem.wait, 0.0), printed)
    t = printed(k)
    if (
        rule == "printed"
        or not np.isfinite(t).all()
        or (coded_loads(problem, k, t, phi).max(1) <= problem.rows).all()
    ):
        return k
    everyone = np.ones(len(values))
    return shortened(
        k,
        lambda t: brought(problem, phi, t * everyone) / problem.rows[:, None],
        lambda k: capped(problem, k, printed(k), phi)[1],
    )
