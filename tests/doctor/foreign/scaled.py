"""A gradient scaler and a function between main and the loop, in the shape of timm's train.py."""

import torch
import torch.distributed as dist
from common import BATCH, EPOCHS, Data, ended, net, setup
from torch.nn.parallel import DistributedDataParallel as NativeDDP


def main():
    setup()
    model = net()
    model = NativeDDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    loss_scaler = torch.amp.GradScaler("cpu", enabled=False)
    dataset_train = Data()
    sampler_train = torch.utils.data.DistributedSampler(dataset_train)
    loader_train = torch.utils.data.DataLoader(dataset_train, BATCH, sampler=sampler_train)
    fit(model, loader_train, optimizer, loss_scaler)
    ended(model)


def fit(model, loader, optimizer, loss_scaler, start=0):
    for epoch in range(start, EPOCHS):
        metrics = train_one_epoch(epoch, model, loader, optimizer, scaler=loss_scaler)
        print(metrics)


def train_one_epoch(epoch, model, loader, optimizer, scaler=None):
    loss_fn = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    model.train()
    shown = 0.0
    for input, target in loader:
        with torch.autocast("cpu", enabled=False):
            loss = loss_fn(model(input), target)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        reduced_loss = loss.detach().clone()
        dist.all_reduce(reduced_loss, op=dist.ReduceOp.SUM)
        shown = reduced_loss.item() / dist.get_world_size()
    return {"epoch": epoch, "loss": shown}


if __name__ == "__main__":
    main()
