"""The diff of a script's own lines, or none where the script is not recognized."""

from __future__ import annotations

import ast
import contextlib
import io
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from paceline.doctor.patch import UnknownForm, patched
from paceline.doctor.phases import LoopForm
from paceline.tables import show_lines
from support.guarantees import guarantee

PLAIN = '''"""Trains."""

from __future__ import annotations

import torch


def fit(model, loader, optimizer, epochs):
    for epoch in range(epochs):
        one(model, loader, optimizer, epoch, 1)


def one(model, batches, optimizer, epoch, verbose=0):
    for i, (x, y) in enumerate(tqdm(batches)):
        loss = (model(x) - y).square().mean()  # größer
        optimizer.zero_grad(); loss.backward()
        optimizer.step()


def main():
    model = DDP(net)
    loader = DataLoader(data, 8)
    fit(model, loader, optimizer, epochs=3)
'''
PLACES = {"made": "DDP(", "fetch": "tqdm(", "backward": ".backward(", "step": ".step("}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def changed(script: str, places: dict[str, str] = PLACES, host: str = "", **more: object) -> str:
    """The script with its diff applied."""
    file = Path("train.py").absolute()
    file.write_bytes(script.encode())
    lines = script.split("\n")
    found = {
        name: (str(file), 1 + next(i for i, line in enumerate(lines) if text in line))
        for name, text in places.items()
    }
    loader = {"processes": 2, "stream": False, "options": ["num_workers={loader}.num_workers"], **more}
    diff = patched(LoopForm(24, 1, 1, loader, host, [], True, found), ["global_batch=24"])
    indented = "Some words.\n" + "".join(f"  {line}\n" for line in diff)
    subprocess.run(["patch", "-p0", "--quiet"], input=indented, text=True, check=True)
    return file.read_text(encoding="utf-8")


def test_the_pace_is_handed_through_functions() -> None:
    new = changed(PLAIN)
    for line in (
        "import paceline.torch\nimport torch\n",
        "def fit(model, loader, optimizer, epochs, pace):\n",
        "        one(model, loader, optimizer, epoch, 1, pace=pace)\n",
        "def one(model, batches, optimizer, epoch, verbose=0, pace=None):\n",
        "        optimizer.zero_grad(); pace.backward(loss)\n        pace.step(optimizer)\n",
        "    model = DDP(net)\n    pace = paceline.torch.Pace(model, global_batch=24)\n"
        "    loader = DataLoader(data, 8)\n"
        "    loader = pace.loader(loader.dataset, num_workers=loader.num_workers)\n"
        "    fit(model, loader, optimizer, epochs=3, pace=pace)\n",
    ):
        assert line in new


@guarantee("For a script that the doctor does not recognize, it prints no diff and says what to do.")
@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        (", epochs):", ", *, epochs):", "plain parameters of fit, and found others"),
        (
            "one(model, loader",
            "one(model, loaders[0]",
            "the loader loaders[0] in main, which makes the model",
        ),
        ("loss.backward()", "loss.backward(retain_graph=True)", "a backward pass and a step without further"),
        ("optimizer.step()", "optimizer.step(closure)", "a backward pass and a step without further"),
        (
            "model = DDP(net)",
            "models.append(DDP(net))",
            "an assignment of the DistributedDataParallel module",
        ),
        ("enumerate(tqdm(batches))", "[tqdm(batches)]", "a loop over a loader by its name"),
        ("def one(", "def one(*given, ", "plain parameters of one, and found others"),
        ("    fit(model", "    run(fit, model", "a call of fit, by which to pass the pace"),
        ("one(model, loader", "each.one(model, loader", "a call of one, by which to pass the pace"),
        ("tqdm(batches)", "zip(tqdm(batches), others)", "a loop over one loader, and found zip"),
        (".mean()", ".sum()", "a loss that is a mean over the batch, and found a sum"),
        (".mean()", ".sum() / tokens", "a loss that is a mean over the batch, and found a sum"),
        ("(model(x) - y).square().mean()", "mse(model(x), y, reduction='sum')", "a loss that is a mean"),
        (
            "loss = (model(x) - y).square().mean()",
            "mse = MSELoss(reduction='sum')\n        loss = mse(model(x), y)",
            "a loss that is a mean",
        ),
        ("(model(x) - y).square().mean()", "torch.sum((model(x) - y).square())", "a loss that is a mean"),
        (
            "\n\ndef fit(",
            "\n\ndef elbo(x):\n    return mse(x, reduction='sum')\n\n\ndef both(x):\n    return elbo(x)\n\ndef fit(",
            "a loss that is a mean",
        ),
        ("\n    loader = DataLoader(data, 8)", "", "the loader loader in main, which makes the model"),
        ("import torch", "import torch\npace = 3", "a name for the new object, and found that pace"),
        ("\n", "\r\n", "lines that end without a carriage return"),
    ],
)
def test_unknown_form_lists_what_was_looked_for(old: str, new: str, missing: str) -> None:
    assert old in PLAIN
    script = PLAIN.replace("(model(x) - y).square().mean()", "both(model(x))") if "elbo" in new else PLAIN
    with pytest.raises(UnknownForm) as error:
        changed(script.replace(old, new, 1))
    assert missing in str(error.value)


