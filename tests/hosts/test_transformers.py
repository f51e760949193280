"""Balanced batches under the real Hugging Face Trainer: exact, resumable, and clear about what it can't do."""

from __future__ import annotations

import contextlib
import copy
import random
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.torch.feed.pieces import Order
from support import hosts
from support.guarantees import guarantee
from support.hosts import COUNT, EPOCHS, FREE, SEED, UNEVEN, Found, Together, difference
from support.skips import skip_without
from support.trainers import (
    BATCH,
    Classifier,
    Lengthy,
    Named,
    Sentences,
    filled,
    language_model,
    sgd,
    trainer_of,
)

skip_without("transformers")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]
together = Together()


def whole(
    model: nn.Module, data: Any, clip: float = 0.0, collate: Any = None
) -> tuple[list[torch.Tensor], list[float]]:
    """The parameters of a plain process that takes each whole batch at once, and its losses."""
    from transformers import default_data_collator

    optimizer, _ = sgd(model)
    losses = []
    for epoch in range(EPOCHS):
        indices = Order(COUNT, SEED).epoch(epoch)
        for first in range(0, COUNT, BATCH):
            rows = [data[int(i)] for i in indices[first : first + BATCH]]
            batch = (collate or default_data_collator)(rows)
            loss = model(**batch)["loss"]
            loss.backward()
            losses.append(loss.item())
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], losses


def exactly(**options: Any) -> list[torch.Tensor]:
    """The classifier's parameters of a plain process."""
    return whole(Classifier(), Named(), **options)[0]


def classified(
    folder: str, stall: float = 0.0, resume: Any = None, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Classifier, list[list[int]], Any]:
    """Train a classifier; it, and the samples used in each epoch."""
    model = Classifier(dtype)
    trainer = trainer_of(folder, model, Named(dtype), **options)
    used: dict[int, list[int]] = {}
    stalls = random.Random(trainer.args.process_index)

    def note(indices: list[int]) -> None:
        time.sleep(stall * stalls.expovariate(1.0))
        if trainer.pace.counts:
            used.setdefault(trainer.pace.epoch, []).extend(indices)

    model.note = note
    trainer.train(resume_from_checkpoint=resume)
    return model, [used.get(epoch, []) for epoch in range(EPOCHS)], trainer


@together
def plain(ranks: int, folder: str) -> tuple[float, list[list[int]], tuple[int, float, int]]:
    model, used, trainer = classified(folder, ranks=ranks)
    state = trainer.state
    return difference(model.parameters(), exactly()), used, (state.global_step, state.epoch, state.max_steps)


def test_uneven_rounds_train_model_of_one_process(found: Found) -> None:
    for off, _, reported in found[plain]:
        assert off < 1e-12
        assert reported == (8, 2.0, 8)
    hosts.every_sample_once([used for _, used, _ in found[plain]])


@together
def clipped(_: int, folder: str) -> float:
    from paceline.hosts.transformers import BalancedTrainer

    class OwnLoss(BalancedTrainer):
        """As users do it: a loss of their own, which knows nothing of balancing."""

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(**inputs)
            loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    model, _, _ = classified(
        folder, clip=0.3, kind=OwnLoss, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        dataloader_num_workers=1,
    )  # fmt: skip
    return difference(model.parameters(), exactly(clip=0.3))


def test_accumulated_and_clipped_custom_loss_trains_model_of_one_process(found: Found) -> None:
    assert max(found[clipped]) < 1e-12


class Contrast(nn.Module):
    """A loss that is known by its name."""

    __module__ = "pytorch_metric_learning.losses.contrastive_loss"


