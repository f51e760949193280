"""The Hugging Face Trainer, in the shape of transformers' examples with a Trainer."""

import os
import tempfile

import torch
from common import BATCH, EPOCHS, Data, ended, net
from transformers import Trainer, TrainingArguments


class Samples(Data):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


class ForClassification(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def main():
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    with tempfile.TemporaryDirectory() as folder:
        training_args = TrainingArguments(
            folder,
            use_cpu=True,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-2,
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        model = ForClassification()
        trainer = Trainer(model=model, args=training_args, train_dataset=Samples())
        trainer.train()
    ended(model)


if __name__ == "__main__":
    main()
