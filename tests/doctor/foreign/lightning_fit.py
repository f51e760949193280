"""A LightningModule and trainer.fit(module, loader), in the shape of Lightning's examples/pytorch/basics."""

import os

import lightning as L
import torch
from common import BATCH, EPOCHS, Data, ended, net


class LitClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = net()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def main():
    L.seed_everything(42)
    train_dataloader = torch.utils.data.DataLoader(Data(), batch_size=BATCH, shuffle=True)
    model = LitClassifier()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, train_dataloader)
    ended(model)


if __name__ == "__main__":
    main()
