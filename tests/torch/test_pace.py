"""The public surface: the options and members of each handle, and the end of a program that closes none."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path

import pytest

from paceline.runs import read
from paceline.torch import ElasticLocalSGD, ElasticPace, LocalSGD, Pace
from support.forks import as_torchrun, ended
from support.guarantees import guarantee

# Of all handles: ``host`` is an attribute, the others are methods and properties.
COMMON = {
    "backward", "close", "complete", "counts", "epoch", "host", "load_state_dict", "loader", "loss", "rounds",
    "state_dict", "step",
}  # fmt: skip
EXACT, DRAWN = {"loss_now", "round"}, {"sizes", "stream"}
MEMBERS: dict[type, set[str]] = {
    Pace: COMMON | EXACT | DRAWN | {"batch_sampler", "gather", "mean", "weighted"},
    ElasticPace: COMMON | EXACT | {"chief", "leave", "rank", "register"},
    LocalSGD: COMMON | DRAWN | {"flush", "merged"},
    ElasticLocalSGD: COMMON | {"chief", "flush", "leave", "merged", "rank", "register"},
}


@pytest.mark.parametrize("kind", list(MEMBERS))
def test_a_handle_has_at_most_12_options_and_20_members(kind: type) -> None:
    options = list(inspect.signature(kind).parameters)
    members = {name for name in dir(kind) if not name.startswith("_")} | {"host"}
    print(f"{kind.__name__}: {len(options)} options: {', '.join(options)}")
    print(f"{kind.__name__}: {len(members)} members: {', '.join(sorted(members))}")
    assert len(options) <= 12
    assert len(members) <= 20
    assert members == MEMBERS[kind]


SCRIPT = """
import atexit, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from paceline.torch import Pace, join
from paceline.torch.callbacks import Record
from support.small_net import Samples, fresh

def main():
    model = fresh(torch.float64)
    if sys.argv[2] == "ranks":
        join()
        model = DistributedDataParallel(model)
        atexit.register(lambda: print("left" if not dist.is_initialized() else "there", flush=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pace = Pace(model, 8, "equal", callbacks=[Record(sys.argv[1])])
    for x, y, _ in pace.loader(Samples(32)):
        pace.backward(torch.nn.functional.cross_entropy(model(x), y))
        pace.step(optimizer)
        if pace.rounds == 2 and sys.argv[3] == "raises":
            raise ValueError("a bad image")

main()
"""


@guarantee("A program that ends without `pace.close()` closes its record and leaves the process group.")
@pytest.mark.parametrize("end", ["ends", "raises"])
@pytest.mark.parametrize("form", ["alone", "ranks"])
def test_the_end_of_the_program_closes(form: str, end: str, tmp_path: Path) -> None:
    script, record = tmp_path / "train.py", tmp_path / "record"
    script.write_text(SCRIPT)
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    own = as_torchrun(2) if form == "ranks" else [{}]
    for program in ended([each | path for each in own], [script, record, form, end], whole=True):
        assert (program.status == 0) is (end == "ends"), program.err
        assert "terminate called" not in program.err
        assert "Exception ignored" not in program.err
        assert ("ValueError: a bad image" in program.err) is (end == "raises")
        assert program.out.split() == (["left"] if form == "ranks" else [])
    assert (record / "summary.json").exists(), "the record is finished"
    assert read(record).config["workers"] == (2 if form == "ranks" else 1)
