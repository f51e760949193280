"""Your own torch model and data on a parameter server: workers of uneven pace, without a launcher.

Runs as it stands, on a Ray that it starts on this machine; give address="HOST:PORT" for a standing cluster.
"""

import torch

from paceline.ray import torch_program, train

torch.manual_seed(0)
x = torch.randn(2000, 20)
y = (x @ torch.randn(20) > 0).long()


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


if __name__ == "__main__":
    program = torch_program(model, x, y)
    losses: list[float] = []
    train(
        program,
        2000,
        workers=3,
        epochs=20,
        policy="equal",  # dbw counts gradients: each is to be worth as much
        backup="dbw",
        lr=0.5,
        on_update=lambda update: losses.append(update.loss),
    )
    last = losses[-20:]  # one update's loss is that of a few samples
    print(f"{len(losses)} updates, loss {losses[0]:.3f} -> {sum(last) / len(last):.3f}")
