"""What is trained changes in mid-run; groups smaller than the world; two models; the losses that people print."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from paceline.errors import PacelineError
from paceline.torch import ElasticPace, LocalSGD, Pace
from paceline.torch.callbacks import OnRound
from paceline.torch.feed.pieces import Order
from support.forks import all_well, as_torchrun, ended
from support.guarantees import guarantee
from support.ranks import errors_of, run_cases, run_ranks
from support.small_net import TWO, Samples, difference, fresh, optimizer_of

NAMES_LAYERS = guarantee(
    "A layer that is unfrozen or added in a run raises with its name; the ways that the message names "
    "train the model of one process."
)

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm")]


LOSS = nn.CrossEntropyLoss()


def raises(words: str) -> Any:
    return pytest.raises(PacelineError, match=re.escape(words))


def refused(pace: Pace, model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Rounds in which something else is to be trained: what was frozen, what was added, what the optimizer of another
    model moves; how many there were."""
    since = "which was not trained when Pace was made"
    for batch in pace.loader(Samples(16 * 5), seed=5):
        pace.round(batch, lambda x, y, _: LOSS(model(x), y))
        if pace.rounds == 1:
            module.second.bias.requires_grad_(True)
            with raises(f"second.bias, {since}"):
                pace.step(optimizer)
            module.second.bias.requires_grad_(False)
        if pace.rounds == 2:
            module.added = nn.Linear(3, 3).double()
            optimizer.add_param_group({"params": list(module.added.parameters())})
            with raises(f"added.weight, {since}"):
                pace.step(optimizer)
            optimizer.param_groups.pop()
        if pace.rounds == 3:
            other = torch.optim.SGD(module.added.parameters(), lr=0.1)
            for parameter in module.added.parameters():
                parameter.grad = torch.ones_like(parameter)
            with raises(f"added.weight, {since}"):
                other.step()
            if isinstance(pace, ElasticPace):
                with raises("LBFGS.step(closure) with ElasticPace, whose rounds may be run again"):
                    torch.optim.LBFGS([module.first.weight]).step(lambda: 0.0)
                with raises("the Adam that steps the model was not given to pace.register()"):
                    torch.optim.Adam([module.first.weight]).step()
                second = nn.Linear(3, 3)
                second(torch.ones(1, 3)).sum().backward()
                with pytest.warns(
                    RuntimeWarning, match="^an optimizer steps parameters that are not of the model"
                ):
                    torch.optim.SGD(second.parameters(), lr=0.1).step()
        pace.step(optimizer)
    return pace.rounds


def frozen() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = fresh(torch.float64)
    module.second.bias.requires_grad_(False)
    return module, optimizer_of(module)


def trained_in_mid_run(rank: int, ranks: int) -> int:
    module, optimizer = frozen()
    ddp = DistributedDataParallel(module)
    with Pace(ddp, 16, TWO, loop="round", limits=[(0, None)] * 2) as pace:
        return refused(pace, ddp, module, optimizer)


@NAMES_LAYERS
def test_layer_trained_in_mid_run_raises_before_a_step() -> None:
    assert run_ranks(2, trained_in_mid_run) == [5, 5], "the loop goes on without it"


SCRIPT = """
import torch
from paceline.torch import ElasticPace
from tests.torch.test_trained import frozen, refused

torch.set_num_threads(1)
module, optimizer = frozen()
with ElasticPace(module, 16) as pace:
    pace.register(optimizer)
    print(f"{refused(pace, module, module, optimizer)}\\n", end="", flush=True)
"""