@together
def comparing(_: int, folder: str) -> list[list[str]]:
    """The warnings of a loss that compares samples: of the model's loss, of an own one, and of a known one."""
    from paceline.hosts.transformers import BalancedTrainer

    class Known(BalancedTrainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(**inputs)
            loss = outputs["loss"] + outputs["logits"].var(0).sqrt().sum()
            return (loss, outputs) if return_outputs else loss

    class Own(Known):
        loss = None

    Known.loss = Contrast()

    found = []
    for kind in (BalancedTrainer, Own, Known):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            classified(folder, kind=kind, balance={"policy": UNEVEN, "limits": FREE})
        found.append([str(each.message) for each in caught if "compares the samples" in str(each.message)])
    return found


def test_loss_that_compares_samples_warns_once(found: Found) -> None:
    for rank, (plain, own, known) in enumerate(found[comparing]):
        assert plain == []
        assert ["the loss compares the samples of a micro-batch" in each for each in own] == [True]
        assert [each.startswith("Contrast compares") for each in known] == [True] * (rank == 0)


@together
def accumulated(_: int, folder: str) -> dict[str, Any]:
    from paceline.hosts.transformers import BalancedTrainer

    class GathersMetrics(BalancedTrainer):
        """As trl's trainers do: a metric of every micro-batch is gathered from all ranks within ``compute_loss``."""

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
            counts = self.accelerator.gather_for_metrics(torch.tensor(len(inputs["x"]) * self.pace.counts))
            assert len(counts) == self.args.world_size
            each = self.accelerator.gather_for_metrics(inputs["index"])
            assert len(each) == counts.sum()  # without samples that only fill up a rank's micro-steps
            self.gathered = [*getattr(self, "gathered", ()), *each.tolist()]
            return super().compute_loss(model, inputs, *arguments, **named)

    found = {}
    for loop, kind in (("whole", GathersMetrics), ("round", BalancedTrainer)):
        model, used, trainer = classified(
            folder, kind=kind, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            balance={"policy": UNEVEN, "limits": FREE, "loop": loop},
        )  # fmt: skip
        found[loop] = difference(model.parameters(), exactly()), used, trainer.pace.host.terms.loop
        if kind is GathersMetrics:
            found["gathered"] = sorted(trainer.gathered)
    return found


@guarantee(
    "Accelerate, Fabric, Lightning, the Trainer, TRL, sentence-transformers and Ray Train train the model of "
    "one process."
)
@pytest.mark.parametrize("loop", ["whole", "round"])
def test_accumulating_trainer_trains_model_of_one_process(found: Found, loop: str) -> None:
    for off, _, ran in (rank[loop] for rank in found[accumulated]):
        assert off < 1e-12
        assert ran == {"whole": "whole", "round": "pieces"}[loop]
    hosts.every_sample_once([rank[loop][1] for rank in found[accumulated]])


def test_gathered_metrics_have_each_sample_once_an_epoch(found: Found) -> None:
    assert all(rank["gathered"] == sorted([*range(COUNT)] * EPOCHS) for rank in found[accumulated])


@together
def dropped(_: int, folder: str) -> tuple[int, list[int]]:
    balance = {"global_batch": 36, "policy": UNEVEN}
    _, used, trainer = classified(folder, dataloader_drop_last=True, balance=balance)
    return trainer.state.global_step, [len(each) for each in used]


def test_short_last_batch_is_dropped_if_asked(found: Found) -> None:
    full = COUNT // 36
    assert all(steps == full * EPOCHS for steps, _ in found[dropped])
    assert [sum(each) for each in zip(*(sizes for _, sizes in found[dropped]), strict=True)] == [
        36 * full
    ] * 2


@together
def moved(_: int, folder: str) -> tuple[float, list[list[int]]]:
    model, used, _ = classified(folder, stall=2e-3, balance={"policy": "factoring", "loop": "round"})
    return difference(model.parameters(), exactly()), used


def test_work_that_moves_within_rounds_trains_model_of_one_process(found: Found) -> None:
    assert max(off for off, _ in found[moved]) < 1e-12
    hosts.every_sample_once([used for _, used in found[moved]])


def spoken(folder: str, data: Any, expected: Any, **options: Any) -> tuple[float, float, Any]:
    """How far a language model's parameters and first loss are from those of a plain process; its Trainer."""
    parameters, losses = expected
    speaker = language_model()
    trainer = trainer_of(folder, speaker, data, logging_strategy="epoch", **options)
    trainer.train()
    loss_off = trainer.state.log_history[0]["loss"] - sum(losses[:4]) / 4
    return difference(speaker.parameters(), parameters), abs(loss_off), trainer


@together
def over_tokens(_: int, folder: str) -> dict[int, Any]:
    expected, found = whole(language_model(), Sentences()), {}
    for steps in (1, 3):
        off, loss_off, trainer = spoken(
            folder, Sentences(), expected, per_device_train_batch_size=8 if steps == 1 else 3,
            gradient_accumulation_steps=steps, balance={"global_batch": BATCH, "policy": UNEVEN, "limits": FREE},
            include_num_input_tokens_seen="all",
        )  # fmt: skip
        found[steps] = off, loss_off, trainer.state.num_input_tokens_seen
    return found


@pytest.mark.parametrize("accumulation", [1, 3])
def test_loss_over_tokens_is_that_of_one_process(found: Found, accumulation: int) -> None:
    for off, loss_off, tokens in (rank[accumulation] for rank in found[over_tokens]):
        assert off < 1e-6  # the model's loss is float32
        assert loss_off < 1e-6
        assert tokens == 2 * 8 * COUNT


class Columns(Lengthy):
    """As the data sets of the Hub, with a column that tells the lengths."""

    column_names = ("input_ids", "labels", "tokens")

    def __getitem__(self, index: Any) -> Any:
        return self.lengths if index == "tokens" else super().__getitem__(index)


@together
def by_length(_: int, folder: str) -> dict[str, Any]:
    expected, found = whole(language_model(), Lengthy(), collate=filled), {}
    balance = {"policy": UNEVEN, "limits": FREE, "micro_batch_cost": 24, "loop": "round"}
    for strategy, data in (("group_by_length", Lengthy()), ("batch_rebalance", Columns())):
        off, loss_off, trainer = spoken(
            folder, data, expected, balance=balance, collate=filled, train_sampling_strategy=strategy,
            length_column_name="tokens",
        )  # fmt: skip
        lengths = trainer.pace.host.terms.balancer.learner.costs.lengths.tolist()
        found[strategy] = off, loss_off, lengths == data.lengths
    return found


@guarantee("`train_sampling_strategy` divides rounds by length, with the gradient and loss of one process.")
@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_sampling_by_length_balances_by_length(found: Found, strategy: str) -> None:
    for off, loss_off, lengths_are_known in (rank[strategy] for rank in found[by_length]):
        assert off < 1e-6  # the model's loss is float32
        assert loss_off < 1e-6
        assert lengths_are_known


SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 6, "balance": {"policy": "level"}}


