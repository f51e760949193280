"""Trainers of trl and sentence-transformers, if they are installed, against one process with the whole batch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler

from support import hosts
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.skips import skip_without

skip_without("trl")
skip_without("sentence_transformers")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]

WORDS, COUNT, BATCH = 40, 48, 12


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(WORDS)} | {
        "[PAD]": WORDS,
        "[EOS]": WORDS + 1,
        "[UNK]": WORDS + 2,
    }
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return fast


def said(generator: torch.Generator) -> str:
    many = int(torch.randint(2, 9, (1,), generator=generator))
    return " ".join(f"w{int(i)}" for i in torch.randint(WORDS, (many,), generator=generator))


def llama(kind: str = "LlamaForCausalLM", **more: Any) -> Any:
    import transformers

    torch.manual_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=WORDS + 3,
        max_position_embeddings=64,
        pad_token_id=WORDS,
        eos_token_id=WORDS + 1,
        **shape,
        **more,
    )
    return getattr(transformers, kind)(config)


def embedder(folder: str) -> Any:
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel

    path = Path(folder).parent / "bert"
    if not path.exists():
        torch.manual_seed(3)
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = BertConfig(vocab_size=WORDS + 3, pad_token_id=WORDS, hidden_dropout_prob=0.0, **shape)
        config.attention_probs_dropout_prob = 0.0
        BertModel(config).save_pretrained(path)  # writes in one process alone
        tokenizer().save_pretrained(path)
    return SentenceTransformer(str(path), device="cpu")


def balanced(trainer: Any) -> Any:
    """The Trainer with Paceline's mixin, under a name of this module: data sets pickle it with their functions."""
    from paceline.hosts.transformers import BalancedTrainer

    name = f"Balanced{trainer.__name__}"
    globals()[name] = made = type(name, (BalancedTrainer, trainer), {})
    return made


def embedding_trainer(given: dict[str, Any], loss: str, texts: list[str], own: dict[str, Any]) -> Any:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses
    from sentence_transformers.base.sampler import DefaultBatchSampler

    class InOrder(SentenceTransformerTrainer):
        def get_batch_sampler(
            self, dataset: Any, batch_size: int, drop_last: bool, *_: Any, **__: Any
        ) -> Any:
            return DefaultBatchSampler(SequentialSampler(dataset), batch_size, drop_last)

    model = embedder(given["output_dir"])
    columns: dict[str, Any] = {"first": texts[:COUNT], "second": texts[COUNT:]}
    if loss == "CosineSimilarityLoss":
        columns["score"] = [number / COUNT for number in range(COUNT)]
    return (balanced(SentenceTransformerTrainer) if own else InOrder)(
        model=model, args=SentenceTransformerTrainingArguments(**given), train_dataset=Dataset.from_dict(columns),
        loss=getattr(losses, loss)(model), **own,
    )  # fmt: skip


