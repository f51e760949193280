"""Batches drawn at random from an array, and accumulation, in the shape of karpathy's nanoGPT."""

import torch
from common import EPOCHS, net, pause, setup
from torch.nn.parallel import DistributedDataParallel as DDP

setup()
gradient_accumulation_steps, batch_size = 2, 8
train_data = torch.randn(1000, dtype=torch.float64)


def get_batch(split):
    pause(batch_size)
    ix = torch.randint(len(train_data) - 6, (batch_size,))
    x = torch.stack([train_data[i : i + 6] for i in ix])
    return x, torch.zeros(batch_size, dtype=torch.int64)


model = DDP(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
X, Y = get_batch("train")
iter_num = 0
while True:
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        logits = model(X)
        loss = torch.nn.functional.cross_entropy(logits, Y) / gradient_accumulation_steps
        X, Y = get_batch("train")
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > EPOCHS:
        break