@together
def resumed(_: int, folder: str) -> dict[str, Any]:
    from transformers import TrainerCallback

    from paceline.hosts.transformers import BalancedTrainer

    place = folder + "/saved"
    _, before, _ = classified(place, max_steps=6, **SAVES)
    found = {}

    class Notes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            epochs.append(state.epoch)

    class WithNotes(BalancedTrainer):
        def __init__(self, **options: Any) -> None:
            super().__init__(callbacks=[Notes()], **options)

    for name, extra in (("resumed", {}), ("restored", {"restore_callback_states_from_checkpoint": True})):
        epochs: list[float] = []
        model, after, trainer = classified(
            place,
            kind=WithNotes,
            resume=place + "/checkpoint-6",
            eval_strategy="steps",
            eval_steps=1,
            **SAVES,
            **extra,
        )
        found[name] = difference(model.parameters(), exactly()), before, after, trainer.state.epoch
        found[name] += (epochs,)
    return found


@pytest.mark.parametrize("how", ["resumed", "restored"])
def test_resumed_run_trains_model_of_one_process(found: Found, how: str) -> None:
    used = []
    for off, before, after, epoch, seen in (rank[how] for rank in found[resumed]):
        assert seen == [1.75, 2.0]  # by a callback of the user
        assert off < 1e-12
        assert epoch == 2.0
        used.append([first + second for first, second in zip(before, after, strict=True)])
    hosts.every_sample_once(used)


def continued(ranks: int, folder: str) -> tuple[float, list[list[int]]]:
    before = folder + "/saved/checkpoint-6"
    model, after, _ = classified(folder, ranks=ranks, balance={"policy": "level"}, resume=before)
    return difference(model.parameters(), exactly()), after


def test_two_ranks_resume_after_three(found: Found, folder: str) -> None:
    both = hosts.run_bodies(2, [plain, continued], folder)
    assert max(off for off, *_ in both[plain] + both[continued]) < 1e-12
    hosts.every_sample_once([used for _, used, _ in both[plain]])
    second = [i for rank in found[resumed] for i in rank["resumed"][1][1]]
    second += [i for _, after in both[continued] for i in after[1]]
    assert sorted(second) == list(range(COUNT))


