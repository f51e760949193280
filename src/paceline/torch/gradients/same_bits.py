"""Support for bitwise equal results: sums without rounding, and checks that kernels compute the same on every rank.

MKL, below torch, adds in another order if an array does not begin at a multiple of 64 bytes, with another number of
threads, and on another processor. Torch's own tensors do begin there; a numpy array begins anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.errors import PacelineError
from paceline.torch import peers
from paceline.torch.hooks_of_torch import is_dropout

ALIGNMENT = 64  # bytes
CPU_INFO = Path("/proc/cpuinfo")
COARSE, FINE = 2.0**20, 2.0**52  # coarse units in 1, and fine units in a coarse one
FINE_BITS = 52
# The bound of a gradient, and of a rank's part of a sum, beyond which the sum is NaN: 2048 ranks fit in int64.
LARGEST = 2.0**31


class ExactSum:
    """Accumulates the gradients of some parameters, piece after piece; their sum does not depend on the order of the
    additions, nor on which rank adds which piece.

    Each gradient is split into two whole numbers, in units of 2^-20 and 2^-72, which add without rounding. So the sum
    over all ranks and pieces has the same bits in any order (what is below 2^-73 is rounded once for each piece, in
    the same way on each rank). It takes 16 bytes a parameter beside the gradient, and as many in the all-reduce.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sizes = [p.numel() for p in self._parameters]
        self._total = sum(self._sizes)
        self._sums: torch.Tensor | None = None

    def add(self) -> None:
        """Add the parameters' gradients to the sums, and set them to None."""
        sums = self.gathered()
        start = 0
        for number, (p, size) in enumerate(zip(self._parameters, self._sizes, strict=True)):
            if p.grad is not None:
                coarse = p.grad.detach().double().reshape(-1) * COARSE
                wrong = ~(coarse.abs() < LARGEST * COARSE)  # NaN is wrong, too
                coarse = torch.where(wrong, 0.0, coarse)
                whole = coarse.round()
                end = start + size
                upper, lower = sums[start:end], sums[self._total + start : self._total + end]
                upper += whole.long()
                lower += ((coarse - whole) * FINE).round().long()
                _carry(upper, lower)
                sums[2 * self._total + number] += 1
                sums[-1] += wrong.sum() + (upper.abs() >= int(LARGEST * COARSE)).sum()
                p.grad = None
            start += size

    def finish(self) -> None:
        """Set the gradients of every rank's parameters to the sum over all ranks. Collective."""
        sums = self.gathered()
        if peers.ranks() > 1:
            torch.distributed.all_reduce(sums)
        self.give(sums)

    def give(self, sums: torch.Tensor) -> None:
        """Set the parameters' gradients to these sums, and forget what was accumulated."""
        start, failed = 0, bool(sums[-1])
        for number, (p, size) in enumerate(zip(self._parameters, self._sizes, strict=True)):
            if sums[2 * self._total + number]:  # else no piece of any rank used it
                upper, lower = sums[start : start + size], sums[self._total + start :][:size]
                _carry(upper, lower)
                grad = upper.double() / COARSE + lower.double() / (COARSE * FINE)
                grad = grad.to(p.dtype).reshape(p.shape)
                p.grad = torch.full_like(grad, torch.nan) if failed else grad
            start += size
        self.clear()

    def clear(self) -> None:
        """Forget what was accumulated."""
        self._sums = None

    def used(self) -> list[bool]:
        """For each parameter, whether a gradient of it was added."""
        return [bool(times) for times in self.gathered()[2 * self._total : -1].tolist()]

    def gathered(self) -> torch.Tensor:
        """The sums so far, as whole numbers that may be summed over ranks: int64, one dimension."""
        if self._sums is None:
            device = self._parameters[0].device if self._parameters else "cpu"
            self._sums = torch.zeros(2 * self._total + len(self._sizes) + 1, dtype=torch.int64, device=device)
        return self._sums


def _carry(upper: torch.Tensor, lower: torch.Tensor) -> None:
    """Bring each lower number into [0, 2^52), in place: then any number of pieces can be added, and the
    representation of a sum is unique."""
    carried = lower >> FINE_BITS
    upper += carried
    lower -= carried << FINE_BITS


def check_model(model: torch.nn.Module) -> None:
    """Raises PacelineError for a parameter or buffer that is not aligned (``begins_well``), and for dropout."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not begins_well(tensor):
            raise PacelineError(
                f"deterministic=True: {name} of the model does not begin at a multiple of {ALIGNMENT} bytes, so that "
                f"sums may use another order; give it its own memory first: {name}.data = {name}.data.clone()"
            )
    for name, module in model.named_modules():
        if _drops_out(module):
            raise PacelineError(
                f"deterministic=True: {name or type(model).__name__} of the model drops out at random, and each rank "
                "draws its own numbers, so that the result depends on the division; set its probability to 0"
            )


def check_ranks() -> None:
    """Raises PacelineError on every rank if two of them may compute different bits. Collective."""
    try:
        peers.agree(
            {
                "torch.__version__": str(torch.__version__),
                "torch.get_num_threads()": torch.get_num_threads(),
                "ATEN_CPU_CAPABILITY": torch.backends.cpu.get_cpu_capability(),
                "MKL_CBWR": os.environ.get("MKL_CBWR", ""),
                "processor": _processor(),
            }
        )
    except PacelineError as error:
        raise PacelineError(f"deterministic=True: {error}, or results depend on the division") from error


def begins_well(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins at a multiple of 64 bytes, so that sums use one order; True if it is not on the CPU."""
    strided = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return not strided or tensor.data_ptr() % ALIGNMENT == 0


def _drops_out(module: torch.nn.Module) -> bool:
    own = getattr(module, "p", 0) if is_dropout(module) else 0
    within = getattr(module, "dropout", 0)  # a number in attention and recurrent layers
    return any(isinstance(part, float | int) and part > 0 for part in (own, within))


def _processor() -> str:
    """The processor's model name as Linux gives it; empty if unknown."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
