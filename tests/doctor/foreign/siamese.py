"""Pairs of images, in the shape of pytorch/examples' siamese_network; its model squeezes."""

import torch
import torch.nn as nn
from common import BATCH, EPOCHS, Data, ended, net, setup
from torch.nn.parallel import DistributedDataParallel


class Pairs(Data):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        other = (index * 7 + 3) % len(self)
        return x, self.x[other], (y == self.y[other]).double()


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.head = net(4), nn.Linear(8, 1).double()
        self.sigmoid = nn.Sigmoid()

    def forward(self, input1, input2):
        output = torch.cat((self.tower(input1), self.tower(input2)), 1)
        return self.sigmoid(self.head(output))


def train(model, device, train_loader, optimizer, epoch, log_interval=10):
    model.train()
    criterion = nn.BCELoss()

    for batch_idx, (images_1, images_2, targets) in enumerate(train_loader):
        images_1, images_2, targets = images_1.to(device), images_2.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = model(images_1, images_2).squeeze(1)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        if batch_idx % log_interval == 0:
            print(f"Train Epoch: {epoch} Loss: {loss.item():.6f}")


def main():
    setup()
    train_dataset = Pairs()
    sampler = torch.utils.data.DistributedSampler(train_dataset)
    train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=BATCH, sampler=sampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(SiameseNetwork())
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for epoch in range(1, EPOCHS + 1):
        train(model, "cpu", train_loader, optimizer, epoch)
    ended(model)


if __name__ == "__main__":
    main()
