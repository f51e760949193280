"""Balanced batches in a real Accelerate loop: exact, resumable, and clear about what it can't do."""

from __future__ import annotations

import copy
import random
import time
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.torch import peers
from support import hosts
from support.guarantees import guarantee
from support.hosts import (
    BATCH,
    COUNT,
    EPOCHS,
    FREE,
    SEED,
    UNEVEN,
    Found,
    Samples,
    Together,
    accelerator,
    fresh,
    optimizer_of,
)
from support.skips import skip_without

skip_without("accelerate")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]
together = Together()


class Run:
    """A training loop as Accelerate's users write it, up to any round, and from a checkpoint."""

    def __init__(
        self,
        ranks: int,
        dtype: torch.dtype = torch.float64,
        precision: str = "no",
        steps: int = 1,
        net: nn.Module | None = None,
        loading: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from paceline.hosts.accelerate import AcceleratePace

        self.accelerator = accelerator(mixed_precision=precision, gradient_accumulation_steps=steps)
        self.net = net or fresh(dtype)
        optimizer = optimizer_of(self.net)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(self.net, optimizer, scheduler)
        options = {"policy": UNEVEN, "limits": FREE[:ranks]} | options
        self.pace = AcceleratePace(self.accelerator, self.model, BATCH, **options)
        self.loader = self.pace.loader(Samples(COUNT, dtype), seed=SEED, **loading or {})
        self.used: list[list[int]] = []
        self.micro_steps = 0

    def train(
        self,
        rounds: int | None = None,
        clip: float | None = None,
        accumulate: bool = False,
        jitter: float = 0.0,
    ) -> None:
        """To the last epoch, or for so many rounds."""
        loss_of, stalls = nn.CrossEntropyLoss(), random.Random(peers.rank())
        for epoch in range(self.pace.epoch, EPOCHS):
            self.loader.set_epoch(epoch)
            self.used.append([])
            for x, y, index in self.loader:
                time.sleep(jitter * stalls.expovariate(1.0))
                self.used[-1] += index.tolist() if self.pace.counts else []
                self.micro_steps += 1
                if accumulate:
                    with self.accelerator.accumulate(self.model):
                        self._micro_step(loss_of(self.model(x), y), clip)
                else:
                    self._micro_step(loss_of(self.model(x), y), clip)
                if self.pace.rounds == rounds:
                    return

    def _micro_step(self, loss: torch.Tensor, clip: float | None) -> None:
        self.pace.backward(loss)
        if clip is not None and self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def end(self, clip: float | None = None) -> Trained:
        self.pace.host.detach()
        off = hosts.difference(self.net.parameters(), hosts.whole_batch(clip=clip))
        return Trained(off, self.used, self.micro_steps)


class Trained(NamedTuple):
    """off: how far the parameters are from those of one process. used: samples, by epoch."""

    off: float
    used: list[list[int]]
    micro_steps: int


def trained(
    ranks: int, clip: float | None = None, accumulate: bool = False, jitter: float = 0.0, **options: Any
) -> Trained:
    run = Run(ranks, **options)
    run.train(clip=clip, accumulate=accumulate, jitter=jitter)
    return run.end(clip)


@together
def plain(ranks: int, _: str) -> Trained:
    return trained(ranks)


@together
def clipped(ranks: int, _: str) -> Trained:
    return trained(ranks, clip=0.3)


def test_uneven_rounds_train_model_of_one_process(found: Found) -> None:
    for off, *_ in found[plain] + found[clipped]:
        assert off < 1e-12
    hosts.every_sample_once([rank.used for rank in found[plain]])


@together
def resumed(ranks: int, folder: str) -> tuple[Trained, Trained]:
    first = Run(ranks, policy="level", limits=None)
    first.train(rounds=8)
    first.accelerator.save_state(folder)
    return first.end(), continued(ranks, folder)


def continued(ranks: int, folder: str) -> Trained:
    run = Run(ranks, policy="level", limits=None)
    run.accelerator.load_state(folder)
    run.train()
    return run.end()


def test_resumed_run_trains_model_of_one_process(found: Found) -> None:
    assert max(then.off for _, then in found[resumed]) < 1e-12
    hosts.every_sample_once([[first.used[0], first.used[1] + then.used[0]] for first, then in found[resumed]])


def test_two_ranks_resume_after_three(found: Found, folder: str) -> None:
    both = hosts.run_bodies(2, [plain, continued], folder)
    assert max(off for off, *_ in both[plain] + both[continued]) < 1e-12
    hosts.every_sample_once([rank.used for rank in both[plain]])
    second = [i for first, _ in found[resumed] for i in first.used[1]]
    second += [i for rank in both[continued] for i in rank.used[0]]
    assert sorted(second) == list(range(COUNT))


@together
def scheduled(ranks: int, _: str) -> tuple[int, int]:
    run = Run(ranks)
    run.train()
    run.end()
    return run.scheduler.scheduler.last_epoch // ranks, run.pace.rounds


def test_scheduler_steps_with_the_rounds(found: Found) -> None:
    for steps, rounds in found[scheduled]:
        assert steps == rounds == 12


@together
def accumulated(ranks: int, _: str) -> list[tuple[Trained, int]]:
    found = []
    for accumulate in (False, True):
        run = Run(ranks, steps=2)
        run.train(accumulate=accumulate)
        found.append((run.end(), run.accelerator.gradient_accumulation_steps))
    return found


@guarantee(
    "Accelerate, Fabric, Lightning, the Trainer, TRL, sentence-transformers and Ray Train train the model of "
    "one process."
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_accumulating_accelerator_trains_model_of_one_process(found: Found, accumulate: bool) -> None:
    for (off, _, micro_steps), steps in (rank[accumulate] for rank in found[accumulated]):
        assert off < 1e-12
        assert micro_steps == 2 * 12, "every round takes two turns on every rank"
        assert steps == 2, "the Accelerator's own setting is as it was"


@together
def by_cost(ranks: int, _: str) -> dict[int, Trained]:
    loading = {"cost": hosts.COSTS, "padded": False}
    return {steps: trained(ranks, accumulate=steps > 1, steps=steps, loading=loading) for steps in (1, 2)}


@guarantee(
    "Accelerate, Fabric, Lightning, the Trainer, TRL, sentence-transformers and Ray Train train the model of "
    "one process."
)
@pytest.mark.parametrize("steps", [1, 2])
def test_samples_of_different_cost_train_model_of_one_process(found: Found, steps: int) -> None:
    for off, _, micro_steps in (rank[steps] for rank in found[by_cost]):
        assert off < 1e-12
        assert micro_steps == steps * 12
    hosts.every_sample_once([rank[steps].used for rank in found[by_cost]])


@together
def in_pieces(ranks: int, _: str) -> tuple[Trained, int | None]:
    run = Run(ranks, steps=2, loop="pieces")
    run.train(accumulate=True)
    return run.end(), run.pace.host.terms.micro_batch


def test_accumulating_in_pieces_trains_model_of_one_process(found: Found) -> None:
    for (off, _, micro_steps), micro_batch in found[in_pieces]:
        assert off < 1e-12
        assert micro_batch == 3  # 16 samples over 3 ranks and 2 steps
        assert micro_steps > 12, "some rounds took several micro-steps"


@together
def moved(ranks: int, _: str) -> list[Trained]:
    options = {"policy": "factoring", "limits": None, "loop": "pieces", "jitter": 2e-3}
    return [trained(ranks, accumulate=accumulate, **options) for accumulate in (False, True)]


@pytest.mark.parametrize("accumulate", [False, True])
def test_work_that_moves_within_rounds_trains_model_of_one_process(found: Found, accumulate: bool) -> None:
    cases = [rank[accumulate] for rank in found[moved]]
    hosts.every_sample_once([case.used for case in cases])
    assert max(case.off for case in cases) < 1e-12
    assert sum(case.micro_steps for case in cases) > 36


@together
def bf16(ranks: int, _: str) -> tuple[float, str]:
    run = Run(ranks, torch.float32, precision="bf16")
    seen: set[torch.dtype] = set()
    run.net.first.register_forward_hook(lambda _, __, out: seen.add(out.dtype))
    run.train()
    return run.end().off, str(seen)


def test_bf16_trains_model_of_one_process(found: Found) -> None:
    for off, dtypes in found[bf16]:
        assert dtypes == "{torch.bfloat16}"
        assert off < 0.02


@together
def evaluated(ranks: int, _: str) -> tuple[Any, Any]:
    """In mid-epoch of a balanced run, and without Paceline with the same parameters."""

    def evaluation(host: Any, model: nn.Module) -> Any:
        loader = host.prepare(torch.utils.data.DataLoader(Samples(COUNT), 7))
        return hosts.evaluation(model, loader, host.gather_for_metrics)

    run = Run(ranks, net=hosts.normed(), limits=None)
    run.train(rounds=3)
    state = copy.deepcopy(run.net.state_dict())
    ours = evaluation(run.accelerator, run.model)
    run.pace.host.detach()
    net, host = hosts.normed(), accelerator()
    net.load_state_dict(state)
    return ours, evaluation(host, host.prepare(net))


@guarantee("Evaluation within a balanced run gives the framework's own results.")
def test_evaluation_gives_results_without_paceline(found: Found) -> None:
    for ours, theirs in found[evaluated]:
        assert sum(map(len, ours)) == 3 * COUNT
        assert ours == theirs


@together
def refused(ranks: int, folder: str) -> dict[str, str]:
    """The error message of each mistake."""

    def forgets(run: Run, loss: torch.Tensor) -> None:
        run.accelerator.backward(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()

    def saves_early(run: Run, loss: torch.Tensor) -> None:
        run.pace.backward(loss)
        run.accelerator.save_state(folder + "/early")

    def changes(run: Run, loss: torch.Tensor) -> None:
        run.accelerator.sync_gradients = not run.accelerator.sync_gradients
        run.pace.backward(loss)

    says: dict[str, str] = {}
    mistakes: dict[str, tuple[dict[str, Any], Any]] = {
        "hook": ({"weigh": "hook"}, None),
        "early": ({}, saves_early),
        "changed": ({}, changes),
        "forgotten": ({}, lambda run, loss: run.accelerator.backward(loss)),
        "stepped without": ({}, forgets),
        "twice": ({"steps": 2, "accumulate": 2}, None),
        "both": ({"accumulate": 2, "loop": "pieces"}, None),
        "scaler": ({}, lambda run, loss: run.pace.backward(loss, scaler=object())),
        "skipping": ({}, lambda run, _: run.accelerator.skip_first_batches(run.loader, 2)),
    }
    for name, (options, micro_step) in mistakes.items():
        run = None
        try:
            run = Run(ranks, **options)
            for x, y, _ in run.loader:
                micro_step(run, nn.CrossEntropyLoss()(run.model(x), y))
            says[name] = "nothing was wrong"
        except (PacelineError, AttributeError) as error:
            says[name] = str(error)
        if run is not None:
            run.pace.host.detach()
    return says


@guarantee("Under Accelerate, a missing or early step, or `accelerator.backward`, raises before the step.")
def test_mistakes_raise(found: Found) -> None:
    for says in found[refused]:
        assert "use weigh='loss'" in says["hook"]
        assert "a checkpoint within round 0" in says["early"]
        assert "sync_gradients was changed" in says["changed"]
        assert "without pace.backward(loss)" in says["forgotten"]
        assert "scales by itself" in says["scaler"]
        assert "load the state of the pace, and leave skip_first_batches out" in says["skipping"]
        assert "a backward pass that is not Paceline's" in says["stepped without"]
        assert "accumulate=2 and gradient_accumulation_steps=2" in says["twice"]
        assert "with loop='pieces'" in says["both"]
