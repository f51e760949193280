"""The clusters on which DOLBIE's experiments are run again.

Thirty workers, each one of five processors at random, a global batch of 256; paces and overheads drift. The paper's
own traces are not public. "measured" is built from published throughputs of CIFAR-10 training; A and B are the
two invented profiles, speeds and overheads in round numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.simulate import Scenario, WorkerClass
from paceline.simulate.timing import Ar1

PROCESSORS = ("V100", "P100", "T4", "Cascade Lake", "Broadwell")
COLOURS = ("tab:green", "tab:olive", "tab:blue", "tab:orange", "tab:red")
WORKERS, BATCH = 30, 256
PACE_SD, OVERHEAD_SD = 0.05, 0.1  # of the logarithms; correlation 0.9 from round to round

# ResNet-18 on CIFAR-10, seconds a sample and seconds a step: V100 and P100 fitted to the throughputs measured for
# Gavel (MIT licence), T4 read off a figure of Sia's; two Xeons take 21 to 32 times a P100 for a sample.
RESNET_SAMPLE = np.array([0.277e-3, 0.446e-3, 0.664e-3, 21 * 0.446e-3, 32 * 0.446e-3])
RESNET_STEP = np.array([24.2e-3, 18.9e-3, 17.7e-3, 18.9e-3, 18.9e-3])
LINK = 56e9 / 8  # bytes a second to the parameter server, as InfiniBand of those machines' time


class Network(NamedTuple):
    """A model's size: parameters, multiply-adds a sample of 32 x 32 pixels, layers with weights."""

    title: str
    parameters: int
    work: float
    layers: int


NETWORKS = {
    "lenet5": Network("LeNet-5", 62_006, 0.65e6, 5),
    "resnet18": Network("ResNet-18", 11_173_962, 556e6, 18),
    "vgg16": Network("VGG-16", 14_728_266, 313e6, 16),
}
LEAST_WORK = 0.02  # of ResNet-18's seconds a sample: loading it takes as long, whatever the network

POLICIES = {
    "EQU": "equal",
    "OGD": "ogd:rate=0.001",
    "LB-BSP": "lbbsp:delta=5,rounds=5",
    "ABS": "abs:window=5",
    "DOLBIE": "dolbie:alpha=0.001",
    "level": "level",
    "OPT": "optimum",
}
VARIANTS = {"DOLBIE, steps may grow": "dolbie:alpha=0.001,monotone=false", "ABS, x / T": "abs:reading=share"}


def measured(network: str, realizations: int = 1, rounds: int = 100) -> Scenario:
    """The cluster of measured throughputs, training that network.

    Seconds a sample grow with its multiply-adds, seconds a step with its layers; its parameters travel twice.
    """
    this, resnet = NETWORKS[network], NETWORKS["resnet18"]
    sample = RESNET_SAMPLE * max(this.work / resnet.work, LEAST_WORK)
    overhead = RESNET_STEP * this.layers / resnet.layers + 2 * 4 * this.parameters / LINK
    return _scenario(f"measured, {this.title}", sample, overhead, realizations, rounds)


def profile(name: str, realizations: int = 1, rounds: int = 100) -> Scenario:
    """Profile "A" or "B"."""
    speeds = {"A": (3000, 1700, 1000, 90, 45), "B": (3000, 1700, 1000, 40, 12)}[name]
    overheads = {"A": (0.02,) * 5, "B": (0.035, 0.03875, 0.0425, 0.04625, 0.05)}[name]
    sample = 1 / np.array(speeds, float)
    return _scenario(f"profile {name}", sample, np.array(overheads), realizations, rounds)


def settings(realizations: int) -> dict[str, Scenario]:
    """All three clusters, for experiments on ResNet-18 (DOLBIE, setting)."""
    return {
        "measured": measured("resnet18", realizations),
        "A": profile("A", realizations),
        "B": profile("B", realizations),
    }


def _scenario(
    name: str, sample: np.ndarray, overhead: np.ndarray, realizations: int, rounds: int
) -> Scenario:
    classes = tuple(
        WorkerClass(Ar1(s, 0.9, PACE_SD), Ar1(c, 0.9, OVERHEAD_SD), name=processor)
        for processor, s, c in zip(PROCESSORS, sample.tolist(), overhead.tolist(), strict=True)
    )
    return Scenario(
        classes,
        draw=WORKERS,
        global_batch=BATCH,
        rounds=rounds,
        realizations=realizations,
        fractional=True,
        name=name,
    )