@together
def repeated(_: int, folder: str) -> dict[str, Any]:
    """By what ended the first ``train()``: the second one's steps, its samples in each epoch, and its last epoch."""
    from transformers import TrainerCallback

    class Interrupts(TrainerCallback):
        at = 0  # the step that is interrupted when it ends

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self.at:
                self.at = 0
                raise KeyboardInterrupt

    found = {}
    for ended in ("complete", "max_steps", "between steps", "within a step"):
        model = Classifier()
        trainer = trainer_of(folder, model, Named(), max_steps=3 if ended == "max_steps" else -1)
        trainer.add_callback(interrupts := Interrupts())
        interrupts.at = 2 if ended == "between steps" else 0
        within = iter(range(3, 0, -1) if ended == "within a step" else ())
        used: dict[int, list[int]] = {}

        def note(indices: list[int], trainer: Any = trainer, within: Any = within, used: Any = used) -> None:
            if next(within, None) == 1:
                raise KeyboardInterrupt
            if trainer.pace.counts:
                used.setdefault(trainer.pace.epoch, []).extend(indices)

        model.note = note
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train()
        used.clear()
        trainer.args.max_steps = -1
        trainer.train()
        found[ended] = (
            trainer.state.global_step,
            trainer.state.epoch,
            [used.get(e, []) for e in range(EPOCHS)],
        )
    return found


@guarantee(
    "A second `train()` of one Trainer trains all its epochs from the first sample, also after Ctrl-C."
)
@pytest.mark.parametrize("ended", ["complete", "max_steps", "between steps", "within a step"])
def test_second_train_of_one_trainer_uses_every_sample_once(found: Found, ended: str) -> None:
    assert all(rank[ended][:2] == (8, 2.0) for rank in found[repeated])
    hosts.every_sample_once([rank[ended][2] for rank in found[repeated]])


@together
def changed(ranks: int, folder: str) -> list[tuple[int, int, float]]:
    """Steps, global batch, and the distance from one process, after sizes in ``args`` were changed."""
    found = []
    for changes in (
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 4},
    ):
        model = Classifier()
        trainer = trainer_of(folder, model, Named(), ranks=ranks)
        for name, value in changes.items():
            setattr(trainer.args, name, value)
        trainer.train()
        off = difference(model.parameters(), exactly())
        found.append((trainer.state.global_step, trainer.balance["global_batch"], off))
    return found


