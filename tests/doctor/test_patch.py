"""The diff of a script's own lines, or none where the script is not recognized."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from paceline.doctor.findings import show_lines
from paceline.doctor.patch import patched
from paceline.doctor.phases import Loop

SCRIPT = '''"""Trains."""

from __future__ import annotations

import torch


def fit(model, loader, optimizer, *, epochs):
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


def changed(script: str, place: Path, places: dict[str, str] = PLACES, **more: object) -> str | None:
    """The script with its diff applied; None without one."""
    file = place / "train.py"
    file.write_bytes(script.encode())
    lines = script.split("\n")
    found = {
        name: (str(file), 1 + next(i for i, line in enumerate(lines) if text in line))
        for name, text in places.items()
    }
    loader = {"processes": 2, "stream": False, "options": ["num_workers={loader}.num_workers"], **more}
    diff = patched(Loop(24, 1, 1, loader, "", [], True, found), "paceline.torch.Pace", "global_batch=24")
    if not diff:
        return None
    indented = "Some words.\n" + "".join(f"  {line}\n" for line in diff)
    subprocess.run(["patch", "-p0", "--quiet"], cwd=place, input=indented, text=True, check=True)
    return file.read_text(encoding="utf-8")


def test_the_pace_is_handed_through_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    new = changed(SCRIPT.replace(", *, epochs", ", epochs"), tmp_path)
    assert new is not None
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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),  # arguments by keyword alone
        ("one(model, loader", "one(model, loaders[0]"),
        ("loss.backward()", "loss.backward(retain_graph=True)"),
        ("optimizer.step()", "optimizer.step(closure)"),
        ("model = DDP(net)", "models.append(DDP(net))"),
        ("enumerate(tqdm(batches))", "[tqdm(batches)]"),
        ("def one(", "def one(*given, "),
        ("    fit(model", "    run(fit, model"),
        ("one(model, loader", "each.one(model, loader"),
        ("tqdm(batches)", "zip(tqdm(batches), others)"),
        (".mean()", ".sum()"),
        (".mean()", ".sum() / tokens"),
        ("(model(x) - y).square().mean()", "mse(model(x), y, reduction='sum')"),
        (
            "loss = (model(x) - y).square().mean()",
            "mse = MSELoss(reduction='sum')\n        loss = mse(model(x), y)",
        ),
        ("\n    loader = DataLoader(data, 8)", ""),  # it is a name of the module
        ("\n", "\r\n"),
    ],
)
def test_what_is_not_recognized_is_left_alone(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = SCRIPT if not old else SCRIPT.replace(", *, epochs", ", epochs").replace(old, new, 1)
    assert changed(script, tmp_path) is None


def test_what_the_watch_did_not_see_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = SCRIPT.replace(", *, epochs", ", epochs")
    assert changed(script, tmp_path, {name: text for name, text in PLACES.items() if name != "fetch"}) is None
    assert changed(script, tmp_path, options=None) is None, "a sampler of its own"
    assert changed("x = (\n", tmp_path, dict.fromkeys(PLACES, "x")) is None
    gone = {name: (str(tmp_path / "gone.py"), 1) for name in PLACES}
    loop = Loop(24, 1, 1, {"processes": 0, "stream": False, "options": []}, "", [], True, gone)
    assert patched(loop, "paceline.torch.Pace", "global_batch=24") == []


def test_what_stands_beside_the_update_of_a_scaler_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scaled = SCRIPT.replace(", *, epochs", ", epochs").replace("loss.back", "scaler.scale(loss).back")
    for update, known in (("scaler.update()", True), ("scale = scaler.get_scale(); scaler.update()", False)):
        script = scaled.replace("optimizer.step()", f"scaler.step(optimizer)\n        {update}")
        assert (changed(script, tmp_path) is not None) == known


def test_lines_are_printed_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tabs, words between colons and a form feed; a last line that does not end cannot be printed."""
    monkeypatch.chdir(tmp_path)
    script = (
        "import torch\n\x0c\nmodel = DDP(net)\nloader = get()\nfor x in loader:\n\tloss = f(x)  # :warning: [b]\n"
        "\tloss.backward()\n\toptimizer.step()\n"
    )
    new = changed(script, tmp_path, PLACES | {"fetch": "in loader"})
    assert new is not None
    assert new.endswith("\tloss = f(x)  # :warning: [b]\n\tpace.backward(loss)\n\tpace.step(optimizer)\n")
    assert changed(script[:-1], tmp_path, PLACES | {"fetch": "in loader"}) is None
    shown = io.StringIO()
    show_lines(["-\tloss = f(x)  # :warning: [b]"], Console(file=shown, width=20))
    assert shown.getvalue() == "  -\tloss = f(x)  # :warning: [b]\n"
