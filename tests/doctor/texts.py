"""A DDP script that knows nothing of Paceline and trains on texts of different lengths, under torchrun."""

import sys

import numpy as np
import torch
import torch.distributed as dist
from simulated import compute
from torch.nn.parallel import DistributedDataParallel

A_WORD = 0.01  # seconds
SLOWER = 1.2  # times as long on rank 1


class Reader(torch.nn.Module):
    """Takes as long as its batch is large, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(64, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        compute(A_WORD * words.numel() * (SLOWER if dist.get_rank() == 1 else 1.0))
        return self.words(words).mean()


def main() -> None:
    dist.init_process_group("gloo")
    draw = np.random.default_rng(dist.get_rank())
    ddp = DistributedDataParallel(Reader())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(int(sys.argv[1])):
        lengths = np.clip(draw.lognormal(5, 1, 8), 16, 1024).astype(int)
        texts = [torch.randint(64, (length,)) for length in lengths.tolist()]
        optimizer.zero_grad()
        ddp(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