def test_sizes_that_are_changed_in_args_hold_in_the_next_train(found: Found) -> None:
    for (steps, batch, off), (short_steps, short_batch, _) in found[changed]:
        assert (steps, batch) == (2 * 4, BATCH)
        assert off < 1e-12
        assert (short_steps, short_batch) == (2 * 7, BATCH // 2)


@together
def bf16(_: int, folder: str) -> tuple[float, str]:
    model, _, _ = classified(folder, dtype=torch.float32, bf16=True)
    return difference(model.parameters(), exactly()), str(model.dtypes)


def test_bf16_trains_model_of_one_process(found: Found) -> None:
    for off, dtypes in found[bf16]:
        assert dtypes == "{torch.bfloat16}"
        assert off < 0.02


class Normed(Classifier):
    """A classifier whose evaluation depends on what batch norm saw in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(self.norm(x), labels, index)


@together
def evaluated(ranks: int, folder: str) -> list[tuple[float, float]]:
    """(the balanced Trainer's eval_loss, a plain Trainer's) before, during and after training, for three kinds
    of loss; at last the sum of what ``predict`` gave each."""
    from transformers import Trainer, TrainerCallback

    class Keeps(TrainerCallback):
        def on_evaluate(self, *_: Any, model: Any = None, metrics: Any = None, **__: Any) -> None:
            kept.append((metrics["eval_loss"], copy.deepcopy(model.state_dict())))

    pairs = []
    for model, data, options in (
        (language_model(), Sentences(), {}),
        (language_model(), Sentences(), {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}),
        (Normed(), Named(), {}),
    ):
        kept: list[tuple[float, Any]] = []  # each evaluation's loss, and the model that it was made with
        settings: dict[str, Any] = {"per_device_eval_batch_size": 5, "ranks": ranks, **options}
        trainer = trainer_of(
            folder, model, data, balance={"policy": "level"}, num_train_epochs=1,
            eval_strategy="steps", eval_steps=1, eval_on_start=True, **settings,
        )  # fmt: skip
        trainer.add_callback(Keeps())
        trainer.train()
        host = trainer_of(folder, copy.deepcopy(model), data, kind=Trainer, **settings)
        for loss, state in kept:
            host.model.load_state_dict(state)
            pairs.append((loss, host.evaluate()["eval_loss"]))
        ours, theirs = trainer.predict(data), host.predict(data)
        pairs.append((float(ours.predictions.sum()), float(theirs.predictions.sum())))
    return pairs


@guarantee("Evaluation within a balanced run gives the framework's own results.")
def test_evaluation_gives_results_of_plain_trainer(found: Found) -> None:
    for pairs in found[evaluated]:
        assert len(pairs) == (1 + 4 + 1) + (1 + 2 + 1) + (1 + 4 + 1)
        assert all(ours == theirs for ours, theirs in pairs), pairs


def own_step(base: Any) -> Any:
    """A Trainer with the usual training_step of users, copied from the Trainer's."""

    class OwnStep(base):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss.detach()

    return OwnStep


@together
def evaluated_first(ranks: int, folder: str) -> float:
    """An evaluation before training leaves the Trainer's model without DDP."""
    model = Classifier()
    trainer = trainer_of(folder, model, Named(), ranks=ranks)
    trainer.evaluate()
    trainer.train()
    return difference(model.parameters(), exactly())


def test_training_after_an_evaluation_trains_model_of_one_process(found: Found) -> None:
    assert max(found[evaluated_first]) < 1e-12


@together
def stepped(_: int, folder: str) -> float:
    from transformers import Trainer

    from paceline.hosts.transformers import BalancedTrainer

    class First(BalancedTrainer, own_step(Trainer)):  # type: ignore[misc]
        pass

    return difference(classified(folder, kind=First)[0].parameters(), exactly())


def test_training_step_of_a_second_base_gets_each_micro_batch(found: Found) -> None:
    assert max(found[stepped]) < 1e-12


@pytest.mark.parametrize(
    "read",
    [
        lambda inputs: inputs["labels"],
        lambda inputs: inputs.get("labels"),
        lambda inputs: inputs.pop("labels", None),
        lambda inputs: (lambda **_: None)(**inputs),
        list,
        len,
    ],
)
def test_round_that_is_read_as_a_batch_raises(read: Any) -> None:
    trainer_rounds = pytest.importorskip("paceline.hosts.trainer_rounds")
    with pytest.raises(PacelineError, match="drawn while it runs; override compute_loss"):
        read(trainer_rounds.TrainerRound(None, iter([]), 4))


@together
def refused(_: int, folder: str) -> dict[str, str]:
    """The error message of each mistake."""
    from transformers import Trainer

    from paceline.hosts.transformers import BalancedTrainer

    class OwnBatches(BalancedTrainer):
        def get_batch_samples(self, *arguments: Any) -> Any:
            batches, items = super().get_batch_samples(*arguments)
            self.labels = sum(len(batch["labels"]) for batch in batches)
            return batches, items

    class OwnLoader(BalancedTrainer):
        def get_train_dataloader(self) -> Any:
            return Trainer.get_train_dataloader(self)

    class OwnSampler(BalancedTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.WeightedRandomSampler([1.0, 2.0] * 9, 18)

    says: dict[str, str] = {}
    mistakes: dict[str, dict[str, Any]] = {
        "looped": {"balance": {"loop": "pieces"}},
        "searched": {"auto_find_batch_size": True},
        "loader": {"kind": OwnLoader},
        "sampler": {"kind": OwnSampler},
        "streamed": {"max_steps": 3},
        "step": {"kind": own_step(BalancedTrainer)},
        "batches": {"kind": OwnBatches},
    }
    for name, options in mistakes.items():
        try:
            data = iter([1, 2]) if name == "streamed" else Named()
            trainer_of(folder, Classifier(), data, **options).train()
            says[name] = "nothing was wrong"
        except PacelineError as error:
            says[name] = str(error)
    return says


@guarantee("A Trainer with its own sampler raises with the sampler's name.")
def test_mistakes_raise(found: Found) -> None:
    for says in found[refused]:
        assert "expected 'whole' or 'round'" in says["looped"]
        assert "auto_find_batch_size=True" in says["searched"]
        assert "get_train_dataloader() was overridden" in says["loader"]
        assert "drawn by a WeightedRandomSampler" in says["sampler"]
        assert "the data set is a list_iterator" in says["streamed"]
        assert all("override compute_loss, or let" in says[name] for name in ("step", "batches"))


def test_gathered_slice_is_sent_without_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("paceline.hosts.transformers")
    sent: list[Any] = []
    monkeypatch.setattr(transformers.peers, "gather", lambda item: [sent.append(item), item][1:])
    whole = torch.arange(8000.0).reshape(1000, 8)
    assert torch.equal(transformers._gather_unlike(whole[5:7]), whole[5:7])
    assert sent[0].untyped_storage().nbytes() == 2 * 8 * 4
