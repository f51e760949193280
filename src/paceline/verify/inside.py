"""Within a process of the program: give its ranks their loads, make all else the same, and record each step.

``enter`` is called where the program makes its first ``Pace``. From then on each Pace gets the loads of this run, its
loaders give samples their own random numbers, and each step of an optimizer is recorded just before it is taken.
After the last step the process waits for the other ranks, and ends.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset

from paceline.torch import peers
from paceline.torch.balanced import Balanced, Drawing, Exact
from paceline.torch.elastic.link import company
from paceline.torch.feed.sampler import BalancedSampler
from paceline.torch.host import Hosting
from paceline.torch.options import LOCAL, Options, min_samples_of
from paceline.torch.pace import Pace
from paceline.verify import record
from paceline.verify.draws import Collated, RowwiseDraws, Seeded
from paceline.verify.loads import divided
from paceline.verify.streams import Replayed
from paceline.verify.suspects import injecting

WRONG = "wrong"  # file that says why a program cannot be verified
FIRST = "equal"  # name of the run that all others are compared with
OF_STREAM = ("drop_last", "collate_fn")  # options of ``Pace.stream`` that are not those of a DataLoader
COSTS = ("cost", "padded", "micro_batch_cost")  # options of a loader that divide by cost
GENERATORS = ("Python's random", "NumPy")  # those that ``_generator_states`` reads


def enter(make: Callable[..., None], pace: Balanced, *arguments: Any, **named: Any) -> None:
    """Make the program's first ``Pace``, and watch it and all that follow."""
    inside = Inside(make, json.loads(os.environ[record.PLAN]))
    inside.watch()
    inside.made(pace, *arguments, **named)


