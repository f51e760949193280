"""Random numbers that belong to a sample, whichever rank runs it.

``RowwiseDraws`` sees each operation of torch in the training's thread. A random draw with a row for each sample of
the micro-step is made row by row, each seeded by (the step, the draw, the sample). Any other draw is seeded by (the
step, the draw), so that all ranks draw alike. The number of the draw is kept in torch's own generator, of which every
draw takes one number: so a forward pass that activation checkpointing repeats draws the same again.

``Seeded`` is a data set whose samples draw what their number says, in the training's process or a loader's.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.attach.places import place

Found = Callable[[str, str, int, tuple[str, int] | None], None]
"""Called with the kind of what was found, the operation, a number of elements, and the program's line."""
HERE = __file__
IGNORED = ("autograd/graph.py", "nn/parallel/distributed.py", "utils/data/", "/distributed/fsdp/")
NO_VALUES = ("barrier", "wait_tensor", "monitored_barrier_")  # collectives without a result
NESTED = 6  # levels in which a data set's own generators are looked for


def seeded(*numbers: int) -> int:
    """A seed made from these numbers, the same in every process."""
    return hash(numbers) % (2**31 - 1)


class RowwiseDraws(TorchDispatchMode):
    """Makes random draws row by row, and reports collectives and draws that belong to no sample to ``found``.

    known: of places (``compare.site``), the dimension that holds the samples, where a shape alone does not say it.
    """

    def __init__(self, found: Found, known: Mapping[str, int]) -> None:
        super().__init__()
        self._found, self._known = found, known
        self.rows: Sequence[int] | None = None  # the samples of the micro-step, None outside of one
        self.counts = False  # the micro-step's samples count
        self.watched = False  # a micro-step is running: from its batch to the optimizer's step
        self.eps = 0.0  # of the coarsest floating type of any result
        self.refuses = False  # a collective raises an error
        self._within = False  # a sample is being made

    def __reduce__(self) -> Any:  # a loader's process that is not a fork
        return RowwiseDraws, (_unheard, self._known)

    def begin(self, step: int, rows: Sequence[int], counts: bool) -> None:
        """A micro-step begins, which runs these samples."""
        self.rows, self.counts, self.watched = rows, counts, True
        seed_all(seeded(step, 1))

    @contextmanager
    def sample(self, *numbers: int) -> Iterator[None]:
        """Within it, all generators draw what these numbers say; afterwards they continue as before."""
        kept = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - the program may use it
        within, self._within = self._within, True
        seed_all(seeded(*numbers))
        try:
            yield
        finally:
            self._within = within
            torch.set_rng_state(kept[0])
            random.setstate(kept[1])
            np.random.set_state(kept[2])  # noqa: NPY002

    @contextmanager
    def batch(self, rows: Sequence[int]) -> Iterator[None]:
        """Within it, a batch of these samples is made: draws are made row by row."""
        kept = self.rows, self.watched
        self.rows, self.watched = rows, False
        try:
            with self.sample(2):
                self._within = False
                yield
        finally:
            self.rows, self.watched = kept

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space = f.namespace
        if space in ("c10d", "_c10d_functional"):
            self._collective(f, args)
        elif torch.Tag.nondeterministic_seeded in f.tags and self.rows is not None and not self._within:
            return self._drawn(f, args, kwargs)
        result = f(*args, **kwargs)
        if self.watched and isinstance(result, torch.Tensor) and result.is_floating_point():
            self.eps = max(self.eps, torch.finfo(result.dtype).eps)
        return result

    def _collective(self, f: Any, args: Any) -> None:
        name = f._schema.name.partition("::")[2]
        if self.refuses:
            raise RuntimeError(f"{name} in a backward pass that is only tried")
        if not self.watched or name in NO_VALUES:
            return
        if (where := _line()) is not None:
            self._found("collective", name.rstrip("_"), _elements(args), where)

    def _drawn(self, f: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of a random operation, row by row if it has a row for each sample."""
        generator = kwargs.get("generator")
        if generator is not None:
            kwargs = kwargs | {"generator": None}
        number = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
        after = torch.get_rng_state()
        try:
            torch.manual_seed(number)
            return self._by_row(f, args, kwargs, number)
        finally:
            torch.set_rng_state(after)

    def _rows_in(self, outs: list[Any], rows: int, name: str) -> tuple[int, int]:
        """The dimension in which these results have the same number of entries for each of so many samples, and that
        number; 0 if there is none."""
        if not rows or not all(isinstance(out, torch.Tensor) and out.dim() for out in outs):
            return 0, 0
        shapes = [out.shape for out in outs]
        fits = [at for at in range(min(map(len, shapes))) if all(shape[at] == rows for shape in shapes)]
        if not fits:
            many = rows > 1 and all(shape[0] and shape[0] % rows == 0 for shape in shapes)
            return 0, shapes[0][0] // rows if many else 0
        if rows > 1 and self.watched and self.counts and (where := _line()) is not None:
            if len(fits) > 1 and (known := self._known.get(f"{name} {where[0]}:{where[1]}")) in fits:
                return known, 1
            self._found("square draw" if len(fits) > 1 else "rows", name, fits[0], where)
        return fits[0], 1

    def _by_row(self, f: Any, args: Any, kwargs: dict[str, Any], number: int) -> Any:
        rows, in_place = self.rows or (), f._schema.is_mutable
        before = [each.clone() if in_place and isinstance(each, torch.Tensor) else each for each in args]
        result = f(*args, **kwargs)
        outs = list(result) if isinstance(result, (tuple, list)) else [result]
        at, each = (0, 0) if _among(f, args) else self._rows_in(outs, len(rows), f.name())
        if each == 0:
            if self.watched and self.counts and (where := _line()) is not None:
                size = sum(out.numel() for out in outs if isinstance(out, torch.Tensor))
                self._found("draw", f._schema.name.partition("::")[2].rstrip("_"), size, where)
            return result
        shape = list(outs[0].shape)
        for row, sample in enumerate(rows):
            torch.manual_seed(seeded(number, sample))
            own = [_row(value, shape, at, row * each, each) for value in before]
            named = {name: _row(value, shape, at, row * each, each) for name, value in kwargs.items()}
            made = f(*own, **named)
            made = own[:1] if in_place else made if isinstance(made, (tuple, list)) else (made,)
            for out, part in zip(outs, made, strict=False):
                out.narrow(at, row * each, each).copy_(part)
        return result


def _unheard(*_: Any) -> None:
    """A loader's process reports nothing."""


def _among(f: Any, args: Any) -> bool:
    """Whether an operation chooses among the entries of its only dimension, so that none can be drawn by itself."""
    name = f._schema.name
    return name == "aten::randperm" or (name == "aten::multinomial" and args[0].dim() == 1)


def _row(value: Any, shape: list[int], at: int, first: int, many: int) -> Any:
    """The part of an argument that belongs to one sample: of a tensor, or of the size of the result."""
    if isinstance(value, torch.Tensor):
        fits = value.dim() > at and value.shape[at] == shape[at]
        return value.narrow(at, first, many).clone() if fits else value
    if isinstance(value, (list, tuple)) and list(value) == shape:
        return [*shape[:at], many, *shape[at + 1 :]]
    return value


def _line() -> tuple[str, int] | None:
    """The program's line that calls this operation; None if Paceline, DistributedDataParallel or a loader does."""
    frame: Any = sys._getframe(1)
    torch_place = "/torch/"
    while frame is not None:
        name = frame.f_code.co_filename
        if name != HERE and torch_place not in name and not name.startswith("<"):
            break
        if any(part in name for part in IGNORED):
            return None
        frame = frame.f_back
    if frame is None or "/paceline/" in frame.f_code.co_filename:
        return None
    return place(frame) or (frame.f_code.co_filename, frame.f_lineno)


def _elements(args: Any) -> int:
    for value in args:
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, torch.Tensor):
            return value.numel()
    return 0