def test_what_the_watch_did_not_see_is_left_alone() -> None:
    with pytest.raises(UnknownForm, match="the loop over the DataLoader, and did not see that"):
        changed(PLAIN, {name: text for name, text in PLACES.items() if name != "fetch"})
    with pytest.raises(UnknownForm, match="a sampler of torch's"):
        changed(PLAIN, options=None)
    with pytest.raises(UnknownForm, match="a file of Python text"):
        changed("x = (\n", dict.fromkeys(PLACES, "x"))
    loop = LoopForm(24, 1, 1, {"processes": 0, "stream": False, "options": []}, "", [], True)
    for files, words in (
        (["gone.py"] * 4, "a file of Python text"),
        (["a.py", *["b.py"] * 3], "in one file"),
    ):
        places = {name: (file, 1) for name, file in zip(PLACES, files, strict=True)}
        with pytest.raises(UnknownForm, match=words):
            patched(loop._replace(places=places), ["global_batch=24"])


ACCELERATED = """import torch
a = Accelerator()
net, opt, loader = a.prepare(
    net, opt, loader
)
for step, x in enumerate(loader):
    loss = net(x).mean()
    loss.backward()
    opt.step()
"""
LIGHT = """import lightning as L
loader = DataLoader(data, 8)
trainer = L.Trainer(max_epochs=2)
trainer.fit(module, loader)
"""
HF = """from transformers import Trainer
trainer = Trainer(model, args)
trainer.train()
"""


def test_accelerator_is_that_which_prepares_the_model() -> None:
    places = {"made": "a.prepare", "fetch": "enumerate(", "backward": ".backward(", "step": "opt.step("}
    new = changed(ACCELERATED, places, "accelerate")
    assert ")\npace = AcceleratePace(a, net, global_batch=24)\nloader = pace.loader(loader.dataset" in new
    assert "    pace.backward(loss)\n    opt.step()\n" in new
    script = ACCELERATED.replace("a.prepare(", "prepare(")
    with pytest.raises(UnknownForm, match="the Accelerator whose prepare wraps the model, and found none"):
        changed(script, places | {"made": "prepare("}, "accelerate")


@pytest.mark.parametrize(
    ("old", "new", "added"),
    [
        ("", "", "trainer = L.Trainer(max_epochs=2, callbacks=[balanced])"),
        ("(max_epochs=2)", "()", "trainer = L.Trainer(callbacks=[balanced])"),
        ("(max_epochs=2)", "(\n    max_epochs=2,\n)", "    max_epochs=2, callbacks=[balanced]\n)"),
        ("_epochs=2", "_epochs=2, callbacks=[a, b]", "callbacks=[balanced, a, b])"),
        ("_epochs=2", "_epochs=2, callbacks=[]", "callbacks=[balanced])"),
    ],
)
def test_lightning_trainer_gets_the_callback_and_the_loader(old: str, new: str, added: str) -> None:
    text = changed(LIGHT.replace(old, new, 1), dict.fromkeys(PLACES, ".fit("), "lightning")
    ast.parse(text)
    assert added in text
    assert "balanced = BalancedCallback(global_batch=24)\ntrainer" in text
    assert "balanced.loader(loader.dataset, num_workers=loader.num_workers))" in text


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        (", loader)", ")", "a DataLoader by name as the second argument of fit"),
        (", loader)", ", datamodule=data)", "a DataLoader by name as the second argument of fit"),
        ("=2)", "=2, callbacks=more)", "a list of callbacks in the call of Trainer"),
        ("trainer = ", "trainer: L.Trainer = ", "the assignment of trainer"),
    ],
)
def test_unknown_lightning_script_lists_what_was_looked_for(old: str, new: str, missing: str) -> None:
    with pytest.raises(UnknownForm, match=missing):
        changed(LIGHT.replace(old, new, 1), dict.fromkeys(PLACES, ".fit("), "lightning")


def test_hugging_face_trainer_is_replaced() -> None:
    places = dict.fromkeys(PLACES, ".train(")
    assert "trainer = BalancedTrainer(model, args)" in changed(HF, places, "transformers")
    with pytest.raises(UnknownForm, match="for SFTTrainer, write a class of BalancedTrainer and it"):
        changed(HF.replace("= Trainer", "= SFTTrainer"), places, "transformers")


def test_code_beside_the_update_of_a_scaler_stays() -> None:
    scaled = PLAIN.replace("loss.back", "scaler.scale(loss).back")
    for update, known in (("scaler.update()", True), ("scale = scaler.get_scale(); scaler.update()", False)):
        script = scaled.replace("optimizer.step()", f"scaler.step(optimizer)\n        {update}")
        with contextlib.nullcontext() if known else pytest.raises(UnknownForm, match="on a separate line"):
            changed(script)


def test_lines_are_printed_as_they_are() -> None:
    """Tabs, words between colons and a form feed; a last line that does not end cannot be printed."""
    script = (
        "import torch\n\x0c\nmodel = DDP(net)\nloader = get()\nfor x in loader:\n\tloss = f(x)  # :warning: [b]\n"
        "\tloss.backward()\n\toptimizer.step()\n"
    )
    new = changed(script, PLACES | {"fetch": "in loader"})
    assert new.endswith("\tloss = f(x)  # :warning: [b]\n\tpace.backward(loss)\n\tpace.step(optimizer)\n")
    with pytest.raises(UnknownForm, match="a newline at the end"):
        changed(script[:-1], PLACES | {"fetch": "in loader"})
    shown = io.StringIO()
    show_lines(["-\tloss = f(x)  # :warning: [b]"], Console(file=shown, width=20))
    assert shown.getvalue() == "  -\tloss = f(x)  # :warning: [b]\n"
