"""A train function that is called in each epoch, in the shape of pytorch/examples' mnist."""

import argparse

import torch
import torch.nn.functional as F
import torch.optim as optim
from common import BATCH, EPOCHS, Data, ended, net, setup
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data.distributed import DistributedSampler


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = F.log_softmax(model(data), dim=1)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            done = batch_idx * len(data)
            print(f"Train Epoch: {epoch} [{done}/{len(train_loader.dataset)}] Loss: {loss.item():.6f}")


def test(model, device, test_loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            correct += (model.module(data.to(device)).argmax(1) == target).sum().item()
    print("Accuracy:", correct, "/", len(test_loader.dataset))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=BATCH)
    parser.add_argument("--log-interval", type=int, default=10)
    args = parser.parse_args()
    setup()
    device = torch.device("cpu")

    dataset = Data()
    train_kwargs = {"batch_size": args.batch_size, "sampler": DistributedSampler(dataset)}
    train_loader = torch.utils.data.DataLoader(dataset, **train_kwargs)
    test_loader = torch.utils.data.DataLoader(Data(), batch_size=4)

    model = net().to(device)
    model = DDP(model)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.9)
    for epoch in range(1, EPOCHS + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        if epoch == 3:
            test(model, device, test_loader)
        scheduler.step()
    ended(model)


if __name__ == "__main__":
    main()
