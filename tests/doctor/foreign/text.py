"""Dictionaries of padded texts and a model that returns its loss, in the shape of transformers' *_no_trainer.py."""

from types import SimpleNamespace

import torch
from common import BATCH, EPOCHS, Data, ended, setup
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Texts(Data):
    def __getitem__(self, index):
        _, y = super().__getitem__(index)
        words = torch.arange(3 + index % 7) * (index + 1) % 20
        return {"input_ids": words, "labels": y}


def data_collator(features):
    longest = max(len(each["input_ids"]) for each in features)
    rows = torch.zeros(len(features), longest, dtype=torch.int64)
    mask = torch.zeros(len(features), longest, dtype=torch.float64)
    for row, each in enumerate(features):
        rows[row, : len(each["input_ids"])] = each["input_ids"]
        mask[row, : len(each["input_ids"])] = 1
    return {
        "input_ids": rows,
        "attention_mask": mask,
        "labels": torch.stack([each["labels"] for each in features]),
    }


class ForClassification(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = torch.nn.Embedding(20, 6).double(), torch.nn.Linear(6, 3).double()

    def forward(self, input_ids, attention_mask, labels):
        weights = attention_mask / attention_mask.sum(1, keepdim=True)
        logits = self.head((self.words(input_ids) * weights[..., None]).sum(1))
        return SimpleNamespace(loss=torch.nn.functional.cross_entropy(logits, labels), logits=logits)


def main():
    setup()
    torch.manual_seed(0)
    train_dataset = Texts()
    train_dataloader = DataLoader(
        train_dataset,
        collate_fn=data_collator,
        batch_size=BATCH,
        sampler=DistributedSampler(train_dataset),
    )
    model = ForClassification()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
    model = DistributedDataParallel(model)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, EPOCHS * len(train_dataloader))
    completed_steps = 0
    for _epoch in range(EPOCHS):
        model.train()
        for _step, batch in enumerate(train_dataloader):
            batch = {key: value.to("cpu") for key, value in batch.items()}
            outputs = model(**batch)
            outputs.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            completed_steps += 1
    ended(model)


if __name__ == "__main__":
    main()
