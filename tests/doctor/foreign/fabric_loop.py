"""Fabric's loop, in the shape of Lightning's examples/fabric/image_classifier."""

import os

import torch
from common import BATCH, EPOCHS, Data, ended, net
from lightning.fabric import Fabric


def run(hparams):
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", num_nodes=1)
    fabric.launch()
    train_loader = torch.utils.data.DataLoader(Data(), batch_size=hparams["batch_size"], shuffle=True)
    train_loader = fabric.setup_dataloaders(train_loader)
    model = net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _epoch in range(EPOCHS):
        model.train()
        for _batch_idx, batch in enumerate(train_loader):
            data, target = batch
            optimizer.zero_grad()
            output = model(data)
            loss = torch.nn.functional.cross_entropy(output, target)
            fabric.backward(loss)
            optimizer.step()
        scheduler.step()
    ended(model)


if __name__ == "__main__":
    run({"batch_size": BATCH})
