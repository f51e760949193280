"""A matrix whose products survive slow, frozen and dead workers.

    with WorkerPool(plan.problem.workers) as pool, CodedMatrix(a, plan, "x", pool) as coded:
        y = coded @ x  # any number of times

The rows are encoded and placed once. A product multicasts x, collects blocks as they arrive, decodes as soon as they
suffice, and cancels the rest (Sun et al. 2019). Blocks arrive in parts, so that the work of stragglers is also used.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from paceline.coded.coded_plan import CodedPlan, capped, completion
from paceline.coded.delay import Array
from paceline.coded.layout import Layout, Moves, layout, relayout
from paceline.coded.problem import Observations, Problem
from paceline.errors import PacelineError, WorkerError, number, whole
from paceline.ray.pool import WorkerPool
from paceline.ray.start import Closing

_log = logging.getLogger(__name__)

TOLERATED = 64.0  # expected error, in units of the type's rounding, above which float32 waits for more blocks
UNEVEN = (
    1e3  # ratio of the rows' largest entries from which rows are brought to one size before they are encoded
)
BEHIND = 2  # unanswered turns, from which a worker is asked only if the others are too few


@dataclass(frozen=True)
class Product:
    """Figures of a product.

    seconds: until it was decoded. workers, blocks: that arrived in time. asked: the requested blocks.
    error: the expected error of the answer, relative to its norm, from rounding in the blocks that were decoded.
    """

    seconds: float
    workers: int
    blocks: int
    asked: int
    error: float


class CodedMatrix(Closing):
    """A master's matrix on the workers of a plan.

    A is real or complex, of single or double precision; other types become float64 or complex128. The product with
    a complex x is complex. Decoding multiplies rounding errors: ``last.error`` is the expected one, relative. float64
    is accurate to about 1e-10 with the blocks that suffice. float32 waits for further blocks until about 8e-6 is
    expected, but at most as long again as the product has taken; with too little redundancy, errors of 1e-3 remain.

    It serves as a ``scipy.sparse.linalg.LinearOperator`` (``aslinearoperator``), so that SciPy's solvers can use it.
    After ``pool.replace(name)`` the next product first places the blocks of that worker on the new one.

    A probabilistic plan draws a master for each worker and product, from ``seed``; if the drawn workers hold too few
    rows, the others are asked as well.

    Args:
        a: Shape (L, columns), finite; L as in the plan.
        plan: A plan with this master.
        master: Its name or position in the plan.
        pool: The workers; several masters can share one pool. None starts one, which ``close`` ends.
        messages: Parts in which a worker delivers its blocks.
        blocks: The number of blocks into which the matrix is divided (``coded.layout``).
        patience: Seconds after which workers that have not answered count as lost, if too few others are left.
        on_loss: "error" raises WorkerError if too few workers are left, "recode" first places the lost blocks on
            them.
        seed: Of a probabilistic plan's draws.
    """

    def __init__(
        self,
        a: Array,
        plan: CodedPlan,
        master: int | str = 0,
        pool: WorkerPool | None = None,
        messages: int = 1,
        blocks: int | None = None,
        patience: float = 60.0,
        on_loss: str = "error",
        seed: int = 0,
    ) -> None:
        self.closed = True  # until there are resources to close
        if on_loss not in ("error", "recode"):
            raise PacelineError(f"on_loss={on_loss!r}: expected 'error' or 'recode'")
        whole("messages", messages)
        whole("seed", seed, 0, 2**63 - 1)
        number("patience", patience, "a positive number of seconds", lambda seconds: seconds > 0)
        self.master = plan.master(master)
        self.a = _matrix(a, plan, self.master)
        self.dtype = self.a.dtype
        self.scale = _scale(self.a)
        if self.scale is not None:
            self.a = self.a / self.scale[:, None]
        self.plan, self.messages, self.seed = plan, messages, seed
        self._stretch = _stretch(plan, self.master)
        self.patience, self.on_loss = patience, on_loss
        found = layout(plan, self.master, blocks)
        self.names = plan.problem.workers
        if pool is not None and (unknown := [name for name in self.names if name not in pool.actors]):
            raise PacelineError(f"worker {unknown[0]!r} of the plan is not in the pool; start it there")
        self.own_pool = pool is None
        self.pool = WorkerPool(self.names) if pool is None else pool
        self.actors = [self.pool.actors[name] for name in self.names]
        self.key, self.turn = f"{plan.problem.masters[self.master]}/{uuid.uuid4().hex}", -1
        self.dead: set[int] = set()
        self.behind: dict[int, list[Any]] = {}  # by worker: the pending last answers of earlier turns
        self.observations = Observations(len(self.names))
        self.last: Product | None = None
        self.closed = False
        try:
            self._move(found, Moves(tuple(() for _ in self.names), found.owned))
        except BaseException:
            self.close()
            raise

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix."""
        return self.a.shape[0], self.a.shape[1]

    def __matmul__(self, x: Array) -> Array:
        """The product A x, for x of shape (columns,) or (columns, any).

        Raises PacelineError for an x that does not fit, WorkerError if too few workers are left.
        """
        self._open()
        x = np.asarray(x)
        if x.dtype.kind not in "fiubc":
            raise PacelineError(f"x of type {x.dtype}: expected numbers, real or complex")
        if x.ndim not in (1, 2) or len(x) != self.a.shape[1]:
            raise PacelineError(
                f"x of shape {x.shape}: expected {self.a.shape[1]} entries, a column of the matrix each"
            )
        if not np.isfinite(x).all():
            raise PacelineError(
                "x has entries that are not finite: decoding would spread them; correct x first"
            )
        # A real x takes the precision of the matrix; a complex one makes the product complex.
        x = x.astype(
            np.result_type(self.dtype, np.complex64) if x.dtype.kind == "c" else self.dtype, copy=False
        )
        if x.size == 0:  # no column to multiply
            return np.zeros((len(self.a), *x.shape[1:]), x.dtype)
        self._welcome()
        answer = self._product(x)
        if answer is None and self.on_loss == "recode":
            _log.info("%s lost: the blocks are placed on those left", self._lost())
            self.recode()
            answer = self._product(x)
        if answer is None:
            raise WorkerError(
                f"too few workers are left for this product (lost: {self._lost()}): start others, or call recode() "
                "to place the lost blocks on those left"
            )
        return answer if self.scale is None else answer * self.scale.reshape(-1, *[1] * (answer.ndim - 1))

    def matvec(self, x: Array) -> Array:
        """The product with a vector.

        Args:
            x: Shape (columns,) or (columns, 1).

        Returns:
            A x, shape (L,) or (L, 1).
        """
        return self @ x

    def matmat(self, x: Array) -> Array:
        """The product with a matrix.

        Args:
            x: Shape (columns, any).

        Returns:
            A X, shape (L, any).
        """
        return self @ x

    def recode(self) -> int:
        """Place the blocks of lost workers on those left, with the loads of Theorem 1 for them.

        Returns:
            Number of placed blocks.

        Raises:
            WorkerError: If none is left.
        """
        self._open()
        self._welcome()
        return self._follow_loads(self._reloaded(self.plan.problem), self.plan.survive)

    def replan(self) -> int:
        """Fit the observed delays, divide the rows again and move only blocks that change.

        Returns:
            Number of placed blocks.
        """
        self._open()
        self._welcome()
        problem = self.observations.fitted(self.plan.problem, self.master)
        loads = self._reloaded(problem)
        self.plan = replace(self.plan, problem=problem)
        return self._follow_loads(loads, self.plan.survive)

    def follow(self, plan: CodedPlan) -> int:
        """Change to another plan.

        Args:
            plan: A plan for this matrix and these workers.

        Returns:
            Number of placed blocks.

        Raises:
            PacelineError: If the plan has other workers, or other rows for this master.
        """
        self._open()
        self._welcome()
        if plan.problem.workers != self.names:
            raise PacelineError("the new plan names other workers: expected the same, in the same order")
        master = plan.master(self.plan.problem.masters[self.master])
        if plan.problem.rows[master] != len(self.a):
            raise PacelineError(
                f"the new plan has {plan.problem.rows[master]:.0f} rows for this matrix of {len(self.a)}"
            )
        placed = self._follow_loads(plan.loads[master], plan.survive)
        self.plan, self.master, self._stretch = plan, master, _stretch(plan, master)
        return placed

    def close(self) -> None:
        """Remove the blocks from the workers; end the pool if this matrix started it."""
        if self.closed:
            return
        self.closed = True
        if self.own_pool:
            self.pool.close()
            return
        for n, actor in enumerate(self.actors):
            if n not in self.dead and self.pool.actors:
                actor.cancel.remote(self.key, self.turn)
                actor.drop.remote(self.key)

    def _open(self) -> None:
        if self.closed:
            raise PacelineError("this coded matrix is closed; make a new one")

    def _product(self, x: Array) -> Array | None:
        """The product A x; None if the workers left do not suffice."""
        begin, left = time.perf_counter(), self.patience
        self.turn += 1
        asked = self._to_ask()
        pending = self._send(ray.put(x), asked)
        everything = sum(len(self.layout.owned[n]) for n in asked)
        code = self.layout.code
        enough, blocks = code.k, dict[int, Array]()  # the products that have arrived, by block
        unit = float(np.finfo(self.dtype).eps)
        sufficed = accurate = False
        # Rows and milliseconds of the workers that have answered.
        rows, took = Counter[int](), defaultdict[int, float](float)
        until = begin + self.patience
        while pending and not accurate and left > 0:
            left = until - time.perf_counter()
            # Fewer messages than these cannot suffice, so a single call waits for all of them.
            largest = max(len(indices) for _, indices in pending.values())
            few = min(max(-(-(enough - len(blocks)) // largest), 1), len(pending))
            ready, _ = ray.wait(list(pending), num_returns=few, timeout=max(left, 0.0))
            for answer in ready:
                n, indices = pending.pop(answer)
                value = self._get(answer, n)
                if value is None or (len(blocks) >= enough and not sufficed):
                    continue
                products, seconds = value
                blocks |= zip(indices, products, strict=True)
                rows[n] += len(indices) * self.layout.size
                took[n] += 1000 * seconds
            pending = {answer: about for answer, about in pending.items() if about[0] not in self.dead}
            if len(blocks) >= enough:
                accurate = unit < 1e-10 or code.amplification(blocks) <= TOLERATED
                if not sufficed:  # wait for accuracy, but not much longer than for the product itself
                    sufficed, now = True, time.perf_counter()
                    until = min(until, now + (now - begin))
        for n, answer in {about[0]: answer for answer, about in pending.items()}.items():
            self.actors[n].cancel.remote(self.key, self.turn)
            self.behind.setdefault(n, []).append(answer)
        for n in asked:
            if n in rows:
                self.observations.add(n, took[n], rows[n], True)
            elif n not in self.dead:
                first = len(_parts(self.layout.owned[n], self.messages)[0]) * self.layout.size
                self.observations.add(n, 1000 * (time.perf_counter() - begin), first, False)
        if len(blocks) < enough:
            return None
        result = code.decode(blocks, len(self.a))
        error = unit * code.amplification(blocks)
        self.last = Product(time.perf_counter() - begin, len(rows), len(blocks), everything, error)
        return result

    def _get(self, answer: Any, n: int) -> tuple[Array, float] | None:
        """A worker's answer; None if it was cancelled or lost."""
        try:
            value: tuple[Array, float] | None = ray.get(answer)
        except RayTaskError as error:
            raise WorkerError(f"worker {self.names[n]!r} failed: {error.cause!r}") from error
        except RayError:  # the worker died, or its node with the answer
            self.dead.add(n)
            return None
        return value

    def _catch_up(self) -> None:
        """Take the answers of earlier turns that have arrived since."""
        for n, answers in list(self.behind.items()):
            here, self.behind[n] = ray.wait(answers, num_returns=len(answers), timeout=0)
            for answer in here:  # ``_get`` notices whether the worker has died
                with contextlib.suppress(WorkerError):  # these products are no longer needed
                    self._get(answer, n)
            if not self.behind[n]:
                del self.behind[n]

    def _to_ask(self) -> list[int]:
        """The workers for this turn: those drawn and answering; with the others if these hold too few blocks."""
        self._catch_up()
        holding = [n for n, owned in enumerate(self.layout.owned) if owned and n not in self.dead]
        answering = [n for n in holding if len(self.behind.get(n, ())) < BEHIND]
        drawn = [n for n in answering if self._drawn(n)]
        for asked in (drawn, answering):
            if self.layout.enough(asked):
                return asked
        return holding

    def _drawn(self, n: int) -> bool:
        """Whether the worker serves this master in this turn; masters with the same seed draw alike in a turn."""
        chances = self.plan.probability[:, n]
        if chances[self.master] == 0 or chances[self.master] >= 1:
            return True
        draw = np.random.default_rng([self.seed, self.turn, n]).random()
        edge = float(chances[: self.master].sum())
        return bool(edge <= draw < edge + chances[self.master])

    def _send(self, x: Any, asked: list[int]) -> dict[Any, tuple[int, tuple[int, ...]]]:
        pending = {}
        parts = {n: _parts(self.layout.owned[n], self.messages) for n in asked}
        for i in range(self.messages):  # the first parts of all workers before the second ones
            for n in asked:
                if i < len(parts[n]):
                    answer = self.actors[n].multiply.remote(self.key, self.turn, parts[n][i], x)
                    pending[answer] = (n, parts[n][i])
        return pending

    def _lost(self) -> str:
        """The names of the workers that are dead or have not answered."""
        return ", ".join(self.names[n] for n in sorted(self.dead | set(self.behind)))

    def _reloaded(self, problem: Problem) -> Array:
        """The loads of this master's workers, 0 for lost ones, shape (N,)."""
        k = self.plan.probability.copy()
        mine, until = k[self.master].copy(), time.monotonic() + self.patience
        while True:  # if no worker has answered, some may still answer before the patience is over
            self._catch_up()
            late = {n for n, answers in self.behind.items() if len(answers) >= BEHIND or self._stuck(answers)}
            gone = sorted(self.dead | late)
            k[self.master] = mine
            k[self.master, gone] = 0.0
            if (k[self.master] > 0).any() or not late - self.dead or time.monotonic() > until:
                break
            time.sleep(0.01)
        if not (k[self.master] > 0).any():
            raise WorkerError("none of the workers of this matrix is left: replace one by pool.replace(name)")
        if not self.plan.coded:
            share = np.where(k[self.master] > 0, self.plan.loads[self.master], 0.0)
            return share * problem.rows[self.master] / share.sum()
        return np.minimum(self._stretch * _theorem_1(problem, k, self.master), problem.rows[self.master])

    def _stuck(self, answers: list[Any]) -> bool:
        """Whether a worker is silent for a second after its work was cancelled."""
        _, left = ray.wait(answers, num_returns=len(answers), timeout=min(1.0, self.patience))
        return bool(left)

    def _welcome(self) -> None:
        """Place the blocks of workers that the pool has replaced."""
        new = [n for n, name in enumerate(self.names) if self.pool.actors[name] is not self.actors[n]]
        for n in new:
            self.actors[n] = self.pool.actors[self.names[n]]
            self.behind.pop(n, None)
            self.dead.add(n)  # until its blocks are there
            owned = self.layout.owned[n]
            if owned:
                blocks = ray.put(np.stack(self.layout.code.encode(self.a, owned)))
                self._settle(n, self.actors[n].place.remote(self.key, owned, blocks))
            self.dead.discard(n)

    def _follow_loads(self, loads: Array, survive: int) -> int:
        new, moves = relayout(self.layout, loads, survive)
        self._move(new, moves)
        return sum(len(blocks) for blocks in moves.place)

    def _move(self, new: Layout, moves: Moves) -> None:
        """Place the new blocks, then drop the old ones. Raises WorkerError if a worker is lost; then the blocks that
        were placed are dropped again."""
        placed: list[int] = []
        waiting: list[tuple[int, Any]] = []
        try:
            for n, indices in enumerate(moves.place):
                if indices:
                    blocks = ray.put(np.stack(new.code.encode(self.a, indices)))
                    placed.append(n)
                    waiting.append((n, self.actors[n].place.remote(self.key, indices, blocks)))
                    # To bound the memory, only one set of blocks is sent while the next one is made.
                    if len(waiting) > 1:
                        self._settle(*waiting.pop(0))
            for n, answer in waiting:
                self._settle(n, answer)
        except BaseException:
            self._drop(placed, moves.place)
            raise
        self._drop(range(len(self.actors)), moves.drop)
        self.layout = new

    def _settle(self, n: int, answer: Any) -> None:
        try:
            ray.get(answer, timeout=self.patience)
        except (RayActorError, GetTimeoutError) as error:
            self.dead.add(n)
            raise WorkerError(
                f"worker {self.names[n]!r} was lost while its blocks were placed: start another by pool.replace, "
                "or plan without it"
            ) from error

    def _drop(self, workers: Iterable[int], blocks: tuple[tuple[int, ...], ...]) -> None:
        """Let workers drop blocks, without waiting for them."""
        for n in workers:
            if blocks[n] and n not in self.dead:
                self.actors[n].drop.remote(self.key, blocks[n])


def _stretch(plan: CodedPlan, master: int) -> float:
    """The rows of a plan for this master as a multiple of those of Theorem 1."""
    if not plan.coded:
        return 1.0
    return float(plan.loads[master].sum() / _theorem_1(plan.problem, plan.probability, master).sum())


def _theorem_1(problem: Problem, k: Array, master: int) -> Array:
    """The loads of one master's workers, at most L, shape (N,)."""
    phi, rate = problem.delay.peak()
    return np.asarray(capped(problem, k, completion(problem, k, rate), phi)[0][master])


def _parts(blocks: tuple[int, ...], messages: int) -> list[tuple[int, ...]]:
    """The blocks, in order, in at most ``messages`` parts of nearly equal size."""
    count = min(messages, len(blocks))
    # array_split would make the first parts larger, which would then arrive too late from a straggler.
    edges = [round(i * len(blocks) / count) for i in range(count + 1)]
    return [blocks[start:end] for start, end in pairwise(edges)]


def _matrix(a: Array, plan: CodedPlan, master: int) -> Array:
    """The matrix in single or double precision, real or complex, checked against the plan."""
    a = np.asarray(a)
    if a.ndim != 2 or a.dtype.kind not in "fiubc":
        raise PacelineError(
            f"a matrix of shape {a.shape} and type {a.dtype}: expected two dimensions of numbers"
        )
    rows = int(plan.problem.rows[master])
    if len(a) != rows:
        raise PacelineError(
            f"a matrix of {len(a)} rows for master {plan.problem.masters[master]!r}: the plan has {rows}; "
            "plan again"
        )
    if a.shape[1] < 1 or not np.isfinite(a).all():
        raise PacelineError(
            "the matrix has entries that are not finite, or no columns: correct it before it is encoded"
        )
    if a.dtype in (np.float32, np.float64, np.complex64, np.complex128):
        return a
    return a.astype(complex if a.dtype.kind == "c" else float)


def _scale(a: Array) -> Array | None:
    """Powers of two, shape (rows,), that bring rows of very different sizes to one size, which is exact; else None.

    Decoding spreads the rounding errors of large rows to all others, also to those that are much smaller.
    """
    sizes = np.abs(a).max(axis=1)
    there = sizes > 0
    if not there.any() or sizes[there].max() <= UNEVEN * sizes[there].min():
        return None
    scale = np.ones(len(a), sizes.dtype)
    scale[there] = np.exp2(np.floor(np.log2(sizes[there])))
    return scale
