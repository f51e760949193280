"""DOLBIE's Figs. 6 to 8: training accuracy against time.

The global batch is the same under every policy, so all have the same steps: the network is trained once, and
the policies differ in the time at which each step is done. The real training is on the embedded digits, with B = 256.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.commands import installation
from paceline.data import datasets
from paceline.errors import PacelineError
from paceline.papers import Found, table
from paceline.papers.dolbie import BATCH, NETWORKS, POLICIES, RIVALS, VARIANTS, measured
from paceline.simulate import run
from paceline.simulate.plots import figure

EPOCHS = {"lenet5": (60, 15), "resnet18": (20, 3), "vgg16": (16, 1)}  # full, quick
QUICK_SAMPLES = {"lenet5": None, "resnet18": 512, "vgg16": 64}  # of the training set
RATE = 0.1
TARGET = 0.95  # training accuracy
PAPER_ROUNDS = 20 * 196  # the steps of 20 epochs of CIFAR-10's 50,000 images, about those to 95 % accuracy
CLAIMED = {
    "lenet5": "DOLBIE needs 27.6 % less time than LB-BSP to 95 % training accuracy",
    "resnet18": "to 95 % training accuracy DOLBIE needs 78.1/67.4/46.9/34.1 % less time than EQU/OGD/LB-BSP/ABS",
    "vgg16": "DOLBIE needs 83.2 % less time than LB-BSP to 95 % training accuracy",
}


def fig6(quick: bool) -> Found:
    """Training accuracy of LeNet-5 against time (DOLBIE, Fig. 6)."""
    return _accuracy(quick, "lenet5")


def fig7(quick: bool) -> Found:
    """Training accuracy of ResNet-18 against time (DOLBIE, Fig. 7)."""
    return _accuracy(quick, "resnet18")


def fig8(quick: bool) -> Found:
    """Training accuracy of VGG-16 against time (DOLBIE, Fig. 8)."""
    return _accuracy(quick, "vgg16")


def trained(network: str, epochs: int, samples: int | None = None) -> list[float]:
    """Training accuracy of each step's batch, before the step; seed 0.

    samples: the number of the training set's first samples to use; None for all.
    """
    try:
        import torch
        from torch import nn
    except ModuleNotFoundError as error:
        raise PacelineError(f"the networks need PyTorch; {installation('torch')}") from error
    from paceline.learners import models

    data = datasets.load("digits")
    images = torch.from_numpy(datasets.floats(data.x_train[:samples]))
    labels = torch.from_numpy(data.y_train[:samples]).long()
    torch.manual_seed(0)
    model = models.create(network, data.shape, data.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    order = np.random.default_rng(0)
    accuracy = []
    for _ in range(epochs):
        for batch in np.array_split(order.permutation(len(images)), max(1, round(len(images) / BATCH))):
            logits = model(images[batch])
            accuracy.append(float((logits.argmax(1) == labels[batch]).float().mean()))
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, labels[batch]).backward()
            optimizer.step()
    return accuracy


def _accuracy(quick: bool, network: str) -> Found:
    epochs = EPOCHS[network][quick]
    samples = QUICK_SAMPLES[network] if quick else None
    accuracy = np.array(trained(network, epochs, samples))
    steps = len(accuracy)
    smooth = np.array([accuracy[max(0, t - 5) : t + 1].mean() for t in range(steps)])
    reached = np.flatnonzero(smooth >= TARGET)
    ours = int(reached[0]) + 1 if len(reached) else steps
    rounds = max(steps, ours, 400 if quick else PAPER_ROUNDS)
    named = POLICIES | VARIANTS
    outcome = run(measured(network, 1, rounds), list(named.values()))
    clock = {shown: np.cumsum(outcome.policies[policy].latency[:, 0]) for shown, policy in named.items()}
    picture = figure(1, width=7)
    axes = picture.axes[0]
    rows: list[dict[str, Any]] = []
    for shown in POLICIES:
        axes.plot(clock[shown][:steps], smooth, label=shown, linewidth=1.2)
        rows += table(policy=shown, step=range(1, steps + 1), seconds=clock[shown][:steps], accuracy=smooth)
    axes.set(title=f"{NETWORKS[network].title}, B = {BATCH}", xlabel="seconds")
    axes.set(ylabel="training accuracy", ylim=(0, 1))
    axes.axhline(TARGET, color="black", linewidth=0.5)
    axes.legend(fontsize="small")

    def less(at: int, what: str = "DOLBIE") -> dict[str, float]:
        return {rival: float(100 * (1 - clock[what][at - 1] / clock[rival][at - 1])) for rival in RIVALS}

    def words(percents: dict[str, float]) -> str:
        return "/".join(f"{value:.0f}" for value in percents.values()) + " %"

    to_target = f"{ours} steps to 95 %" if len(reached) else f"{ours} steps, 95 % not reached"
    return Found(
        picture,
        rows,
        claim=CLAIMED[network],
        ours=f"less time than EQU/OGD/LB-BSP/ABS: {words(less(ours))} after our {to_target}; level "
        f"{words(less(ours, 'level'))}; after {rounds} steps DOLBIE {words(less(rounds))}, level "
        f"{words(less(rounds, 'level'))}",
        why="the step at which 95 % is reached depends on the data, and the balancers' advantage on how long they "
        "have been running; the paper's traces and its time model are not public: ours computes seconds per sample "
        "from multiply-adds, a step's overhead from layers, communication from parameters. VGG-16 for 32 x 32 "
        "pixels has fewer multiply-adds than ResNet-18, so its cluster is no more uneven",
        setting=f"{outcome.scenario.name}: 30 workers of 5 processors, one realization; trained once on the "
        f"digits, {epochs} epochs of {steps // epochs} steps, SGD at {RATE:g}"
        + (f", the first {samples} images" if samples else ""),
        figures={
            "percent_less": {f"{ours} steps": less(ours), f"{rounds} steps": less(rounds)},
            "percent_less_level": {
                f"{ours} steps": less(ours, "level"),
                f"{rounds} steps": less(rounds, "level"),
            },
            "final_accuracy": float(smooth[-1]),
        },
    )
