"""An Accelerator that prepares all, and a loop that calls loss.backward(), in the shape of peft's examples."""

import torch
from accelerate import Accelerator
from common import BATCH, EPOCHS, Data, ended, net


def main():
    accelerator = Accelerator(cpu=True)
    train_dataset = Data()
    train_dataloader = torch.utils.data.DataLoader(
        train_dataset, shuffle=True, batch_size=BATCH
    )  # fmt: skip
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, train_dataloader, optimizer = accelerator.prepare(
        model, train_dataloader, optimizer
    )  # fmt: skip

    for _epoch in range(EPOCHS):
        model.train()
        total_loss = 0
        for _step, (x, y) in enumerate(train_dataloader):
            outputs = model(x)
            loss = torch.nn.functional.cross_entropy(outputs, y)
            total_loss += loss.detach().float()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    ended(model)


if __name__ == "__main__":
    main()
