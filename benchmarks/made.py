"""Made-up data for the fetched programs, and stand-ins for weights, tokenizers and data sets from elsewhere."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES = 48
KEPT: list[Any] = []
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
WORDS = [f"w{number}" for number in range(60)]


def digits(place: Path) -> None:
    """MNIST's files."""
    raw = place.parent / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    made = np.random.default_rng(1)
    for kind, count in (("train", SAMPLES), ("t10k", 24)):
        images = made.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        # Each class has two images or more, as pairs of a class are drawn.
        labels = np.arange(count, dtype=np.uint8) % 10
        for name, magic, values in (("images-idx3", 2051, images), ("labels-idx1", 2049, labels)):
            header = struct.pack(f">{values.ndim + 1}I", magic, *values.shape)
            (raw / f"{kind}-{name}-ubyte").write_bytes(header + values.tobytes())
            (raw / f"{kind}-{name}-ubyte.gz").write_bytes(gzip.compress(header + values.tobytes()))


def pictures(place: Path, size: int = 40) -> None:
    """A folder of pictures in four classes."""
    from PIL import Image

    made = np.random.default_rng(1)
    for number in range(SAMPLES):
        folder = place / "pictures" / f"class{number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(made.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(
            folder / f"{number:03d}.png"
        )


def diffusion(place: Path) -> None:
    """Pictures, and stand-ins for DiT's noise schedule and its autoencoder, whose weights are fetched."""
    pictures(place)
    (place / "diffusion.py").write_text(
        "import torch\n"
        "class Diffusion:\n"
        "    num_timesteps = 1000\n"
        "    def training_losses(self, model, x, t, named):\n"
        "        noise = torch.randn(*x.shape)\n"
        "        share = (t / 1000).view(-1, 1, 1, 1)\n"
        "        output = model(x * (1 - share) + noise * share, t, **named)[:, :4]\n"
        "        return {'loss': ((output - noise) ** 2).mean(dim=(1, 2, 3))}\n"
        "def create_diffusion(timestep_respacing):\n"
        "    return Diffusion()\n"
    )
    (place / "diffusers").mkdir(exist_ok=True)
    (place / "diffusers" / "__init__.py").touch()
    (place / "diffusers" / "models.py").write_text(
        "import torch\n"
        "class AutoencoderKL(torch.nn.Module):\n"
        "    @classmethod\n"
        "    def from_pretrained(cls, name):\n"
        "        return cls()\n"
        "    def encode(self, x):\n"
        "        x = torch.nn.functional.avg_pool2d(x, 8)\n"
        "        self.latent_dist, self.sample = self, lambda: torch.cat([x, x.mean(1, keepdim=True)], 1)\n"
        "        return self\n"
    )


def tokens(place: Path) -> None:
    """A file of tokens as llm.c writes it, and no tokenizer."""
    header = np.zeros(256, np.int32)
    values = np.random.default_rng(1).integers(0, 60, SAMPLES * 16 * 4 + 1).astype(np.uint16)
    header[:3] = 20240520, 1, len(values)
    (place / "tokens.bin").write_bytes(header.tobytes() + values.tobytes())
    (place / "tiktoken.py").write_text("def get_encoding(name):\n    return None\n")


def _words(count: int, seed: int) -> list[str]:
    made = np.random.default_rng(seed)
    return [" ".join(made.choice(WORDS, made.integers(4, 12))) for _ in range(count)]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<eos>"]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special, *WORDS])}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        eos_token="<eos>",
    )


def _without_vision() -> None:
    """Let torchvision be imported although its operators, which are built for CUDA, are not found."""
    import torch

    for name in ("nms", "qnms") if not KEPT else ():
        KEPT.append(torch.library.Library("torchvision", "FRAGMENT"))
        KEPT[-1].define(f"{name}(Tensor a, Tensor b, float c) -> Tensor")


def language_model(place: Path) -> None:
    """A small Llama with its tokenizer, and texts."""
    import torch

    _without_vision()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = _tokenizer()
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE)).save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    (place / "texts").mkdir()
    rows = [json.dumps({"text": text}) for text in _words(SAMPLES, 1)]
    (place / "texts" / "train.jsonl").write_text("\n".join(rows))


