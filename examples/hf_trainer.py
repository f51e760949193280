"""The Hugging Face Trainer with Paceline's lines in it (marked).

    torchrun --standalone --nproc-per-node 3 examples/hf_trainer.py [--policy equal]

A tiny vision transformer, made from a configuration, learns digits. The ranks sleep for each sample, rank 2 four
times as long, as a slower machine would take longer.
"""

import argparse
import tempfile
import time

import torch
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

from paceline.data.datasets import load
from paceline.hosts.transformers import BalancedTrainer  # 1: instead of Trainer
from paceline.torch.callbacks import OnRound


class Digits(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.digits = load("digits")

    def __len__(self) -> int:
        return len(self.digits.x_train)

    def __getitem__(self, index: int) -> dict[str, object]:
        image = torch.from_numpy(self.digits.x_train[index]).float().reshape(1, 8, 8)
        return {"pixel_values": image, "labels": int(self.digits.y_train[index])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="auto")
    options = parser.parse_args()
    torch.manual_seed(0)
    shape = {"image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 32, "intermediate_size": 64}
    model = ViTForImageClassification(
        ViTConfig(num_hidden_layers=1, num_attention_heads=2, num_labels=10, **shape)
    )
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, use_cpu=True, num_train_epochs=4, per_device_train_batch_size=64, learning_rate=3e-3,
            logging_steps=8, report_to=[], save_strategy="no", disable_tqdm=True, ddp_find_unused_parameters=False,
        )  # fmt: skip
        slow = 0.002 if args.process_index == 2 else 0.0005

        def sleep(module: torch.nn.Module, args: tuple, inputs: dict) -> None:
            time.sleep(slow * len(inputs["pixel_values"]))

        model.register_forward_pre_hook(sleep, with_kwargs=True)
        rounds: list = []  # what happened, for the last line
        balance = {"global_batch": 256, "policy": options.policy, "callbacks": [OnRound(rounds.append)]}
        trainer = BalancedTrainer(model=model, args=args, train_dataset=Digits(), balance=balance)  # 2
        trainer.train()
        if trainer.is_world_process_zero():
            rate = sum(r.batch for r in rounds[1:]) / sum(r.seconds for r in rounds[1:])
            last = [r for r in rounds if r.batch == 256][-1]
            print(f"loss {last.loss:.3f}, loads {last.loads.tolist()}, {rate:.0f} samples/s", flush=True)
        trainer.pace.close()  # 3: a clean end


if __name__ == "__main__":
    main()
