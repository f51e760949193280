"""Streams under the Hugging Face Trainer, see ``paceline.hosts.transformers``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from paceline.errors import PacelineError, refuse
from paceline.hosts.accumulating import HostedPace
from paceline.hosts.trainer_rounds import Rounds, TrainerRound
from paceline.torch import peers


class StreamedRounds(Rounds):
    """``Rounds`` of a stream, which all ranks share (see ``shares``), or of which each has a part (``part_of``)."""

    def __init__(self, trainer: Any, plain: Any) -> None:
        args = trainer.args
        reasons = {
            f"max_steps={args.max_steps} with a stream, whose samples are not counted; set max_steps to the number "
            "of optimizer steps": args.max_steps <= 0,
            "dispatch_batches=True lets rank 0 read for all ranks, and with Paceline each rank reads the stream; "
            "leave it out": trainer.accelerator.dispatch_batches,
            f"balance={{{', '.join(map(repr, trainer.loading))}}} needs samples that are known ahead, and a stream's "
            "are not; leave it out": trainer.loading,
        }
        refuse("BalancedTrainer", reasons)
        super().__init__(trainer, plain)
        self._shared = shares(trainer.train_dataset, args.world_size, trainer.shared)
        if not self._shared:
            self.dataset = part_of(trainer.train_dataset, args.process_index, args.world_size)
        self._drawn = [0] * args.world_size  # samples of this epoch that each rank has run
        self._resumed = False
        self._first = 0  # epoch of the stream in the Trainer's first epoch

    def state(self) -> dict[str, Any]:
        stream = {"drawn": list(self._drawn), "workers": self._workers, "shared": self._shared}
        return super().state() | {"stream": stream}

    def epoch_after(self) -> float:
        # As the Trainer counts if the length is unknown: a whole epoch is max_steps rounds, or the stream's end.
        done = -(-sum(self._drawn) // self.trainer.balance["global_batch"])
        return self.pace.epoch + done / self.trainer.args.max_steps

    def set_epoch(self, epoch: int) -> None:
        """Use the stream's order of this epoch, counted from the checkpoint."""
        self._choose(self._first + epoch)

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    def __iter__(self) -> Iterator[TrainerRound]:
        resumed, self._resumed = self._resumed, False
        if not resumed:
            self._drawn = [0] * peers.ranks()
        ran = False
        for each in self._epoch():
            ran = True
            yield each
        if resumed and not ran:  # the checkpoint was made at the end of the stream
            self._first += 1
            self._choose(self.pace.epoch)
            self._drawn = [0] * peers.ranks()
            yield from self._epoch()

    @property
    def _workers(self) -> int:
        return int(self._options["num_workers"])

    def _choose(self, epoch: int) -> None:
        """Take this epoch next, also within the stream."""
        self.pace.host.progress.choose(epoch)
        data, args = self.trainer.train_dataset, self.trainer.args
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        elif isinstance(generator := getattr(data, "generator", None), torch.Generator):
            generator.manual_seed((args.seed if args.data_seed is None else args.data_seed) + epoch)

    def _epoch(self) -> Iterator[TrainerRound]:
        """The rounds until the stream ends."""
        pace, micro_steps = self.pace, iter(self._loader)
        for first in micro_steps:
            plan = pace.host.piece.plan
            self._drawn = [before + int(load) for before, load in zip(self._drawn, plan.loads, strict=True)]
            yield TrainerRound(pace, chain([first], micro_steps), plan.batch)

    def _made(self, pace: HostedPace) -> Any:
        return pace.stream(self.dataset, shared=self._shared, **self._options)

    def _resume(self, saved: dict[str, Any] | None, steps: int) -> None:
        pace = self.pace
        if saved is not None:
            pace.load_state_dict(saved)
        self._first = pace.epoch
        if not self.trainer.reads_over:
            pace.host.progress.begin(pace.epoch)
            return
        stream = (saved or {}).get("stream")
        if stream is None and (pace.host.progress.samples_done or (saved is None and steps)):
            raise PacelineError(
                f"the checkpoint after step {steps} does not say how far each rank has read the stream; expected one "
                "of BalancedTrainer with a stream, or ignore_data_skip=True to begin the stream again"
            )
        if stream is None or not pace.host.progress.samples_done:
            return
        drawn, workers = stream["drawn"], stream["workers"]
        if (workers, stream["shared"]) != (self._workers, self._shared):
            raise PacelineError(
                f"the checkpoint was made within a stream by {workers} loading processes with 'shared': "
                f"{stream['shared']}, and this run has {self._workers} with {self._shared}; use the same, or "
                "ignore_data_skip=True"
            )
        if not self._shared and len(drawn) != peers.ranks():
            raise PacelineError(
                f"the checkpoint was made within a stream in {len(drawn)} parts, and this run has {peers.ranks()}; "
                "use as many, or ignore_data_skip=True to begin the stream again"
            )
        self._resumed = True
        self._drawn = [sum(drawn), *[0] * (peers.ranks() - 1)] if self._shared else list(drawn)
        self._loader.skip(sum(drawn) if self._shared else drawn[peers.rank()])


def shares(stream: Any, ranks: int, wanted: bool | None) -> bool:
    """Whether all ranks read the whole stream and divide each round, instead of reading a part each.

    wanted: the user's choice. By default they do, unless it is a stream of Hugging Face's datasets that was split by
    rank, or whose shards can be: then no rank reads what is not its own.
    """
    hugging = type(stream).__module__.partition(".")[0] == "datasets"
    split = hugging and getattr(stream, "_distributed", None) is not None
    if wanted and split:
        raise PacelineError(
            "balance={'shared': True}: train_dataset was split by split_dataset_by_node; expected the whole stream"
        )
    if wanted is not None:
        return wanted
    return not split and not (hugging and stream.num_shards % ranks == 0)


class StreamShard(IterableDataset[Any]):
    """This rank's samples of a stream that every rank reads in the same order: every n-th of n ranks'."""

    def __init__(self, stream: Any, rank: int, ranks: int) -> None:
        self._stream, self._rank, self._ranks = stream, rank, ranks
        if hasattr(stream, "set_epoch"):
            self.set_epoch = stream.set_epoch

    def __iter__(self) -> Iterator[Any]:
        return islice(self._stream, self._rank, None, self._ranks)


def part_of(stream: Any, rank: int, ranks: int) -> Any:
    """This rank's part of a stream. The parts of all ranks have each sample once.

    A stream of Hugging Face's datasets is split by ``split_dataset_by_node``: by shards if their number is a multiple
    of the ranks, else by samples. One that was split for these ranks already is taken as it is.
    """
    if ranks == 1:
        return stream
    if type(stream).__module__.partition(".")[0] != "datasets":
        return StreamShard(stream, rank, ranks)
    from datasets.distributed import split_dataset_by_node

    split = getattr(stream, "_distributed", None)
    if split is None:
        return split_dataset_by_node(stream, rank, ranks)
    if (split.rank, split.world_size) != (rank, ranks):
        raise PacelineError(
            f"train_dataset was split for rank {split.rank} of {split.world_size}; expected it for rank {rank} of "
            f"{ranks}, or without split_dataset_by_node"
        )
    return stream
