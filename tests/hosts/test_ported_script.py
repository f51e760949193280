"""A training script of Accelerate's own, from the installed package, as it is and as ``examples/ports`` changes it.

What it would fetch (data, a tokenizer, a model, a metric) is replaced by small stand-ins. Its one round an epoch
holds every sample, so that the order does not matter, and both have to end with the same model.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from support import hosts
from support.guarantees import guarantee
from support.scripts import loaded
from support.skips import skip_without

skip_without("accelerate")
skip_without("transformers")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]

PORTS = Path(__file__).parents[2] / "examples" / "ports"
SCRIPT = "accelerate.test_utils.scripts.external_deps.test_performance"
COUNT, EACH, EPOCHS = 24, 8, 4


def source() -> str:
    """The installed script; found without importing it, since it needs packages that are not here."""
    folder = importlib.util.find_spec(SCRIPT.rpartition(".")[0])
    assert folder is not None
    assert folder.submodule_search_locations is not None
    return (Path(folder.submodule_search_locations[0]) / "test_performance.py").read_text()


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Pairs of sentences of several lengths, already tokenized."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 20, (4 + index % 5,), generator=generator)
        return {"input_ids": tokens.tolist(), "labels": int(tokens[0]) % 2}


class Corpus(dict[str, Any]):
    """What ``load_dataset`` gives."""

    def map(self, *_: Any, **__: Any) -> Corpus:
        return self

    def rename_column(self, *_: Any) -> Corpus:
        return self


class Tokenizer:
    def pad(self, examples: list[dict[str, Any]], **_: Any) -> Any:
        from transformers import BatchEncoding

        longest = max(len(e["input_ids"]) for e in examples)
        ids = [e["input_ids"] + [0] * (longest - len(e["input_ids"])) for e in examples]
        mask = [[int(token > 0) for token in row] for row in ids]
        labels = [e["labels"] for e in examples]
        return BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": labels}, tensor_type="pt")


class Metric:
    def __init__(self) -> None:
        self.right = self.all = 0

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.right += int((predictions == references).sum())
        self.all += len(references)

    def compute(self) -> dict[str, float]:
        assert self.all == COUNT
        found = {"accuracy": self.right / self.all}
        self.right = self.all = 0
        return found


def model(*_: Any, **__: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(vocab_size=20, max_position_embeddings=16, **shape, **off)
    )


def run(text: str, folder: Path) -> dict[str, torch.Tensor]:
    """The model that the script's training ends with."""
    from safetensors.torch import load_file

    for name in ("datasets", "evaluate"):
        stand_in: Any = types.ModuleType(name)
        stand_in.load_dataset = lambda *_: Corpus(train=Sentences(), validation=Sentences())
        stand_in.load = lambda *_: Metric()
        sys.modules[name] = stand_in
    script: dict[str, Any] = {"__name__": "script"}
    exec(compile(text, "test_performance.py", "exec"), script)
    del sys.modules["datasets"], sys.modules["evaluate"]
    script["AutoTokenizer"] = Namespace(from_pretrained=lambda *_: Tokenizer())
    script["AutoModelForSequenceClassification"] = Namespace(from_pretrained=model)
    if "Balanced" in script:
        script["Balanced"] = partial(script["Balanced"], policy=hosts.UNEVEN, limits=hosts.FREE)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    hosts.reset_accelerate()
    folder.mkdir(parents=True, exist_ok=True)
    script["training_function"](
        {"lr": 0.01, "num_epochs": EPOCHS, "seed": 42, "batch_size": EACH},
        Namespace(
            tp_size=None, tp_plan=None, model_dtype=None, add_pad_token=False, performance_lower_bound=None,
            model_name_or_path="tiny", output_dir=str(folder),
        ),
    )  # fmt: skip
    return load_file(folder / "model.safetensors")


def both(_: int, folder: str) -> tuple[float, float]:
    """How far the ported script's model is from the plain one's, and how far that is from where it began."""
    port, text = loaded(PORTS / "port.py"), source()
    (part,) = port.read("accelerate_performance")["file"]
    changed = port.ported(text, part["edit"], part["path"])
    plain = run(text, Path(folder) / "plain")
    ours = run(changed, Path(folder) / "ported")
    torch.manual_seed(42)
    start = model().state_dict()
    apart = max(float((ours[name] - value).abs().max()) for name, value in plain.items())
    moved = max(float((start[name] - value).abs().max()) for name, value in plain.items())
    return apart, moved


@guarantee("Learning rates and `len(loader)` under Accelerate are those of the program without Paceline.")
def test_ported_script_of_accelerate_ends_with_the_same_model(tmp_path: Path) -> None:
    for apart, moved in hosts.run_bodies(3, [both], str(tmp_path))[both]:
        assert apart < 1e-5  # it computes in float32
        assert moved > 1e-3