def triplets(place: Path) -> None:
    """A small BERT for sentence-transformers, and local folders in the place of its data sets."""
    import torch

    _without_vision()
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    tokenizer = _tokenizer()
    BertModel(BertConfig(vocab_size=len(tokenizer), **SHAPE)).save_pretrained(place / "bert")
    tokenizer.save_pretrained(place / "bert")
    bert = Transformer(str(place / "bert"), max_seq_length=32)
    SentenceTransformer(modules=[bert, Pooling(32)]).save(str(place / "model"))
    nli, stsb = (place / "sentence-transformers" / name for name in ("all-nli", "stsb"))
    for folder in (nli, stsb):
        folder.mkdir(parents=True)
    columns = (_words(SAMPLES, seed) for seed in (1, 2, 3))
    rows = [
        dict(zip(("anchor", "positive", "negative"), row, strict=True)) for row in zip(*columns, strict=True)
    ]
    for name in ("train", "dev"):
        (nli / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = "".join(f"      - split: {name}\n        path: {name}.jsonl\n" for name in ("train", "dev"))
    (nli / "README.md").write_text(f"---\nconfigs:\n  - config_name: triplet\n    data_files:\n{files}---\n")
    pairs = [
        {"sentence1": a, "sentence2": b, "score": number / 12}
        for number, (a, b) in enumerate(zip(_words(12, 4), _words(12, 5), strict=True))
    ]
    for name in ("validation", "test"):
        (stsb / f"{name}.jsonl").write_text("\n".join(map(json.dumps, pairs)))


def shards(place: Path) -> None:
    """Tar files of pictures with labels, and what starts the notebook's function in torchrun's place of Ray."""
    from PIL import Image

    made = np.random.default_rng(1)
    (place / "shards").mkdir(exist_ok=True)
    (place / "start.py").write_text(
        "import os, train\n"
        "config = train.Config(world_size=int(os.environ['WORLD_SIZE']), backend='gloo')\n"
        "config.master_port = os.environ['MASTER_PORT']\n"
        "train.train_on_ray(int(os.environ['RANK']), config)\n"
    )
    for shard in range(6):
        with tarfile.open(place / "shards" / f"train-{shard:06d}.tar", "w") as tar:
            for number in range(40):
                file = io.BytesIO()
                Image.fromarray(made.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(file, "JPEG")
                for ending, content in (("jpg", file.getvalue()), ("cls", str(number % 10).encode())):
                    info = tarfile.TarInfo(f"{shard:03d}{number:03d}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def molecules(place: Path) -> None:
    """A stand-in for ogb's data set and encoders."""
    (place / "ogb" / "graphproppred").mkdir(parents=True, exist_ok=True)
    (place / "ogb" / "__init__.py").touch()
    (place / "ogb" / "graphproppred" / "__init__.py").write_text(
        "import torch\n"
        "from torch_geometric.data import Data\n"
        "class PygGraphPropPredDataset(list):\n"
        "    num_tasks = 1\n"
        "    def __init__(self, *_, **__):\n"
        "        made = torch.Generator().manual_seed(1)\n"
        "        def draw(*size, most):\n"
        "            return torch.randint(0, most, size, generator=made)\n"
        "        for number in range(72):\n"
        "            nodes = 4 + number % 9\n"
        "            self.append(Data(x=draw(nodes, 2, most=9), edge_index=draw(2, 3 * nodes, most=nodes),\n"
        "                             edge_attr=draw(3 * nodes, 2, most=5), y=draw(1, 1, most=2)))\n"
        "    def get_idx_split(self):\n"
        "        return {'train': slice(0, 48), 'valid': slice(48, 60), 'test': slice(60, 72)}\n"
        "class Evaluator:\n"
        "    def __init__(self, name):\n"
        "        pass\n"
        "    def eval(self, given):\n"
        "        return {'rocauc': 0.5}\n"
    )
    (place / "ogb" / "graphproppred" / "mol_encoder.py").write_text(
        "import torch\n"
        "class AtomEncoder(torch.nn.Module):\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.tables = torch.nn.ModuleList(torch.nn.Embedding(9, width) for _ in range(2))\n"
        "    def forward(self, x):\n"
        "        return sum(table(x[:, at]) for at, table in enumerate(self.tables))\n"
        "BondEncoder = AtomEncoder\n"
    )


def corpus(place: Path) -> None:
    """A stand-in for Lightning's WikiText2, which it fetches."""
    (place / "corpus.py").write_text(
        "import torch\n"
        "class WikiText2(torch.utils.data.Dataset):\n"
        "    vocab_size = 60\n"
        "    def __init__(self):\n"
        "        self.data = torch.randint(0, 60, (72, 17), generator=torch.Generator().manual_seed(1))\n"
        "    def __len__(self):\n"
        "        return 72\n"
        "    def __getitem__(self, at):\n"
        "        return self.data[at, :-1], self.data[at, 1:]\n"
    )


def games(place: Path) -> None:
    """A stand-in for an Atari game."""
    (place / "game.py").write_text(
        "import gymnasium as gym\n"
        "import numpy as np\n"
        "class Game(gym.Env):\n"
        "    observation_space = gym.spaces.Box(0, 255, (4, 84, 84))\n"
        "    action_space = gym.spaces.Discrete(4)\n"
        "    def reset(self, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n"
        "        return self.np_random.random((4, 84, 84), dtype=np.float32) * 255, {}\n"
        "    def step(self, action):\n"
        "        return self.reset()[0], float(action == 1), False, False, {}\n"
    )


def played(place: Path) -> None:
    """Moves of a game in the place of Atari's replays, as Decision Transformer's create_dataset returns them."""
    context = 2 * 3
    (place / "create_dataset.py").write_text(
        "import numpy as np\n"
        "def create_dataset(*_):\n"
        "    made = np.random.default_rng(1)\n"
        f"    count = {SAMPLES + context}\n"
        "    frames = list(made.integers(0, 256, (count, 4, 84, 84), dtype=np.uint8))\n"
        "    moves, left = np.arange(count) % 4, np.arange(count, 0, -1)\n"
        "    return frames, moves, None, np.array([count]), left, np.arange(count)\n"
    )
