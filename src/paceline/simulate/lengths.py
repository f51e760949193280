"""The ``[samples]`` table of a scenario: what the samples of its data set cost."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator

from paceline.errors import PacelineError
from paceline.samples import CostModel, SampleCosts

LOGNORMAL, UNIFORM = DISTRIBUTIONS = ("lognormal", "uniform")
LARGEST = 1e12  # of a length


@dataclass(frozen=True)
class Samples:
    """Samples of unlike lengths; a worker's ``seconds_per_sample`` is then that of a mean sample.

    distribution: "lognormal", of which ``mu`` and ``sigma`` are mean and deviation of the logarithm, or "uniform".
    least, most: lengths are whole numbers cut to these. file: a text file with a length on each line instead.
    alpha: a sample of length L costs in proportion to L + alpha L^2, which Paceline is not told.
    padded: a micro-batch costs its size times its longest sample. launch: what each costs beyond that, in mean
    samples. micro_batch, micro_batch_cost: samples of a micro-batch at most, and their length (padded where so).
    """

    distribution: str = LOGNORMAL
    _: KW_ONLY
    mu: float = 5.0
    sigma: float = 1.0
    least: float = 1.0
    most: float = 1e6
    file: Path | None = None
    alpha: float = 0.0
    padded: bool = False
    launch: float = 0.0
    micro_batch: int | None = None
    micro_batch_cost: float | None = None
    micro_steps: int | None = None

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            raise PacelineError(
                f"distribution={self.distribution!r}: expected one of {', '.join(DISTRIBUTIONS)}, or a file"
            )
        if not 0 < self.least <= self.most <= LARGEST:
            raise PacelineError(
                f"least={self.least:g}, most={self.most:g}: expected 0 < least <= most <= {LARGEST:g}"
            )
        if not (abs(self.mu) <= 25 and 0 <= self.sigma <= 10):
            raise PacelineError(
                f"mu={self.mu:g}, sigma={self.sigma:g}: expected mu of -25 to 25 and sigma of 0 to 10"
            )
        for name, most in (("alpha", 1e6), ("launch", 1e6)):
            if not 0 <= getattr(self, name) <= most:
                raise PacelineError(f"{name}={getattr(self, name):g}: expected 0 to {most:g}")
        for name in ("micro_batch", "micro_steps"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise PacelineError(f"{name}={value}: expected at least 1")
        if self.micro_batch_cost is not None and not self.micro_batch_cost > 0:
            raise PacelineError(f"micro_batch_cost={self.micro_batch_cost:g}: expected a positive length")

    def costs(self, samples: int, rng: Generator) -> SampleCosts:
        """The lengths of a data set; of so many ``samples`` where they are drawn."""
        if self.file is not None:
            try:
                lengths = np.loadtxt(self.file, ndmin=1)
            except OSError as error:
                reason = error.strerror or "there is no such file"
                raise PacelineError(f"cannot read the lengths {self.file}: {reason}") from None
            except ValueError as error:
                raise PacelineError(
                    f"{self.file} holds no lengths: {error}; expected a number on each line"
                ) from None
            return SampleCosts.checked(lengths, len(lengths), str(self.file))
        if self.distribution == UNIFORM:
            drawn = rng.uniform(self.least, self.most, samples)
        else:
            drawn = rng.lognormal(self.mu, self.sigma, samples)
        return SampleCosts.checked(np.clip(np.rint(drawn), self.least, self.most), samples)

    def truth(self, costs: SampleCosts) -> CostModel:
        """What samples really cost."""
        return costs.with_alpha(self.alpha, self.launch, self.padded)
