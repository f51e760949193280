"""Trainers of trl and sentence-transformers, balanced by a mixin, and one plain process with the whole batch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import SequentialSampler
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.experimental.kto import KTOConfig, KTOTrainer

from paceline.hosts.transformers import BalancedTrainer
from support import hosts

WORDS = 40
COUNT = 48
BATCH = 12


class BalancedSft(BalancedTrainer, SFTTrainer):
    pass


class BalancedDpo(BalancedTrainer, DPOTrainer):
    pass


class BalancedKto(BalancedTrainer, KTOTrainer):
    pass


class BalancedReward(BalancedTrainer, RewardTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
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


def llama(kind: Any = LlamaForCausalLM, **more: Any) -> Any:
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=WORDS + 3,
        max_position_embeddings=64,
        pad_token_id=WORDS,
        eos_token_id=WORDS + 1,
        **shape,
        **more,
    )
    return kind(config)


def embedder(folder: str) -> Any:
    from sentence_transformers import SentenceTransformer

    path = Path(folder).parent / "bert"
    if not path.exists():
        torch.manual_seed(3)
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = BertConfig(vocab_size=WORDS + 3, pad_token_id=WORDS, hidden_dropout_prob=0.0, **shape)
        config.attention_probs_dropout_prob = 0.0
        BertModel(config).save_pretrained(path)  # writes in one process alone
        tokenizer().save_pretrained(path)
    return SentenceTransformer(str(path), device="cpu")


def embedding_trainer(given: dict[str, Any], loss: str, texts: list[str], own: dict[str, Any]) -> Any:
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses
    from sentence_transformers.base.sampler import DefaultBatchSampler

    class InOrder(SentenceTransformerTrainer):
        def get_batch_sampler(
            self, dataset: Any, batch_size: int, drop_last: bool, *_: Any, **__: Any
        ) -> Any:
            return DefaultBatchSampler(SequentialSampler(dataset), batch_size, drop_last)

    class BalancedEmbedder(BalancedTrainer, SentenceTransformerTrainer):
        pass

    model = embedder(given["output_dir"])
    columns: dict[str, Any] = {"first": texts[:COUNT], "second": texts[COUNT:]}
    if loss == "CosineSimilarityLoss":
        columns["score"] = [number / COUNT for number in range(COUNT)]
    return (BalancedEmbedder if own else InOrder)(
        model=model, args=SentenceTransformerTrainingArguments(**given), train_dataset=Dataset.from_dict(columns),
        loss=getattr(losses, loss)(model), **own,
    )  # fmt: skip


def trained(
    kind: str, folder: str, ranks: int, accumulate: int, balance: dict[str, Any] | None
) -> tuple[Any, Any]:
    """Parameters after two epochs and the logged losses; balance None for the plain Trainer in one process."""
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
    trainer: Any
    if kind.endswith("Loss"):
        trainer = embedding_trainer(given, kind, texts, own)
    elif kind == "sft":
        trainer = (BalancedSft if own else SFTTrainer)(
            model=llama(), args=SFTConfig(**given, max_length=32), processing_class=tokenizer(),
            train_dataset=Dataset.from_dict({"text": texts[:COUNT]}), **own,
        )  # fmt: skip
    elif kind.startswith("kto"):
        asked = {"prompt": [said(generator) for _ in range(COUNT)], "completion": texts[:COUNT]}
        rated = Dataset.from_dict(asked | {"label": [number % 2 == 0 for number in range(COUNT)]})
        trainer = (BalancedKto if own else KTOTrainer)(
            model=llama(), ref_model=llama(), train_dataset=rated, processing_class=tokenizer(), **own,
            args=KTOConfig(**given, loss_type="apo_zero_unpaired" if kind == "kto, unpaired" else "kto"),
        )  # fmt: skip
    elif kind.startswith("dpo"):
        asked = {"prompt": [said(generator) for _ in range(COUNT)]}
        pairs = Dataset.from_dict(asked | {"chosen": texts[:COUNT], "rejected": texts[COUNT:]})
        trainer = (BalancedDpo if own else DPOTrainer)(
            model=llama(), ref_model=llama(), train_dataset=pairs, processing_class=tokenizer(), **own,
            args=DPOConfig(**given, loss_type=[kind.partition(", ")[2] or "sigmoid"]),
        )  # fmt: skip
    else:
        trainer = (BalancedReward if own else RewardTrainer)(
            model=llama(LlamaForSequenceClassification, num_labels=1), args=RewardConfig(**given),
            train_dataset=Dataset.from_dict({"chosen": texts[:COUNT], "rejected": texts[COUNT:]}),
            processing_class=tokenizer(), **own,
        )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [p.detach().tolist() for p in trainer.model.parameters()], losses


def balanced(
    rank: int, ranks: int, folder: str, kind: str, accumulate: int
) -> tuple[Any, list[float], list[str]]:
    """``trained`` on a rank, and the warnings of its balance."""
    hosts.as_torchrun(rank, ranks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        balance = {"policy": hosts.UNEVEN, "limits": hosts.FREE[:ranks]}
        parameters, losses = trained(kind, f"{folder}/{rank}", ranks, accumulate, balance)
    return parameters, losses, [str(each.message) for each in caught if each.category is RuntimeWarning]
