"""What the loops in this folder share: data that take a while to read, most of all on the last rank, and an end.

Each script is in the shape of a program that many people know, on 48 samples: an optimizer step of three ranks with
16 samples each, or of one process with 48, is that of the whole set, in any order.
"""

import gc
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

SAMPLES = 48
EPOCHS = int(os.environ.get("FOREIGN_EPOCHS", "14"))
BATCH = SAMPLES // int(os.environ.get("WORLD_SIZE", "1"))
PAUSE = float(os.environ.get("FOREIGN_PAUSE", "0"))
read = 0  # samples, on this rank
began = 0.0


def pause(samples=1):
    global read, began
    read += samples
    began = began or time.perf_counter()
    slow = dist.get_rank() == dist.get_world_size() - 1
    time.sleep(PAUSE * samples * (4 if slow else 1))


class Data(torch.utils.data.Dataset):
    def __init__(self):
        made = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 6, generator=made, dtype=torch.float64)
        self.y = torch.randint(3, (SAMPLES,), generator=made)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        pause()
        return self.x[index], self.y[index]


def net(outputs=3):
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs)
    return torch.nn.Sequential(*layers).double()


def setup():
    dist.init_process_group("gloo")


def ended(*models, **said):
    """Leave the parameters and what was read."""
    if place := os.environ.get("FOREIGN_OUT"):
        values = [
            value for model in models for p in model.parameters() for value in p.detach().flatten().tolist()
        ]
        told = {"parameters": values, "read": read, "seconds": time.perf_counter() - began, **said}
        Path(place, f"{dist.get_rank()}.json").write_text(json.dumps(told))
    # As torch's DDP over gloo would abort now and then at the end of the program, its reducer goes first.
    for model in models:
        if hasattr(model, "reducer"):
            model.reducer = None
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