class Inside:
    """One rank of one run. make: the constructor of ``Balanced``. plan: what ``command`` asks for."""

    def __init__(self, make: Callable[..., None], plan: dict[str, Any]) -> None:
        self._make, self._plan = make, plan
        self._place = Path(plan["place"])
        self._folder = self._place / plan["name"]
        self._folder.mkdir(exist_ok=True)
        self._rank, self._ranks = 0, 1
        self._record: Any = None  # a ``record.Writer``, once the rank is known
        self._draws = RowwiseDraws(self._found, plan["known"])
        self._draws.__enter__()
        self._paces: list[Any] = []
        self._samplers: dict[int, Any] = {}  # the Pace of each sampler, by the sampler's identity
        self._models: list[torch.nn.Module] = []
        self._names: dict[int, str] = {}  # of the models' parameters, by identity
        self._loads: list[int] = []
        self._steps: list[tuple[Any, int]] = []  # each optimizer, and how often it has stepped
        self._losses: list[list[Any]] = []  # samples, loss, reduction and count of this step's micro-steps
        self._metrics: list[list[Any]] = []  # name and value of each metric since the last step
        self._states: Any = None  # of Python's and NumPy's generators, when the micro-step began
        self._tried = plan["name"] != FIRST  # whether injected gradients have been looked for
        self._noted = False  # whether this micro-step's loss is known
        self._begun = False  # whether the modules that no Pace gets have their initial tensors
        self._seen: set[str] = set()  # what was found before

    # -- a Pace, and what it makes -------------------------------------------------------------------------------

    def made(self, pace: Any, model: Any, given: Options, *others: Any) -> None:
        """In place of ``Balanced.__init__``."""
        if given.elastic:
            company()  # only then the ranks are known
        self._rank, self._ranks = peers.rank(), peers.ranks()
        if self._record is None:
            self._record = record.Writer(self._folder / f"{self._rank}.jsonl")
        if given.loop == LOCAL:
            self._wrong(
                f"{type(pace).__name__} trains another model than one process does, so there is nothing to compare"
            )
        if self._ranks == 1:
            self._wrong("the program runs on 1 rank; expected at least 2, as with --nproc-per-node 3")
        # Else Pace refuses it.
        if isinstance(given.global_batch, int) and isinstance(model, torch.nn.Module):
            self._begin(model)
            self._loads = self._divided(model, given)
            given.limits = [(load, load) for load in self._loads]
        given.callbacks, given.drop = (), None  # these say where figures go, and leave out samples
        if not isinstance(given.policy, str):
            given.policy = "auto"
        self._make(pace, model, given, *others)
        self._paces.append(pace)
        self._record.line("pace", loads=self._loads, ranks=self._ranks, batch=int(given.global_batch))

    def watch(self) -> None:
        """Replace the methods by which the program meets its Paces, and notice optimizer steps."""
        Balanced.__init__ = self._method(self.made)  # type: ignore[method-assign]
        for owner, name, instead in (
            (Balanced, "loader", self._loader),
            (Pace, "batch_sampler", self._batch_sampler),
            (BalancedSampler, "begun", self._begun_by),
            (DataLoader, "__init__", self._data_loader),
            (Drawing, "stream", self._stream),
            (Drawing, "sizes", self._sizes),
            (Exact, "round", self._round),
            (Balanced, "backward", self._backward),
            (Pace, "weighted", self._backward),
            (Pace, "mean", functools.partial(self._metric, "pace.mean")),
            (Exact, "loss_now", functools.partial(self._metric, "pace.loss_now")),
            (Hosting, "weight", self._weight),
            (torch.Tensor, "backward", self._of_tensor),
        ):
            method = getattr(owner, name)
            setattr(owner, name, functools.wraps(method)(self._method(functools.partial(instead, method))))
        register_optimizer_step_pre_hook(self._before_step)
        warnings.showwarning = functools.partial(self._warned, warnings.showwarning)

    @staticmethod
    def _method(function: Callable[..., Any]) -> Any:
        return lambda *arguments, **named: function(*arguments, **named)

    def _begin(self, model: torch.nn.Module) -> None:
        """The same initial parameters in all runs, and layers without a memory of the batch."""
        number = len(self._models)
        self._models.append(model)
        names = {id(p): _short(name) for name, p in model.named_parameters()}
        self._names |= names
        tensors = [record.local(each).detach() for each in (*model.parameters(), *model.buffers())]
        apart = any(hasattr(each, "to_local") for each in model.parameters())
        path = self._place / f"start-{number}-{self._rank if apart else 0}.pt"
        if self._plan["name"] == FIRST:
            if apart or self._rank == 0:
                torch.save(tensors, path)
        else:
            for own, first in zip(tensors, torch.load(path, weights_only=True), strict=True):
                own.copy_(first)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not self._plan["batch_norm"]:
                module.eval()
                module.train = functools.partial(_same, module)  # type: ignore[assignment,method-assign]
                self._record.note("batch norm", name=_short(name))
            elif isinstance(module, torch.nn.RNNBase) and module.dropout:
                module.dropout = 0.0
                self._record.note("recurrent", name=_short(name))

    def _begin_others(self) -> None:
        """The same initial tensors in all runs for modules that no Pace gets, such as a generator. Each rank has its
        own, so that ranks that begin differently still differ."""
        path = self._place / f"others-{self._rank}.pt"
        found = {
            label: [record.local(each).detach() for each in tensors.values()]
            for label, tensors in self._others()
        }
        if self._plan["name"] == FIRST:
            torch.save(found, path)
            return
        first = torch.load(path, weights_only=True)
        for label, tensors in found.items():
            starts = first.get(label, [])
            if [each.shape for each in tensors] == [each.shape for each in starts]:
                for own, start in zip(tensors, starts, strict=True):
                    own.copy_(start)

    def _divided(self, model: torch.nn.Module, given: Options) -> list[int]:
        """The loads of this run."""
        batch, limits, unit = given.global_batch, given.limits, given.quantum
        min_samples = min_samples_of(model)
        pairs = [(None, None)] * self._ranks if limits is None or isinstance(limits, str) else limits
        most = [batch if high is None else high for _, high in pairs]
        if given.micro_batch and given.loop == "whole":
            most = [min(high, given.micro_batch * (given.micro_steps or 1)) for high in most]
        least = [min_samples if low is None else low for low, _ in pairs]
        for asked in self._plan["asked"]:
            if len(asked) != self._ranks or sum(asked) != batch:
                expected = f"{self._ranks} numbers, one for each rank, with the sum {batch}"
                self._wrong(f"--loads {'/'.join(map(str, asked))}: expected {expected}")
        kind = self._plan["loads"]
        if isinstance(kind, list):
            return kind
        found = divided(kind, batch, least, most, unit)
        if found is None:
            self._skip()
        return found

    def _loader(self, plain: Any, pace: Any, dataset: Any, *arguments: Any, **options: Any) -> Any:
        for name in COSTS:
            options.pop(name, None)
        if hasattr(dataset, "__len__"):
            batch = int(pace.host.terms.batch)
            short = 0 if options.get("drop_last") else batch - 1
            self._record.line("epoch", batches=(len(dataset) + short) // batch, between=1)
        if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__"):  # else Pace refuses it
            dataset = self._seeded(dataset, options)
        return self._noticed(pace, plain(pace, dataset, *arguments, **options), alone=False)

    def _seeded(self, dataset: Any, options: dict[str, Any]) -> Seeded:
        """The data set with random numbers of each sample's own; ``options`` of its loader may be changed."""
        seeded = Seeded(dataset, self._draws)
        if options.get("collate_fn") is not None:
            options["collate_fn"] = Collated(options["collate_fn"], seeded, self._draws)
        return seeded

    def _batch_sampler(self, plain: Any, pace: Any, dataset: Any, **options: Any) -> Any:
        if hasattr(dataset, "__len__"):
            batch = int(pace.host.terms.batch)
            short = 0 if options.get("drop_last") else batch - 1
            self._record.line("epoch", batches=(len(dataset) + short) // batch, between=1)
        sampler = plain(pace, dataset, **options)
        self._samplers[id(sampler)] = pace
        return sampler

    def _data_loader(self, plain: Any, loader: Any, dataset: Any, *arguments: Any, **options: Any) -> None:
        if isinstance(options.get("batch_sampler"), BalancedSampler):
            dataset = self._seeded(dataset, options)
        plain(loader, dataset, *arguments, **options)

    def _begun_by(self, plain: Any, sampler: Any) -> None:
        plain(sampler)
        self._micro_step(self._samplers[id(sampler)])

    def _stream(self, plain: Any, pace: Any, stream: Any, **options: Any) -> Any:
        if hasattr(stream, "__iter__") and not options.get("batches"):
            if isinstance(stream, IterableDataset):
                kept: dict[str, Any] = {name: options.pop(name) for name in OF_STREAM if name in options}
                stream = DataLoader(stream, batch_size=None, collate_fn=_as_it_is, **options)
                options = kept
            first = self._plan["name"] == FIRST
            batch = pace.host.terms.batch
            equal = divided("equal", batch, [0] * self._ranks, [batch] * self._ranks)
            assert equal is not None
            loads = None if first else self._loads
            stream = Replayed(stream, self._place, self._rank, equal, loads, self._plan["steps"])
        return self._noticed(pace, plain(pace, stream, **options), alone=True)

    def _sizes(self, plain: Any, pace: Any, *arguments: Any, **named: Any) -> Iterator[Any]:
        for size in plain(pace, *arguments, **named):
            self._micro_step(pace)
            yield size

    def _round(self, plain: Any, pace: Any, batch: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        def noticed(*parts: Any) -> Any:
            self._micro_step(pace)
            return function(*parts)

        return plain(pace, batch, noticed, *arguments, **named)

    def _noticed(self, pace: Any, loader: Any, alone: bool) -> Any:
        """The same loader, whose micro-steps are noticed. alone: each rank has its own samples."""
        kind, draws = type(loader), self._draws
        if not hasattr(kind, "noticed"):
            plain = kind.__iter__

            def iterate(self: Any) -> Iterator[Any]:
                batches = plain(self)
                try:
                    for batch in batches:
                        self.noticed()
                        yield batch
                finally:
                    draws.rows = None  # what is made between two loops belongs to no sample
                    batches.close()

            kind.__iter__, kind.noticed = iterate, None
        loader.noticed = functools.partial(self._micro_step, pace, alone)
        return loader

    # -- what happens in a step ----------------------------------------------------------------------------------

    def _micro_step(self, pace: Any, alone: bool = False) -> None:
        """A micro-step begins. alone: its samples are counted from the first one of this rank."""
        piece = pace.host.piece
        first = piece.start + (sum(self._loads[: self._rank]) if alone else 0)
        self._draws.begin(pace.rounds, range(first, first + max(piece.samples, 1)), piece.samples > 0)
        self._noted = False
        if not self._begun:
            self._begun = True
            self._begin_others()
        self._states = _generator_states()

    def _backward(self, plain: Any, pace: Any, loss: Any, *arguments: Any, **named: Any) -> Any:
        reduction, _, count = (*arguments, *(None,) * 3)[:3]
        self._loss(pace.host, loss, named.get("reduction", reduction), named.get("count", count))
        return plain(pace, loss, *arguments, **named)

    def _metric(self, name: str, plain: Any, pace: Any, *arguments: Any, **named: Any) -> Any:
        result = plain(pace, *arguments, **named)
        if isinstance(result, float) or result.numel() == 1:
            self._metrics.append([f"{name} {len(self._metrics) + 1}", float(result)])
        return result

    def _weight(
        self, plain: Any, host: Any, loss: Any = None, reduction: str = "mean", count: Any = None
    ) -> Any:
        self._loss(host, loss, reduction, count)
        return plain(host, loss, reduction, count)

    def _loss(self, host: Any, loss: Any, reduction: Any, count: Any) -> None:
        if (
            self._draws.watched
            and self._draws.counts
            and isinstance(loss, torch.Tensor)
            and loss.numel() == 1
        ):
            own = None if count is None else float(count)
            self._losses.append([host.piece.samples, float(loss.detach()), reduction or "mean", own])
            self._noted = True

    def _of_tensor(self, plain: Any, tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if not self._tried and self._draws.watched and self._draws.counts:
            self._tried = self._draws.refuses = True
            for name, file, line in injecting(tensor):
                self._record.note("injected", name=name, file=file, line=line)
            self._draws.refuses = False
        if self._paces and not self._noted:  # weigh="hook", which leaves the backward pass to the loop
            self._loss(self._paces[-1].host, tensor, None, None)
        return plain(tensor, *arguments, **named)

    def _found(self, kind: str, name: str, elements: int, where: tuple[str, int] | None) -> None:
        file, line = where or ("", 0)
        # The number of elements may go by the samples, so that only the first one is kept.
        key = f"{kind} {name} {file} {line} {elements if kind == 'rows' else ''}"
        if self._record is not None and key not in self._seen:
            self._seen.add(key)
            self._record.note(kind, name=name, elements=elements, file=file, line=line)

    def _warned(self, plain: Any, message: Any, category: Any, file: str, line: int, *others: Any) -> None:
        """A warning is about to be shown; those of Paceline may say what causes a difference."""
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") in ("warnings", __name__, "functools"):
            frame = frame.f_back
        owner = "" if frame is None else str(frame.f_globals.get("__name__"))
        if (
            self._record is not None
            and issubclass(category, RuntimeWarning)
            and owner.startswith("paceline.")
        ):
            self._record.note("warning", name=str(message), file=file, line=line)
        plain(message, category, file, line, *others)

    def _before_step(self, optimizer: Any, arguments: Any, named: Any) -> Any:
        closure = named.get("closure") if len(arguments) < 2 else arguments[1]
        if closure is None:
            self._step(optimizer)
            return None
        ran = False

        def noticed(*given: Any) -> Any:  # the backward pass runs within
            nonlocal ran
            result = closure(*given)
            if not ran:
                self._step(optimizer)
            ran = True
            return result

        if len(arguments) < 2:
            return arguments, {**named, "closure": noticed}
        return (arguments[0], noticed, *arguments[2:]), named

    def _step(self, optimizer: Any) -> None:
        """Record an optimizer's step, which is about to be taken."""
        rows, self._draws.rows, self._draws.watched = self._draws.rows, None, False
        if self._draws.counts and self._states is not None:
            for name, before, now in zip(GENERATORS, self._states, _generator_states(), strict=True):
                if before != now:
                    self._record.note("other draw", name=name)
        at = next((at for at, (each, _) in enumerate(self._steps) if each is optimizer), len(self._steps))
        if at == len(self._steps):
            self._steps.append((optimizer, 0))
        number = self._steps[at][1]
        self._steps[at] = optimizer, number + 1
        gradients, parameters = {}, {}
        for group, params in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(params["params"]):
                name = self._names.get(id(parameter), f"optimizer {at + 1}, group {group}, parameter {place}")
                gradients[name] = record.sketch(name, parameter.grad)
                parameters[name] = record.sketch(name, parameter)
        dtypes = {parameter.dtype for each in optimizer.param_groups for parameter in each["params"]}
        self._record.line(
            "step",
            optimizer=at,
            number=number,
            gradients=gradients,
            parameters=parameters,
            options=record.options(optimizer),
            states=self._state(),
            losses=self._losses,
            metrics=self._metrics,
            eps=max(self._draws.eps, *(torch.finfo(dtype).eps for dtype in dtypes)),
            apart=any(hasattr(p, "to_local") for each in optimizer.param_groups for p in each["params"]),
        )
        self._losses, self._metrics, self._draws.rows = [], [], rows
        if number + 1 >= self._plan["steps"]:
            record.leave(self._record, self._folder, self._rank, self._ranks)

    def _state(self) -> dict[str, record.Sketch]:
        """Buffers of the models, and the tensors of other modules, such as averages and teachers, by name."""
        found = {
            f"buffer {_short(name)}": record.sketch(name, each)
            for model in self._models
            for name, each in model.named_buffers()
        }
        for label, tensors in self._others():
            found |= {f"{label}.{name}": record.sketch(name, each) for name, each in tensors.items()}
        return found

    def _others(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Modules that no Pace gets, by kind, each with its tensors by name."""
        ours = {id(each) for model in self._models for each in model.modules()}
        others = [
            each
            for each in gc.get_objects()
            if issubclass(type(each), torch.nn.Module) and id(each) not in ours
        ]
        inner = {id(each) for other in others for each in list(other.modules())[1:]}
        roots = [each for each in others if id(each) not in inner]
        kinds: dict[str, int] = {}
        for root in roots:
            tensors = {**dict(root.named_parameters()), **dict(root.named_buffers())}
            if tensors and not all(id(each) in self._names for each in tensors.values()):
                kind = type(root).__name__
                kinds[kind] = kinds.get(kind, 0) + 1
                yield kind if kinds[kind] == 1 else f"{kind} {kinds[kind]}", tensors

    # -- the end -------------------------------------------------------------------------------------------------

    def _skip(self) -> NoReturn:
        """The limits of this Pace leave no room for such loads."""
        self._record.line("no room")
        os._exit(0)

    def _wrong(self, why: str) -> NoReturn:
        """The program cannot be verified."""
        (self._place / WRONG).write_text(why, encoding="utf-8")
        os._exit(0)


def _generator_states() -> tuple[Any, Any]:
    """The states of Python's and NumPy's generators."""
    return random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index]  # noqa: NPY002


def _same(module: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
    """``module.train`` of a layer that stays in evaluation mode."""
    return module


def _as_it_is(samples: Any) -> Any:
    return samples


def _short(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    for wrapper in ("_forward_module.", "module.", "_orig_mod."):
        name = name.removeprefix(wrapper)
    return name