def trained(
    kind: str, folder: str, ranks: int, accumulate: int, balance: dict[str, Any] | None
) -> tuple[Any, list[float]]:
    """Parameters after two epochs and the logged losses; balance None for the plain Trainer in one process."""
    import trl
    from datasets import Dataset
    from trl.experimental import kto

    generator = torch.Generator().manual_seed(7)
    given: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "report_to": [], "disable_tqdm": True, "num_train_epochs": 2,
        "save_strategy": "no", "logging_steps": 1, "seed": 5, "bf16": False, "gradient_checkpointing": False,
        "per_device_train_batch_size": BATCH // (ranks * accumulate), "gradient_accumulation_steps": accumulate,
        "max_grad_norm": 0.5, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "dataloader_drop_last": False,
        "optim": "sgd", "train_sampling_strategy": "sequential",
    }  # fmt: skip
    if ranks > 1:
        given["ddp_backend"] = "gloo"
    own: dict[str, Any] = {} if balance is None else {"balance": balance}
    texts = [said(generator) for _ in range(2 * COUNT)]
    first, second = texts[:COUNT], texts[COUNT:]
    if kind.endswith("Loss"):
        trainer = embedding_trainer(given, kind, texts, own)
    else:
        way, _, loss = kind.partition(", ")
        prompts = [] if way in ("sft", "reward") else [said(generator) for _ in range(COUNT)]
        labels = [number % 2 == 0 for number in range(COUNT)]
        if way == "sft":
            plain, config, columns = trl.SFTTrainer, trl.SFTConfig(**given, max_length=32), {"text": first}
        elif way == "reward":
            plain, config = trl.RewardTrainer, trl.RewardConfig(**given)
            columns = {"chosen": first, "rejected": second}
        elif way == "dpo":
            plain, config = trl.DPOTrainer, trl.DPOConfig(**given, loss_type=[loss or "sigmoid"])
            columns = {"prompt": prompts, "chosen": first, "rejected": second}
        else:
            of_loss = "apo_zero_unpaired" if loss == "unpaired" else "kto"
            plain, config = kto.KTOTrainer, kto.KTOConfig(**given, loss_type=of_loss)
            columns = {"prompt": prompts, "completion": first, "label": labels}
        model = llama("LlamaForSequenceClassification", num_labels=1) if way == "reward" else llama()
        reference = {"ref_model": llama()} if way in ("dpo", "kto") else {}
        trainer = (balanced(plain) if own else plain)(
            model=model, args=config, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer(),
            **reference, **own,
        )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [p.detach().tolist() for p in trainer.model.parameters()], losses


def on_rank(
    rank: int, ranks: int, folder: str, kind: str, accumulate: int
) -> tuple[Any, list[float], list[str]]:
    """``trained`` on a rank, and the warnings of its balance."""
    hosts.as_torchrun(rank, ranks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        balance = {"policy": hosts.UNEVEN, "limits": hosts.FREE[:ranks]}
        parameters, losses = trained(kind, f"{folder}/{rank}", ranks, accumulate, balance)
    return parameters, losses, [str(each.message) for each in caught if each.category is RuntimeWarning]


@guarantee(
    "Accelerate, Fabric, Lightning, the Trainer, TRL, sentence-transformers and Ray Train train the model of "
    "one process."
)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["sft", "dpo", "reward", "CosineSimilarityLoss"])
def test_trainer_trains_model_of_one_process(
    kind: str, accumulate: int, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expected, losses = trained(kind, str(tmp_path / "one"), 1, 1, None)
    for parameters, logged, warned in run_ranks(3, on_rank, str(tmp_path), kind, accumulate):
        # They compute in float32; a key's bias, on which attention does not depend, is nothing but its rounding.
        both = zip(map(torch.tensor, parameters), map(torch.tensor, expected), strict=True)
        counted = [(ours, theirs) for ours, theirs in both if theirs.abs().max() > 1e-9]
        assert len(counted) > 0.8 * len(expected)
        assert hosts.difference(*zip(*counted, strict=True)) < 1e-6
        assert logged == pytest.approx(losses, abs=1e-6)
        assert not [words for words in warned if "compares the samples" in words]


@guarantee(
    "A loss of sentence-transformers or pytorch-metric-learning that compares samples causes one warning "
    "with its name."
)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("MultipleNegativesRankingLoss", "MultipleNegativesRankingLoss"),
        ("kto", "the loss of KTOTrainer"),
        ("dpo, aot", "the loss 'aot' of DPOTrainer"),
        ("kto, unpaired", ""),
    ],
)
def test_loss_that_compares_samples_warns_once(
    kind: str, name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if kind.endswith("Loss"):
        embedder(str(tmp_path / "one"))
    found = run_ranks(3, on_rank, str(tmp_path), kind, 1)
    told = [words for words in found[0][2] if "compares the samples" in words]
    assert len(told) == bool(name)
    assert not name or told[0].startswith(name)
