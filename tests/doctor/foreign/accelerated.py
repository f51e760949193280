"""The Accelerator's loop, in the shape of its examples' nlp_example.py."""

import torch
from accelerate import Accelerator
from common import BATCH, EPOCHS, Data, ended, net


def training_function():
    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2)
    train_dataloader = torch.utils.data.DataLoader(Data(), shuffle=True, batch_size=BATCH)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    for _epoch in range(EPOCHS):
        model.train()
        for _step, (x, y) in enumerate(train_dataloader):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    ended(model)


if __name__ == "__main__":
    training_function()
