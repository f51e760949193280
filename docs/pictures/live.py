"""Takes the pictures of the live page of a recorded run: live.png and live-dark.png, as it was after so many
rounds, and live.webp and live-dark.webp, which move from its first rounds to its last.

python docs/pictures/live.py runs/digits-mlp-level 180 docs/pictures/live

CHROMIUM says where the browser is.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from paceline.cli.watch import listen, make_server

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
WIDTH, HEIGHT = 1360, 1270
MOVING = (1120, 800)  # pixels of the window that moves, and
SHOWN = (840, 600)  # of its picture
FRAMES, PAUSE, LAST = 22, 450, 2500  # pictures; milliseconds for each, and for the last one
QUALITY = 62


def grow(run_dir: Path, rounds: int, target: Path) -> None:
    """The first rounds of a record, as of a run that goes on."""
    target.mkdir(exist_ok=True)
    shutil.copy(run_dir / "run.json", target)
    with (run_dir / "rounds.jsonl").open() as lines:
        text = "".join(line for line, _ in zip(lines, range(rounds), strict=False))
    (target / "new").write_text(text)
    (target / "new").rename(target / "rounds.jsonl")


@contextmanager
def served(target: Path) -> Iterator[str]:
    """The live page of a run, and its address."""
    listener = listen("127.0.0.1", 0)
    server = make_server(target, "127.0.0.1")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = True
    thread.join()


def shot(page: Any) -> Image.Image:
    """What the window shows now."""
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def still(page: Any, address: str, run_dir: Path, rounds: int, target: Path, path: str) -> None:
    """One picture of the whole page, of a run whose newest round has just ended."""
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    page.goto(address)
    page.wait_for_selector("#charts figure")
    page.wait_for_timeout(800)  # for the bars to reach their lengths
    grow(run_dir, rounds + 1, target)
    page.wait_for_function(
        "words => document.getElementById('says').textContent === words", arg=f"All {rounds + 1:,} rounds"
    )
    shot(page).quantize(192, dither=Image.Dither.NONE).save(path, optimize=True)


def moving(page: Any, address: str, run_dir: Path, target: Path, path: str) -> None:
    """The page while the run grows."""
    page.set_viewport_size({"width": MOVING[0], "height": MOVING[1]})
    with (run_dir / "rounds.jsonl").open() as lines:
        total = sum(1 for _ in lines)
    page.goto(address)
    frames = []
    for i in range(1, FRAMES + 1):
        rounds = max(3, round(total * i / FRAMES))
        grow(run_dir, rounds, target)
        page.wait_for_function(
            "words => document.getElementById('says').textContent === words", arg=f"All {rounds:,} rounds"
        )
        page.wait_for_timeout(600)
        frames.append(shot(page).resize(SHOWN, Image.Resampling.LANCZOS))
    pauses = [PAUSE] * (FRAMES - 1) + [LAST]
    frames[0].save(
        path, save_all=True, append_images=frames[1:], duration=pauses, loop=0, quality=QUALITY, method=6
    )
    print(f"{path}: {Path(path).stat().st_size / 1e3:.0f} kB")


def main(run_dir: str, rounds: str, out: str) -> None:
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for scheme, name in (("light", out), ("dark", f"{out}-dark")):
            target = Path(directory) / scheme
            grow(Path(run_dir), int(rounds), target)
            with served(target) as address:
                page = browser.new_page(color_scheme=scheme)
                still(page, address, Path(run_dir), int(rounds), target, f"{name}.png")
                grow(Path(run_dir), 3, target)
                moving(page, address, Path(run_dir), target, f"{name}.webp")
                page.close()
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