def seed_all(seed: int) -> None:
    """Seed torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


class Seeded(torch.utils.data.Dataset):
    """A data set whose samples draw random numbers by their own number."""

    def __init__(self, data: Any, draws: RowwiseDraws) -> None:
        self._data, self._draws = data, draws
        self._own = list(generators(data))
        self.fetched: list[int] = []  # samples since the last batch was made

    def __len__(self) -> int:
        return len(self._data)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._data, name)

    def __getitem__(self, index: int) -> Any:
        self.fetched.append(int(index))
        with self._draws.sample(0, int(index)):
            for generator in self._own:
                reseed(generator, seeded(3, int(index)))
            if hasattr(self._data, "__getitem__"):
                return self._data[index]
            return self._data.__getitems__([index])[0]


class Collated:
    """A collate function whose random draws are made by sample."""

    def __init__(self, collate: Callable[[list[Any]], Any], data: Seeded, draws: RowwiseDraws) -> None:
        self._collate, self._data, self._draws = collate, data, draws

    def __call__(self, samples: list[Any]) -> Any:
        rows = self._data.fetched[-len(samples) :]
        self._data.fetched.clear()
        with self._draws.batch(rows):
            return self._collate(samples)


def generators(thing: Any, levels: int = NESTED, seen: set[int] | None = None) -> Iterator[Any]:
    """The random generators that an object holds in its attributes, lists and mappings."""
    seen = set() if seen is None else seen
    if (
        levels == 0
        or id(thing) in seen
        or isinstance(thing, (str, bytes, int, float, np.ndarray, torch.Tensor))
    ):
        return
    seen.add(id(thing))
    if isinstance(thing, (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)):
        yield thing
        return
    parts: Any = ()
    if isinstance(thing, (list, tuple)):
        parts = thing[:100]
    elif isinstance(thing, dict):
        parts = list(thing.values())[:100]
    elif hasattr(thing, "__dict__"):
        parts = list(vars(thing).values())
    for part in parts:
        yield from generators(part, levels - 1, seen)


def reseed(generator: Any, seed: int) -> None:
    """Seed one of the kinds of generators that ``generators`` finds."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        kind = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    else:
        generator.seed(seed)