@NAMES_LAYERS
def test_layer_trained_in_mid_run_raises_in_an_elastic_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "paceline.torch.launcher", "--workers", "2", "--max-restarts", "0"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [*launcher, str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "5\n5\n"


@NAMES_LAYERS
def test_layer_exchanged_for_one_of_the_same_size_raises_under_local_steps() -> None:
    module, loss_of = fresh(torch.float64), nn.CrossEntropyLoss()
    optimizer = optimizer_of(module)
    with LocalSGD(module, 16, every=1) as pace:
        for x, y, _ in pace.loader(Samples(16 * 3), seed=5):
            if pace.rounds == 1:
                module.second = copy.deepcopy(module.second)
                optimizer.param_groups[0]["params"] = list(module.parameters())
            pace.backward(loss_of(module(x), y))
            if pace.rounds == 1:
                with raises("second.weight, which was not trained when Pace was made"):
                    pace.step(optimizer)
                return
            pace.step(optimizer)
    pytest.fail("no second round")


def unfrozen(rank: int, ranks: int, anew: bool) -> float:
    """The difference from one process where a layer is trained from round 3 on: with a learning rate of 0 until then,
    or with DistributedDataParallel and Pace made ``anew``."""
    module, data = fresh(torch.float64), Samples(16 * 6)
    module.second.requires_grad_(not anew)
    groups = [
        {"params": list(module.first.parameters())},
        {"params": list(module.second.parameters()), "lr": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    ddp = DistributedDataParallel(module)
    pace = Pace(ddp, 16, TWO, limits=[(0, None)] * 2)
    loader = pace.loader(data, shuffle=False)
    while pace.host.progress.samples_done < 16 * 6:
        for x, y, _ in loader:
            pace.backward(LOSS(ddp(x), y))
            pace.step(optimizer)
            if pace.rounds == 3:
                break
        if pace.rounds != 3:
            break
        state = pace.state_dict()
        optimizer.param_groups[1]["lr"] = 0.1
        if anew:
            pace.host.detach()
            pace.host.release()
            module.second.requires_grad_(True)
            ddp = DistributedDataParallel(module)
            pace = Pace(ddp, 16, TWO, limits=[(0, None)] * 2)
            loader = pace.loader(data, shuffle=False)
        pace.load_state_dict(state)
    rounds = pace.rounds
    pace.host.detach()
    assert rounds == 6
    one = fresh(torch.float64)
    for number, chosen in enumerate(torch.arange(16 * 6).split(16)):
        one.zero_grad()
        LOSS(one(data.x[chosen]), data.y[chosen]).backward()
        with torch.no_grad():
            for name, parameter in one.named_parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad * (number >= 3 or name.startswith("first"))
    return difference(module.parameters(), one.parameters())


@NAMES_LAYERS
def test_advised_ways_to_unfreeze_train_the_model_of_one_process() -> None:
    for far in run_cases(2, unfrozen, {"rate": {"anew": False}, "anew": {"anew": True}}).values():
        assert max(far) < 1e-12


def in_two_groups(rank: int, ranks: int, everywhere: bool) -> None:
    """Each half of the ranks has a DistributedDataParallel module of its own; or only the first half a Pace, too."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = DistributedDataParallel(fresh(torch.float64), process_group=halves[rank // 2])
    if everywhere or rank < 2:
        Pace(ddp, 16)


@guarantee("A DDP module whose group is smaller than the world raises.")
@pytest.mark.parametrize("everywhere", [True, False])
def test_group_smaller_than_the_world_raises(everywhere: bool) -> None:
    sentences = errors_of(4, in_two_groups, everywhere)
    for sentence in sentences if everywhere else sentences[:2]:
        assert "in a group of 2 ranks, and 4 take part in the run" in sentence


EPOCHS = 5  # of 5 rounds: checks of a loop's first 17 rounds begin and end


class Maker(nn.Module):
    """Makes samples from noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.layers(noise)


class Judge(Maker):
    """Tells them from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def maker_and_judge() -> tuple[nn.Module, nn.Module, TensorDataset, Any, Any]:
    """Two models, real samples with the noise for as many others, and the optimizers of the judge and the maker."""
    torch.manual_seed(11)
    maker, judge = Maker().double(), Judge().double()
    data = TensorDataset(torch.randn(90, 6, dtype=torch.float64), torch.randn(90, 4, dtype=torch.float64))
    return maker, judge, data, *(torch.optim.Adam(each.parameters(), lr=0.01) for each in (judge, maker))


def says(judge: nn.Module, samples: torch.Tensor, real: float) -> torch.Tensor:
    out = judge(samples).squeeze(1)
    return nn.functional.binary_cross_entropy_with_logits(out, torch.full_like(out, real))


def two_models(rank: int, ranks: int, weigh: str, through: str, counted: bool) -> tuple[float, float]:
    """A generative adversarial network as docs/porting.md has it: the differences of both models from one process.

    through: the second backward pass goes through the first model's own module, or through its wrapper; or the first
    model is frozen meanwhile. counted: the samples of the first one are counted."""
    maker, judge, data, first, second = maker_and_judge()
    netg, netd = DistributedDataParallel(maker), DistributedDataParallel(judge)
    with Pace(netd, 20, TWO, limits=[(0, None)] * 2, weigh=weigh) as pace:
        for _ in range(EPOCHS):
            for real, noise in pace.loader(data, seed=5):
                judge.requires_grad_(True)
                netd.zero_grad()
                fake = netg(noise)
                loss = says(netd, real, 1.0) + says(judge, fake.detach(), 0.0)
                count = len(real) if counted else None
                loss.backward() if weigh == "hook" else pace.backward(loss, count=count)
                pace.step(first)
                netg.zero_grad()
                judge.requires_grad_(through != "frozen")
                pace.weighted(says(netd if through == "wrapper" else judge, fake, 1.0)).backward()
                second.step()
    one_maker, one_judge = alone()
    return (
        difference(maker.parameters(), one_maker.parameters()),
        difference(judge.parameters(), one_judge.parameters()),
    )


def alone() -> tuple[nn.Module, nn.Module]:
    """Both models, trained by one process in the ordinary way."""
    maker, judge, data, first, second = maker_and_judge()
    for epoch in range(EPOCHS):
        for chosen in torch.from_numpy(Order(90, 5).epoch(epoch)).split(20):
            real, noise = data[chosen]
            judge.zero_grad()
            fake = maker(noise)
            (says(judge, real, 1.0) + says(judge, fake.detach(), 0.0)).backward()
            first.step()
            maker.zero_grad()
            says(judge, fake, 1.0).backward()
            second.step()
    return maker, judge


@guarantee("Two models in one loop, as in a GAN, train as in one process; mistakes with them raise an error.")
@pytest.mark.parametrize(
    ("weigh", "through", "counted"),
    [
        ("loss", "module", False),
        ("loss", "wrapper", False),
        ("loss", "wrapper", True),
        ("loss", "frozen", False),
        ("hook", "module", False),
    ],
)
def test_two_models_equal_those_of_one_process(weigh: str, through: str, counted: bool) -> None:
    for found in run_ranks(2, two_models, weigh, through, counted):
        assert max(found) < 1e-12


def mistakes_with_two(rank: int, ranks: int) -> None:
    """The second model is handed to Pace, the first is not zeroed, or a count is given."""
    maker, judge, data, first, second = maker_and_judge()
    netg, netd = DistributedDataParallel(maker), DistributedDataParallel(judge)
    with Pace(netd, 20, TWO, limits=[(0, None)] * 2) as pace:
        with raises("outside of `for ... in pace.loader(...)`"):
            pace.weighted(torch.ones(()))
        for real, noise in pace.loader(data, seed=5):
            fake = netg(noise)
            loss = says(netd, real, 1.0) + says(judge, fake.detach(), 0.0)
            if pace.rounds == 1:
                with raises("another model has left gradients in this one"):
                    pace.backward(loss)
                break
            pace.backward(loss)
            pace.step(first)
            with raises("after the step of round 0") as behind:
                pace.backward(loss)
            assert "pace.weighted(loss).backward()" in str(behind.value)
            with raises(
                "without any parameter of this Pace's model; step another model's optimizer yourself"
            ):
                pace.step(second)
            with raises("count= is summed over the ranks for the model of this Pace alone"):
                pace.weighted(says(judge, fake, 1.0), count=3)
            pace.weighted(says(judge, fake, 1.0)).backward()
            second.step()
        assert pace.rounds == 1


@guarantee("Two models in one loop, as in a GAN, train as in one process; mistakes with them raise an error.")
def test_mistakes_with_two_models_raise() -> None:
    run_ranks(2, mistakes_with_two)


class Recurrent(nn.Module):
    """Gives the outputs and the last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.RNN(3, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, last = self.cells(x, state)
        return self.out(outputs).squeeze(2), last


def hidden_states(rank: int, ranks: int) -> float:
    """Chunks of 5 steps, each with the hidden states of the chunk before, which ranks exchange after the step as
    docs/porting.md has it; one rank has no work in some rounds. The difference from one process."""
    torch.manual_seed(3)
    model, chunks, columns = Recurrent().double(), 8, 16
    one = copy.deepcopy(model)
    x = torch.randn(chunks * columns, 5, 3, dtype=torch.float64)
    data = TensorDataset(torch.arange(columns).repeat(chunks), x, x.sum(2))
    ddp = DistributedDataParallel(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, one))
    state = kept = torch.zeros(1, columns, 4, dtype=torch.float64)
    with Pace(ddp, columns, TWO, limits=[(0, None)] * 2) as pace:
        for column, x, y in pace.loader(data, shuffle=False):
            out, last = ddp(x.transpose(0, 1), state[:, column].contiguous())
            pace.backward(nn.functional.mse_loss(out, y.T))
            pace.step(optimizer)
            state = torch.zeros_like(state)
            if pace.counts:
                state[:, column] = last.detach()
            dist.all_reduce(state)
    for first in range(0, chunks * columns, columns):
        _, x, y = data[first : first + columns]
        out, last = one(x.transpose(0, 1), kept)
        other.zero_grad()
        nn.functional.mse_loss(out, y.T).backward()
        other.step()
        kept = last.detach()
    return difference(model.parameters(), one.parameters())


@guarantee("Hidden states that ranks exchange after each step train the model of one process.")
def test_hidden_states_exchanged_after_the_step_are_those_of_one_process() -> None:
    assert max(run_ranks(2, hidden_states)) < 1e-12


def after_close(rank: int, ranks: int, weigh: str) -> tuple[float, float]:
    """A second phase with another batch, then a step of plain DDP: the differences from one process."""
    model, one, data = fresh(torch.float64), fresh(torch.float64), Samples(96)
    ddp, optimizer = DistributedDataParallel(model), optimizer_of(model)
    other = optimizer_of(one)
    for batch in (16, 32):
        with Pace(ddp, batch, TWO, limits=[(0, None)] * 2, weigh=weigh if batch == 32 else "loss") as pace:
            for x, y, _ in pace.loader(data, shuffle=False):
                pace.backward(LOSS(ddp(x), y))
                pace.step(optimizer)
        for chosen in torch.arange(96).split(batch):
            other.zero_grad()
            LOSS(one(data.x[chosen]), data.y[chosen]).backward()
            other.step()
    under_pace = difference(model.parameters(), one.parameters())
    own = slice(48 * rank, 48 * rank + 48)
    for net, part, taken in ((ddp, own, optimizer), (one, slice(None), other)):
        taken.zero_grad()
        LOSS(net(data.x[part]), data.y[part]).backward()
        taken.step()
    return under_pace, difference(model.parameters(), one.parameters())


@guarantee("After pace.close() the same DDP module trains under another Pace, and by itself.")
@pytest.mark.parametrize("weigh", ["loss", "hook"])
def test_model_trains_on_after_close_as_in_one_process(weigh: str) -> None:
    for found in run_ranks(2, after_close, weigh):
        assert max(found) < 1e-12


AT_THE_END = """
import atexit
import sys
import torch.distributed as dist

kept = []
atexit.register(lambda: print("at the end", kept[0].reducer, dist.is_initialized()))  # called after Pace's own

import torch
from torch.nn.parallel import DistributedDataParallel
from paceline.torch import Pace

dist.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
kept.append(ddp)
pace, optimizer = Pace(ddp, 8), torch.optim.SGD(ddp.parameters(), lr=0.1)
for (x,) in pace.loader(torch.utils.data.TensorDataset(torch.randn(16, 4))):
    pace.backward(ddp(x).square().mean())
    pace.step(optimizer)
if "close" in sys.argv:
    pace.close()
    assert ddp.reducer is not None
"""


@pytest.mark.parametrize("how", ["close", "open"])
def test_reducer_and_group_are_released_at_the_programs_end(tmp_path: Path, how: str) -> None:
    """Otherwise gloo's thread may abort the program while Python ends."""
    (tmp_path / "script.py").write_text(AT_THE_END)
    out, _ = all_well(as_torchrun(2), [tmp_path / "script.py", how])
    assert out.count("at the end None False") == 2, out


WEIGHTS = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)


def joined(
    rank: int,
    ranks: int,
    how: str = "DDP",
    counted: bool = False,
    normalised: bool = False,
    apart: str = "",
    **options: Any,
) -> float | str:
    """The loss has parameters outside of Pace's model: the largest difference from one process, or the message.

    how: their gradients are summed by a second ``DDP``, by the ``loop`` itself, or not at all: in one process,
    ``alone``, or by mistake, in ``none``. counted: class weights are counted; normalised: the loop divides by those
    of all ranks. apart: they have an optimizer of their own, which is stepped ``before`` or ``after`` pace.step.
    """

    def parts() -> tuple[nn.Module, nn.Module, list[torch.optim.Optimizer]]:
        model, head = fresh(torch.float64), nn.Linear(3, 3).double()
        own, others = [*model.parameters()], [*head.parameters()]
        groups = [own, others] if apart else [own + others]
        return model, head, [torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in groups]

    weights = WEIGHTS if counted or normalised else None
    data, (model, head, (first, *others)) = Samples(16 * 4), parts()
    one, its, optimizers = parts()
    for chosen in torch.from_numpy(Order(len(data), 5).epoch(0)).split(16):
        nn.functional.cross_entropy(its(one(data.x[chosen])), data.y[chosen], weights).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    ddp = model if how == "alone" else DistributedDataParallel(model)
    through = DistributedDataParallel(head) if how == "DDP" else head
    pace = Pace(ddp, 16, TWO if ranks == 2 else "equal", **options)
    try:
        for x, y, _ in pace.loader(data, seed=5):
            loss = nn.functional.cross_entropy(through(ddp(x)), y, weights)
            if normalised:
                total = WEIGHTS[y].sum()
                dist.all_reduce(total)
                pace.backward(loss * WEIGHTS[y].sum() / (total / ranks), "global")
            elif options:
                loss.backward()
            else:
                pace.backward(loss, count=WEIGHTS[y].sum() if counted else None)
            if how == "loop":
                for parameter in head.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= ranks
            if apart == "after":
                pace.step(first)
            for other in others:
                other.step()
                other.zero_grad()
            if apart != "after":
                pace.step(first)
    except PacelineError as error:
        return str(error)
    finally:
        pace.host.detach()
    return difference([*model.parameters(), *head.parameters()], [*one.parameters(), *its.parameters()])


OUTSIDE = guarantee(
    "Parameters of the loss outside of Pace's model train as in one process; where `count=` or `weigh='hook'` would "
    "not reach them, the optimizer's step raises."
)


@OUTSIDE
def test_parameters_outside_of_the_model_train_as_in_one_process() -> None:
    cases: dict[str, dict[str, Any]] = {
        "second DDP": {},
        "the loop's own sum": {"how": "loop"},
        "own optimizer": {"apart": "after"},
        "the total of all ranks": {"normalised": True},
    }
    for name, found in run_cases(2, joined, cases).items():
        assert all(isinstance(far, float) and far < 1e-12 for far in found), f"{name}: {found}"


def warned(rank: int, ranks: int, **how: Any) -> list[str]:
    """What ``joined`` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        joined(rank, ranks, **how)
    return [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]


@guarantee(
    "Parameters of the loss that no DDP and no sum of the loop reaches cause one warning on each rank."
)
def test_parameters_outside_of_the_model_that_nothing_sums_are_warned_of_once() -> None:
    cases: dict[str, dict[str, Any]] = {
        "one optimizer": {"how": "none"},
        "own optimizer": {"how": "none", "apart": "after"},
        "own optimizer, stepped before": {"how": "none", "apart": "before"},
    }
    for name, found in run_cases(2, warned, cases).items():
        for (words,) in found:
            assert "parameters of the loss outside of the model differ between ranks" in words, name
    right: dict[str, dict[str, Any]] = {
        "second DDP": {},
        "the loop's own sum": {"how": "loop"},
        "own optimizer": {"apart": "after"},
    }
    assert run_cases(2, warned, right) == {name: [[], []] for name in right}


def warned_under_local_steps(rank: int, ranks: int, within: bool) -> list[str]:
    """What is warned of if the loss has parameters outside of the model: its own, or (``within``) none."""
    model, head = fresh(torch.float64), nn.Linear(3, 3).double()
    inner, own = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(head.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught, LocalSGD(model, 16, "equal", every=2) as pace:
        warnings.simplefilter("always")
        for x, y, _ in pace.loader(Samples(16 * 8), seed=5):
            out = model(x)
            if within:  # a head with a loss of its own
                nn.functional.cross_entropy(head(out.detach()), y).backward()
            pace.backward(nn.functional.cross_entropy(out if within else head(out), y))
            own.step()
            own.zero_grad()
            pace.step(inner)
    return [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]


@guarantee(
    "Parameters of the loss that no DDP and no sum of the loop reaches cause one warning on each rank."
)
def test_parameters_of_the_loss_that_local_steps_do_not_merge_are_warned_of_once() -> None:
    found = run_cases(2, warned_under_local_steps, {"apart": {"within": False}, "own loss": {"within": True}})
    for (words,) in found["apart"]:
        assert "outside of the model differ between ranks" in words
        assert "expected one module with all parameters of the loss, given to LocalSGD, unless" in words
    assert found["own loss"] == [[], []]


@OUTSIDE
def test_parameters_that_an_option_does_not_reach_raise() -> None:
    cases: dict[str, dict[str, Any]] = {
        "second DDP": {"counted": True},
        "the loop's own sum": {"how": "loop", "counted": True},
        "stepped before": {"counted": True, "apart": "before"},
        "stepped after": {"counted": True, "apart": "after"},
        "hook": {"weigh": "hook"},
        "hook, stepped after": {"weigh": "hook", "apart": "after"},
        "hook, stepped before": {"weigh": "hook", "apart": "before"},
    }
    for name, found in run_cases(2, joined, cases).items():
        option = "weigh='hook'" if "hook" in name else "count="
        for message in found:
            assert f"of shape (3, 3) outside of the model, and {option} weights the model's" in str(
                message
            ), name


@OUTSIDE
def test_counted_loss_with_parameters_outside_of_the_model_raises_in_one_process() -> None:
    assert "count= weights the model's gradients alone" in str(joined(0, 1, how="alone", counted=True))
    far = joined(0, 1, how="alone")
    assert isinstance(far, float)
    assert far < 1e-12


def through_two(rank: int, ranks: int, loop: str, when: str) -> str | int:
    """A second DDP module in the loss, or with a backward pass of its own before or after that of a round: the
    message, or the rounds."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    head = DistributedDataParallel(nn.Linear(3, 3).double())
    optimizer = torch.optim.SGD([*ddp.parameters(), *head.parameters()], lr=0.1)
    limits = [(0, None)] * 2
    pace = Pace(ddp, 16, TWO, loop=loop, limits=limits, **({} if loop == "whole" else {"micro_batch": 4}))

    def loss_of(x: torch.Tensor, y: torch.Tensor, _: Any) -> torch.Tensor:
        return LOSS(head(ddp(x)) if when == "in the loss" else ddp(x), y)

    def own(of: torch.Tensor) -> None:
        head(of).square().mean().backward()

    ones = torch.ones(4, 3, dtype=torch.float64)
    try:
        for batch in pace.loader(Samples(16 * 5), seed=5):
            if when == "before":
                own(ones)
            if loop == "round":
                pace.round(batch, loss_of)
            else:
                pace.backward(loss_of(*batch))
            if pace.step(optimizer) and when == "after":
                own(ones)
    except PacelineError as error:
        pace._loop.failed(error)
        return str(error)
    pace.host.detach()
    return pace.rounds


@guarantee(
    "A collective within rounds whose micro-steps differ between ranks "
    "raises with its file and line, and does not hang."
)
@pytest.mark.parametrize("loop", ["round", "pieces"])
def test_second_ddp_module_in_the_loss_of_a_divided_round_raises(loop: str) -> None:
    for message in run_ranks(2, through_two, loop, "in the loss"):
        assert "round 0: a backward pass runs through a second DistributedDataParallel module" in str(message)
        assert f"of Linear, whose sums would hang since loop={loop!r} runs" in str(message)


@pytest.mark.parametrize(
    ("loop", "when"),
    [("whole", "in the loss"), ("round", "before"), ("round", "after"), ("pieces", "after")],
)
def test_second_ddp_module_with_as_many_passes_on_each_rank_runs(loop: str, when: str) -> None:
    assert run_ranks(2, through_two, loop, when) == [5, 5]


def test_second_model_in_micro_steps_raises() -> None:
    model = fresh(torch.float64)
    optimizer = optimizer_of(model)
    with Pace(model, 16, "equal", loop="pieces", micro_batch=8) as pace:
        for x, y, _ in pace.loader(Samples(16)):
            pace.backward(nn.functional.cross_entropy(model(x), y))
            if pace.step(optimizer):
                with pytest.raises(PacelineError, match="use loop='whole'"):
                    pace.weighted(torch.ones(()))


def losses(rank: int, ranks: int, counts: bool, loop: str) -> tuple[list[float], list[float]]:
    """What ``loss_now`` says behind the steps of some rounds, and what the record says."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, now, later = optimizer_of(ddp), [], []
    limit = {"micro_batch": 5} if loop == "pieces" else {}

    def heard(result: Any) -> None:
        later.append(result.loss)

    with Pace(ddp, 16, TWO, loop=loop, limits=[(0, None)] * 2, callbacks=[OnRound(heard)], **limit) as pace:
        for x, y, _ in pace.loader(Samples(83), seed=5):
            loss = LOSS(ddp(x), y)
            pace.backward(loss, count=len(x) if counts else None)
            if pace.complete and pace.rounds % 2:
                now.append(pace.loss_now())
                pace.step(optimizer)
            elif pace.step(optimizer):
                now.append(pace.loss_now())
            elif not now:
                with raises("no round is complete"):
                    pace.loss_now()
        pace.host.flush()
    return now, later


@guarantee(
    "`pace.mean`, `pace.gather` and `pace.loss_now()` count each sample of a round once, also with an idle "
    "rank."
)
@pytest.mark.parametrize(("counts", "loop"), [(False, "whole"), (True, "pieces")])
def test_loss_now_is_the_loss_of_the_round(counts: bool, loop: str) -> None:
    for now, later in run_ranks(2, losses, counts, loop):
        assert now == pytest.approx(later, rel=1e-12)
        assert len(now) == 6


def losses_of_passes(rank: int, ranks: int, passes: int) -> list[float]:
    """``loss_now`` of some rounds whose objective is a sum of two losses, weighted in so many passes."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, now = optimizer_of(ddp), []
    with Pace(ddp, 16, TWO, limits=[(0, None)] * 2) as pace:
        for x, y, _ in pace.loader(Samples(83), seed=5):
            loss = LOSS(ddp(x), y)
            if passes == 1:
                pace.backward(loss + ddp(-x).square().mean())
            else:
                pace.backward(loss)
                pace.weighted(ddp(-x).square().mean()).backward()
            now.append(pace.loss_now())
            pace.step(optimizer)
    return now


def test_loss_of_a_round_is_the_sum_of_its_weighted_losses() -> None:
    for once, twice in zip(run_ranks(2, losses_of_passes, 1), run_ranks(2, losses_of_passes, 2), strict=True):
        assert twice == pytest.approx(once, rel=1e-12)


def one_sample(rank: int, ranks: int) -> list[str]:
    """The notes of the error that a rank makes of a batch of one sample."""
    ddp = DistributedDataParallel(nn.Linear(6, 1).double())
    pace = Pace(ddp, 16, TWO, limits=[(1, None)] * 2)
    try:
        for x, _, _ in pace.loader(Samples(17, torch.float64), shuffle=False):
            out = ddp(x).squeeze()
            pace.backward(nn.functional.binary_cross_entropy_with_logits(out, torch.zeros(len(x)).double()))
            pace.step(torch.optim.SGD(ddp.parameters(), lr=0.1))
    except ValueError as error:
        pace._loop._lookout.explain(error)
        return error.__notes__
    return []


def test_failure_with_a_single_sample_names_the_option() -> None:
    for rank, (note,) in enumerate(run_ranks(2, one_sample)):
        assert f"rank {rank} was given a single sample in round 1" in note
        assert "Pace(..., limits=[(2, None)] * 2)" in note


def destroyed_by_the_script(rank: int, ranks: int) -> bool:
    """A script closes its Pace, and then destroys the process group that it has made."""
    with Pace(DistributedDataParallel(fresh(torch.float64)), 16) as pace:
        pass
    pace.close()
    dist.barrier()
    dist.destroy_process_group()
    return dist.is_initialized()


@guarantee("A script that closes Pace ends without an error, with or without `destroy_process_group()`.")
def test_script_may_destroy_its_process_group() -> None:
    assert run_ranks(2, destroyed_by_the_script) == [False, False]


@guarantee("A script that closes Pace ends without an error, with or without `destroy_process_group()`.")
def test_closed_script_ends_without_an_error(tmp_path: Path) -> None:
    """Two of them, each alone: one leaves its group, and one does not."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, torch, torch.distributed as dist
from paceline.torch import Pace
which = os.environ["RANK"]
dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store{{which}}", rank=0, world_size=1)
with Pace(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)), 8) as pace:
    pass
if which == "1":
    dist.destroy_process_group()
""")
    assert ended(as_torchrun(2), [script], whole=True) == [(0, "", "")] * 2
