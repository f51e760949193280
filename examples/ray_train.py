"""Ray Train's TorchTrainer with Paceline's lines in it (marked).

    python examples/ray_train.py

Three workers on this machine sleep for each sample, the last one four times as long, as a slower machine would take
longer. Each epoch ends with a checkpoint, from which Ray goes on after a failure.
"""

import logging
import tempfile
import time
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn

from paceline.data.datasets import load
from paceline.hosts.ray_train import RayTrainPace
from paceline.torch.callbacks import OnRound


def train_loop_per_worker(config: dict) -> None:
    digits = load("digits")
    dataset = torch.utils.data.TensorDataset(
        torch.from_numpy(digits.x_train), torch.from_numpy(digits.y_train)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    rounds: list = []
    pace = RayTrainPace(model, global_batch=256, callbacks=[OnRound(rounds.append)])  # 1: the handle
    loader = pace.loader(dataset, seed=0)  # 2: instead of DataLoader and prepare_data_loader
    if (kept := ray.train.get_checkpoint()) is not None:
        with kept.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        pace.load_state_dict(state["pace"])
    for _ in range(pace.epoch, config["epochs"]):
        for x, y in loader:
            time.sleep((0.002 if dist.get_rank() == dist.get_world_size() - 1 else 0.0005) * len(x))
            loss = criterion(model(x), y)
            pace.backward(loss)  # 3: instead of loss.backward()
            pace.step(optimizer)  # 4: steps and zeroes
        samples = sum(done.loads for done in rounds if done.epoch == pace.epoch - 1)
        figures = {"loss": loss.item(), "samples": samples.tolist()}
        with tempfile.TemporaryDirectory() as folder:
            kept = None
            if dist.get_rank() == 0:
                parts = {"model": model, "optimizer": optimizer, "pace": pace}
                state = {name: part.state_dict() for name, part in parts.items()}
                torch.save(state, Path(folder) / "state.pt")
                kept = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(figures, checkpoint=kept)
    pace.close()  # 5: lets go before Ray ends the process group


def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        trainer = ray.train.torch.TorchTrainer(
            train_loop_per_worker,
            train_loop_config={"epochs": 4},
            scaling_config=ray.train.ScalingConfig(num_workers=3),
            run_config=ray.train.RunConfig(storage_path=folder, name="digits"),
        )
        figures = trainer.fit().metrics
        print(f"loss {figures['loss']:.3f}, samples of the last epoch {figures['samples']}")
    ray.shutdown()


if __name__ == "__main__":
    main()
