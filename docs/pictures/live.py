"""Takes live-light.png and live-dark.png: the live page of a recorded run, as it was after so many rounds.

python docs/pictures/live.py runs/digits-mlp-level 180 docs/pictures/live
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from paceline.cli.watch import listen, make_server

CHROMIUM = "/usr/bin/chromium"
WIDTH, HEIGHT = 1360, 1270


def as_it_was(run_dir: Path, rounds: int, target: Path) -> None:
    """The first rounds of a record, as of a run that goes on."""
    target.mkdir()
    shutil.copy(run_dir / "run.json", target)
    with (run_dir / "rounds.jsonl").open() as lines:
        (target / "rounds.jsonl").write_text(
            "".join(line for line, _ in zip(lines, range(rounds), strict=False))
        )


def main(run_dir: str, rounds: str, out: str) -> None:
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        target = Path(directory) / "run"
        as_it_was(Path(run_dir), int(rounds), target)
        listener = listen("127.0.0.1", 0)
        server = make_server(target, "127.0.0.1")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
            (target / "rounds.jsonl").touch()  # the newest round has just come
            page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}/")
            page.wait_for_selector("#charts figure")
            page.wait_for_timeout(800)  # for the bars to reach their lengths
            picture = Image.open(io.BytesIO(page.screenshot()))
            picture.convert("RGB").quantize(192, dither=Image.Dither.NONE).save(
                f"{out}-{scheme}.png", optimize=True
            )
            page.close()
        browser.close()
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
