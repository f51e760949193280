"""A moving average of the parameters, and a loss that is averaged over ranks, in the shape of DiT's train.py."""

from collections import OrderedDict
from copy import deepcopy

import torch
import torch.distributed as dist
from common import BATCH, EPOCHS, Data, ended, net, setup
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


@torch.no_grad()
def update_ema(ema_model, model, decay=0.99):
    ema_params = OrderedDict(ema_model.named_parameters())
    for name, param in OrderedDict(model.named_parameters()).items():
        ema_params[name].mul_(decay).add_(param.data, alpha=1 - decay)


def training_losses(model, x, y):
    output = model(x)
    return {"loss": ((output - torch.nn.functional.one_hot(y, 3)) ** 2).mean(dim=1)}


def main():
    setup()
    rank = dist.get_rank()
    device = torch.device("cpu")
    model = net()
    ema = deepcopy(model).to(device)
    model = DDP(model.to(device))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)

    dataset = Data()
    sampler = DistributedSampler(
        dataset,
        num_replicas=dist.get_world_size(),
        rank=rank,
        shuffle=True,
        seed=0
    )  # fmt: skip
    loader = DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=False,
        sampler=sampler,
        num_workers=0,
        drop_last=True
    )  # fmt: skip

    model.train()
    train_steps = 0
    log_steps = 0
    running_loss = 0
    logged = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x = x.to(device)
            y = y.to(device)
            loss_dict = training_losses(model, x, y)
            loss = loss_dict["loss"].mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            update_ema(ema, model.module)

            # Log loss values:
            running_loss += loss.item()
            log_steps += 1
            train_steps += 1
            if train_steps % 2 == 0:
                # Reduce loss history over all processes:
                avg_loss = torch.tensor(running_loss / log_steps, device=device, dtype=torch.float64)
                dist.all_reduce(avg_loss, op=dist.ReduceOp.SUM)
                avg_loss = avg_loss.item() / dist.get_world_size()
                logged.append(avg_loss)
                running_loss = 0
                log_steps = 0
    ended(model, ema, logged=logged)


if __name__ == "__main__":
    main()
