"""Does the live page stay smooth with 64 workers and 10,000 rounds?

What following costs against reading everything again, what a stretch of the run costs to draw, how many bytes a page
gets, and (where there is a Chromium) how long a browser is busy with it: python benchmarks/live.py [ROUNDS] [WORKERS]
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from scaffold import command_line, progress

from paceline.cli.watch import listen, make_server
from paceline.live.tail import Tail
from paceline.runs import Recorder, read
from paceline.runs.columns import RECENT
from paceline.runs.report import figures

CHROMIUM = "/usr/bin/chromium"
LONG_TASKS = """
window.busy = [];
new PerformanceObserver((list) => busy.push(...list.getEntries().map((task) => task.duration)))
  .observe({ type: "longtask" });
window.frames = [];
let before = 0;
requestAnimationFrame(function step(now) {
  if (before) frames.push(now - before);
  before = now;
  requestAnimationFrame(step);
});
"""


def extend(recorder: Recorder, first: int, end: int, workers: int) -> None:
    """Rounds of noisy workers, two of them slow."""
    random = np.random.default_rng(first)
    loads = np.full(workers, 64)
    for t in progress(range(first, end), "rounds of the record"):
        compute = 64e-3 * np.exp(random.normal(0, 0.08, workers))
        compute[:2] *= 2
        seconds = float(compute.max()) + 2e-3
        recorder.round(
            round=t, epoch=t // 100, time=seconds * (t + 1), seconds=seconds, batch=64 * workers, loads=loads,
            compute=compute, overhead=np.full(workers, 1e-3), loss=2.3 / (1 + t / 100),
        )  # fmt: skip


def least(call: Callable[[], object], times: int = 5) -> float:
    """CPU seconds of the quickest of some calls: others use this machine too."""
    spent = []
    for _ in range(times):
        began = time.process_time()
        call()
        spent.append(time.process_time() - began)
    return min(spent)


def following(recorder: Recorder, rounds: int, workers: int) -> Tail:
    """Read the record, then what is new of it."""
    tail = Tail(recorder.run_dir)
    began = time.process_time()
    while tail.poll():
        pass
    whole = time.process_time() - began
    first = rounds

    def news() -> None:
        nonlocal first
        extend(recorder, first, first + 10, workers)
        first += 10

    news()
    began = time.process_time()
    tail.poll()
    new = time.process_time() - began
    size = (recorder.run_dir / "rounds.jsonl").stat().st_size / 1e6
    print(f"{rounds:,} rounds of {workers} workers, {size:.1f} MB on disk (CPU seconds)")
    print(f"  reading all of it              {whole * 1e3:9.1f} ms")
    print(f"  reading 10 new rounds          {new * 1e3:9.2f} ms   {whole / new:8,.0f} times less than all")
    print(f"  looking, nothing new           {least(tail.poll) * 1e3:9.3f} ms")
    again = least(lambda: read(recorder.run_dir), 1)
    print(f"  runs.read, as a report does    {again * 1e3:9.1f} ms")
    return tail


def drawing(tail: Tail) -> None:
    """What stretches of it cost to draw, and how large they are."""
    columns, total = tail.columns, len(tail.columns)
    print(
        f"\n{'stretch':>16} {'thinned ms':>11} {'drawn ms':>9} {'kB':>8} {'kB sent':>8} {'of the record':>14}"
    )
    record = (tail.run_dir / "rounds.jsonl").stat().st_size / total
    for length in (total, total // 10, total // 100):
        start = total - length
        thinned = least(partial(columns.window, start, None, RECENT))
        drawn = least(partial(figures, columns, start, None, RECENT), 3)
        content = json.dumps(figures(columns, start, None, RECENT)).encode()
        sent = len(gzip.compress(content, 1))
        print(
            f"{length:>16,} {thinned * 1e3:11.2f} {drawn * 1e3:9.1f} {len(content) / 1e3:8.0f} {sent / 1e3:8.0f} "
            f"{sent / (record * length):14.2%}"
        )


def browsing(recorder: Recorder, workers: int) -> None:
    """A browser that follows the run for a while, then zooms about in it."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        print("\nno playwright: the browser is left out")
        return
    if not shutil.which(CHROMIUM):
        print(f"\nno {CHROMIUM}: the browser is left out")
        return
    listener = listen("127.0.0.1", 0)
    server = make_server(recorder.run_dir, "127.0.0.1")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1600, "height": 1000}, bypass_csp=True)
        page.set_default_timeout(180_000)
        network = page.context.new_cdp_session(page)
        network.send("Network.enable")
        got = [0]
        network.on(
            "Network.dataReceived", lambda event: got.__setitem__(0, got[0] + event["encodedDataLength"])
        )
        page.add_init_script(LONG_TASKS)
        began = time.perf_counter()
        page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        page.wait_for_selector("#charts figure")
        opened = time.perf_counter() - began
        page.wait_for_function("document.getElementById('state').innerText !== 'Reading'")
        print(f"\nin a browser: the first charts after {opened:.1f} s")
        report(page, got, "following 20 rounds a second for 20 s", lambda: follow(recorder, workers, page))
        report(page, got, "40 steps of zooming and moving", lambda: zoom(page))
        browser.close()
    server.should_exit = True
    thread.join()


def follow(recorder: Recorder, workers: int, page: object) -> None:
    """Append rounds at a steady pace."""
    first = len(read(recorder.run_dir).round)
    for t in progress(range(first, first + 400), "rounds that the browser follows"):
        extend(recorder, t, t + 1, workers)
        page.wait_for_timeout(50)  # type: ignore[attr-defined]


def zoom(page: object) -> None:
    """In, about and out again, by keyboard."""
    page.focus("#overview")  # type: ignore[attr-defined]
    keys = ("+", "+", "+", "ArrowRight", "ArrowRight", "ArrowLeft", "-", "0")
    for key in progress(5 * keys, "keys"):
        page.keyboard.press(key)  # type: ignore[attr-defined]
        page.wait_for_timeout(150)  # type: ignore[attr-defined]


def report(page: object, got: list[int], what: str, act: Callable[[], None]) -> None:
    """What a browser was busy with while ``act`` went on."""
    page.evaluate("busy.length = frames.length = 0")  # type: ignore[attr-defined]
    got[0], began = 0, time.perf_counter()
    act()
    page.wait_for_timeout(1000)  # type: ignore[attr-defined]
    span = time.perf_counter() - began
    busy, frames = page.evaluate("[busy, frames]")  # type: ignore[attr-defined]
    late = np.quantile(frames, [0.5, 0.95, 1.0])
    print(
        f"  {what}: {got[0] / span / 1e3:.0f} kB/s; {len(busy)} tasks over 50 ms, the longest "
        f"{max(busy, default=0):.0f} ms, {sum(busy) / span / 10:.1f} % of the time; a frame every {late[0]:.0f} ms "
        f"(95 %: {late[1]:.0f}, longest {late[2]:.0f})"
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=10_000)
    parser.add_argument("workers", nargs="?", type=int, default=64)
    asked = parser.parse_args()
    rounds, workers = asked.rounds, asked.workers
    with tempfile.TemporaryDirectory() as directory:
        config = {"policy": "equal", "workers": workers, "global_batch": 64 * workers, "engine": "torch"}
        with Recorder.create(Path(directory) / "run", config) as recorder:
            extend(recorder, 0, rounds, workers)
            drawing(following(recorder, rounds, workers))
            browsing(recorder, workers)


if __name__ == "__main__":
    main()
