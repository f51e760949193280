"""Branches, meters and a sampler, in the shape of pytorch/examples' imagenet."""

import time
from types import SimpleNamespace

import torch
import torch.nn as nn
from common import BATCH, EPOCHS, Data, ended, net, setup


def main():
    args = SimpleNamespace(
        distributed=True, gpu=None, batch_size=BATCH, epochs=EPOCHS, workers=0, print_freq=5
    )
    main_worker(args.gpu, args)


def main_worker(gpu, args):
    if args.distributed:
        setup()
    model = net()
    if args.distributed:
        # When using a single GPU per process, the batch size is divided.
        if torch.cuda.is_available() and gpu is not None:
            model.cuda(gpu)
            model = nn.parallel.DistributedDataParallel(model, device_ids=[gpu])
        else:
            model = torch.nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    train_dataset = Data()
    train_sampler = (
        torch.utils.data.distributed.DistributedSampler(train_dataset) if args.distributed else None
    )
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=args.batch_size, shuffle=(train_sampler is None),
        num_workers=args.workers, pin_memory=False, sampler=train_sampler)  # fmt: skip

    for epoch in range(args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, torch.device("cpu"), args)
    ended(model)


def train(train_loader, model, criterion, optimizer, epoch, device, args):
    losses = AverageMeter()
    progress = len(train_loader)
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)

        # compute output
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))

        # compute gradient and do SGD step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == 0:
            print(f"[{epoch}][{i}/{progress}] {time.time() - end:.3f} {losses.sum / losses.count:.4f}")


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n


if __name__ == "__main__":
    main()
