"""A sequential loader of one's own, in the shape of llm.c's train_gpt2.py."""

import torch
import torch.distributed as dist
from common import EPOCHS, net, pause, setup
from torch.nn.parallel import DistributedDataParallel as DDP


class DistributedDataLoader:
    def __init__(self, B, T, process_rank, num_processes):
        self.B, self.T, self.process_rank, self.num_processes = B, T, process_rank, num_processes
        self.tokens = torch.randn(20000, dtype=torch.float64)
        self.current_position = process_rank * B * T

    def next_batch(self):
        B, T = self.B, self.T
        pause(B)
        buf = self.tokens[self.current_position : self.current_position + B * T]
        self.current_position += B * T * self.num_processes
        return buf.view(B, T), torch.zeros(B, dtype=torch.int64)


setup()
train_loader = DistributedDataLoader(8, 6, dist.get_rank(), dist.get_world_size())
model = DDP(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _step in range(EPOCHS + 1):
    x, y = train_loader.next_batch()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
