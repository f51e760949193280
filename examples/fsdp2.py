"""FSDP2 with Paceline's lines in it (marked).

    torchrun --standalone --nproc-per-node 3 examples/fsdp2.py [--policy equal]

The ranks sleep for each sample, rank 2 four times as long, as a slower machine would take longer. In FSDP2 they wait
for one another in every layer; Paceline tells that wait from a rank's own seconds.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import paceline.torch
from paceline.data.datasets import load
from paceline.torch.callbacks import OnRound


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="level")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    digits = load("digits")
    dataset = torch.utils.data.TensorDataset(
        torch.from_numpy(digits.x_train), torch.from_numpy(digits.y_train)
    )
    paceline.torch.join("gloo")  # init_process_group
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in (model[1], model[3], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    rounds: list = []  # what happened, for the last line
    pace = paceline.torch.Pace(
        model, global_batch=256, policy=options.policy, callbacks=[OnRound(rounds.append)]
    )  # 1
    loader = pace.loader(dataset, seed=0)  # 2: instead of DistributedSampler and DataLoader
    for _ in range(options.epochs):
        for x, y in loader:
            time.sleep((0.002 if dist.get_rank() == 2 else 0.0005) * len(x))
            pace.backward(nn.functional.cross_entropy(model(x), y))  # 3: instead of loss.backward()
            pace.step(optimizer)  # 4: steps, and zeroes, when the round is complete
    if dist.get_rank() == 0:
        rate = sum(r.batch for r in rounds[1:]) / sum(r.seconds for r in rounds[1:])
        last = [r for r in rounds if r.batch == 256][-1]
        print(f"loss {last.loss:.3f}, loads {last.loads.tolist()}, {rate:.0f} samples/s", flush=True)
    pace.close()  # a clean end under gloo


if __name__ == "__main__":
    main()
