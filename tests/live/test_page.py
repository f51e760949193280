"""The page in a real browser: live, zoomable, robust, for everybody."""

import itertools
import os
import shutil
import subprocess
import sys

import pytest

from support import browsers
from support.forks import Program, below
from support.growing import go_on, start
from support.guarantees import guarantee

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
expect.set_options(timeout=120_000)


@pytest.fixture
def recorder(tmp_path):
    with start(tmp_path / "run") as recorder:
        yield recorder


def says(page, words):
    expect(page.locator("#says")).to_have_text(words)


def test_it_waits_then_follows_the_run_to_its_end(recorder, watched, tab):
    page = tab(watched(recorder.run_dir).url)
    expect(page.locator("#state")).to_have_text("Waiting for the first round")
    expect(page.locator("h1")).to_have_text("level on 4 workers")
    go_on(recorder, 0, 1)
    expect(page.locator("#state")).to_have_text("Running")
    says(page, "All 1 round")
    go_on(recorder, 1, 40)
    says(page, "All 40 rounds")
    expect(page.locator("#cards")).not_to_contain_text("straggler")  # the sentences tell of it
    sentences = page.locator("#sentences")
    expect(sentences).to_contain_text("Worker 3 has been the straggler since round 10")
    expect(sentences).to_contain_text("Balancing would save")
    rows = page.locator("#workers li")
    expect(rows).to_have_count(4)
    expect(rows.nth(3)).to_contain_text("worker 3 ▲ straggler")
    expect(rows.nth(0)).to_contain_text("64 samples")
    assert page.evaluate("getComputedStyle(document.querySelectorAll('#workers .busy')[3]).width") != "0px"
    titles = page.locator("#charts h3").all_text_contents()
    assert titles[:3] == ["Time per round", "Load per worker", "Speed of each worker"]
    assert "Compute and wait" in titles
    first = page.locator("#charts figure").first.inner_html()
    go_on(recorder, 40, 60)
    says(page, "All 60 rounds")
    assert page.locator("#charts figure").first.inner_html() != first
    recorder.finish()
    expect(page.locator("#state")).to_have_text("Finished")
    expect(page.locator("#findings")).to_contain_text("Worker 3")
    expect(page).to_have_title("60 · level on 4 workers · Paceline")


@guarantee(
    "The live page, the report, a comparison and the trace name lost workers, their rounds and what they "
    "cost."
)
@pytest.mark.processes
def test_a_real_training_run_in_which_a_worker_is_killed(tmp_path, watched, tab):
    pytest.importorskip("torch")
    run_dir = tmp_path / "run"
    command = ["-m", "paceline", "train", "--elastic"]
    command += ["--workers", "2", "--policy", "level", "--steps", "60", "--slowdown", "1,2"]
    command += ["--max-restarts", "0", "--out", str(run_dir)]
    training = Program(command, tmp_path)
    try:
        while not (run_dir / "run.json").exists():
            assert training.poll() is None, training.communicate()
        page = tab(watched(run_dir).url)
        workers = page.locator("#workers li")
        expect(workers).to_have_count(2, timeout=240_000)  # the ranks load torch first
        expect(page.locator("h1")).to_have_text("level on 2 workers")
        worker_processes(training)[-1].kill()
        marks = page.locator("#workers li.gone")
        expect(marks).to_contain_text("✕ since round", timeout=240_000)
        expect(marks).to_contain_text("was killed by SIGKILL")
        sentences = page.locator("#sentences")
        expect(sentences).to_contain_text("was killed by SIGKILL in round")
        expect(sentences).to_contain_text("and no sample; it is not replaced yet.")
        while training.poll() is None:
            page.wait_for_timeout(100)
        assert training.returncode == 0, training.communicate()
        expect(page.locator("#state")).to_have_text("Finished")
        says(page, "All 60 rounds")
        expect(page.locator("#findings")).to_contain_text("was killed by SIGKILL in round")
        assert page.locator("#charts figure").first.locator("path.lost").count() == 1
        assert len(page.locator("#findings li").all_text_contents()) >= 3
    finally:
        training.kill()
        training.wait()


def worker_processes(training):
    """Those of the workers: forked by a process that the command started."""
    return sorted(
        (each for each in below(training.pid) if each.ppid() != training.pid), key=lambda each: each.pid
    )


def test_a_worker_is_lost_and_another_takes_its_place(recorder, watched, tab):
    go_on(recorder, 0, 20)
    lost = {"what": "worker 2 gave no heartbeat for 1 s", "seconds_lost": 1.2}
    go_on(recorder, 20, 21, events=[lost])
    page = tab(watched(recorder.run_dir).url)
    row, sentences = page.locator("#workers li").nth(2), page.locator("#sentences li")
    expect(row).to_contain_text("worker 2 ✕ since round 20")
    expect(row).to_contain_text("gave no heartbeat for 1 s")
    said = "Worker 2 gave no heartbeat for 1 s in round 20; this cost 1.2 s and no sample; "
    expect(sentences.first).to_have_text(f"{said}it is not replaced yet.")
    chart = page.locator("#charts figure").first
    expect(chart).to_contain_text("vertical lines: workers were lost or left in round 20")
    expect(chart.locator(".legend")).to_contain_text("a worker was lost or left")
    assert chart.locator("path.lost").count() == 1
    assert browsers.barriers(page) == []
    go_on(recorder, 21, 22, events=[{"what": "worker 2 joined", "seconds_lost": 0.1}])
    expect(row).to_contain_text("worker 2 + joined in round 21")
    expect(sentences.first).to_have_text(f"{said}it was replaced in round 21.")
    go_on(recorder, 22, 200)  # long ago
    says(page, "All 200 rounds")
    expect(row.locator("b")).to_have_text("worker 2")


def test_it_survives_the_servers_restart(recorder, watched, tab):
    go_on(recorder, 0, 50)
    server = watched(recorder.run_dir)
    page = tab(f"{server.url}#10-30", may_lose=True)
    says(page, "Rounds 10 to 29 of 50")
    server.stop()
    expect(page.locator("#state")).to_have_text("Connection lost")
    expect(page.locator("#notice")).to_contain_text("reconnects by itself")
    go_on(recorder, 50, 70)
    server.start()
    says(page, "Rounds 10 to 29 of 70")
    expect(page.locator("#state")).to_have_text("Running")
    expect(page.locator("#notice")).to_be_hidden()
    go_on(recorder, 70, 80)
    says(page, "Rounds 10 to 29 of 80")


def test_a_run_directory_that_vanishes_and_comes_back(recorder, watched, tab, tmp_path):
    go_on(recorder, 0, 20)
    page = tab(watched(recorder.run_dir).url)
    says(page, "All 20 rounds")
    shutil.move(recorder.run_dir, tmp_path / "away")
    expect(page.locator("#state")).to_have_text("Run directory gone")
    expect(page.locator("#notice")).to_have_text(
        f"The run directory {recorder.run_dir} is gone; this page shows what was read before."
    )
    expect(page.locator("#charts figure").first).to_be_visible()
    shutil.move(tmp_path / "away", recorder.run_dir)
    go_on(recorder, 20, 30)
    expect(page.locator("#notice")).to_be_hidden()
    says(page, "All 30 rounds")


def test_a_silent_run_and_a_damaged_one(recorder, watched, tab, monkeypatch):
    monkeypatch.setattr("paceline.live.panel.QUIET", 0.5)
    monkeypatch.setattr("paceline.live.panel.EXPECTED", 1.0)
    go_on(recorder, 0, 20)
    page = tab(watched(recorder.run_dir).url)
    expect(page.locator("#state")).to_have_text("Silent")
    expect(page.locator("#notice")).to_contain_text("No new round since")
    with (recorder.run_dir / "rounds.jsonl").open("a") as file:
        file.write("no round\n")
    expect(page.locator("#state")).to_have_text("Record damaged")
    expect(page.locator("#notice")).to_contain_text("line 21 is damaged: it is not valid JSON")


def test_zoom_by_keyboard(recorder, watched, tab):
    go_on(recorder, 0, 400)
    page = tab(watched(recorder.run_dir).url)
    says(page, "All 400 rounds")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "overview":
            break
    assert page.evaluate("document.activeElement.id") == "overview"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    keys = {
        "+": "Rounds 100 to 299 of 400",
        "-": "All 400 rounds",
        "End": "All 400 rounds",
    }
    for key, words in keys.items():
        page.keyboard.press(key)
        says(page, words)
    page.keyboard.press("+")
    page.keyboard.press("+")
    says(page, "Rounds 150 to 249 of 400")
    page.keyboard.press("ArrowRight")
    says(page, "Rounds 200 to 299 of 400")
    page.keyboard.press("Home")
    says(page, "Rounds 0 to 99 of 400")
    page.keyboard.press("End")
    says(page, "Rounds 300 to 399 of 400")
    go_on(recorder, 400, 420)  # the newest are followed
    says(page, "Rounds 320 to 419 of 420")
    page.reload()
    says(page, "Rounds 320 to 419 of 420")
    page.locator("#overview").focus()
    page.keyboard.press("0")
    says(page, "All 420 rounds")
    page.get_by_role("button", name="Newest 100").focus()
    page.keyboard.press("Enter")
    says(page, "Rounds 320 to 419 of 420")


def test_zoom_by_pointer(recorder, watched, tab):
    go_on(recorder, 0, 400)
    page = tab(watched(recorder.run_dir).url)
    says(page, "All 400 rounds")
    box = page.locator("#overview").bounding_box()

    def drag(start, end, box=box):
        page.mouse.move(box["x"] + start * box["width"], box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + end * box["width"], box["y"] + 20, steps=4)
        page.mouse.up()

    drag(0.25, 0.5)
    says(page, "Rounds 100 to 199 of 400")
    drag(0.3, 0.55)  # inside the brush: moves it
    says(page, "Rounds 200 to 299 of 400")
    field = page.locator(".plot[data-axis=rounds] .field").nth(0)
    field.scroll_into_view_if_needed()
    drag(0.1, 0.5, field.bounding_box())
    says(page, "Rounds 210 to 249 of 400")
    page.locator("#overview").dblclick(position={"x": 5, "y": 10})
    says(page, "All 400 rounds")
    page.locator("#overview").hover(position={"x": box["width"] / 2, "y": 20})
    page.mouse.wheel(0, -100)
    says(page, "Rounds 40 to 359 of 400")
    field.hover(position={"x": 40, "y": 40})
    expect(page.locator(".tip")).to_contain_text("split by speed")


def test_zoom_moves_every_chart_and_each_names_its_rounds(recorder, watched, tab):
    go_on(recorder, 0, 400)
    page = tab(watched(recorder.run_dir).url)
    says(page, "All 400 rounds")
    whole = page.locator("#charts figure").evaluate_all("all => all.map((each) => each.innerHTML)")
    assert not [each for each in whole if "in rounds" in each]
    page.locator("#overview").focus()
    page.keyboard.press("+")
    says(page, "Rounds 100 to 299 of 400")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")  # what is out of sight is drawn, too
    part = page.locator("#charts figure").evaluate_all("all => all.map((each) => each.innerHTML)")
    assert len(part) == len(whole) == 7
    assert [i for i, (one, other) in enumerate(zip(part, whole, strict=True)) if one == other] == []
    told = ["Loss against time", "Who was the straggler", "Where the time went"]
    for title in told:
        figure = page.locator("figure", has=page.get_by_role("heading", name=title))
        expect(figure.locator("figcaption p")).to_contain_text("in rounds 100 to 299")


def test_grey_boxes_stand_for_what_is_still_to_come(recorder, watched, tab):
    page = tab(watched(recorder.run_dir).url)
    expect(page.locator("#state")).to_have_text("Waiting for the first round")
    expect(page.locator("#loading")).to_be_hidden()  # there is nothing that could be loaded
    held, free = [], []
    page.route("**/figures*", lambda route: route.continue_() if free else held.append(route))
    go_on(recorder, 0, 20)
    page.locator("#loading .card").first.wait_for(state="visible")
    assert page.locator("#charts figure").count() == 0
    free.append(True)
    for asked in held:
        asked.continue_()
    says(page, "All 20 rounds")
    expect(page.locator("#loading")).to_be_hidden()


@guarantee(
    "axe finds nothing serious on the first page of the docs, the report, a comparison, the live page and "
    "the service's page."
)
@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        pytest.param(360, "light", marks=pytest.mark.nightly),  # the others have this width, and this scheme
        (360, "dark"),
        (1600, "light"),
    ],
)
def test_it_fits_keeps_to_the_readers_choice_and_axe_finds_nothing_serious(
    recorder, watched, tab, width, scheme
):
    go_on(recorder, 0, 15)
    page = tab(watched(recorder.run_dir).url, width=width, scheme=scheme)
    says(page, "All 15 rounds")
    opened = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"
    page.evaluate(opened)
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert browsers.barriers(page) == []
    dark = "rgb(15, 20, 26)"
    background = "getComputedStyle(document.body).backgroundColor"
    assert (page.evaluate(background) == dark) == (scheme == "dark")
    page.get_by_role("button", name="Light or dark").click()
    assert (page.evaluate(background) == dark) == (scheme == "light")
    page.reload()
    says(page, "All 15 rounds")
    assert (page.evaluate(background) == dark) == (scheme == "light")
    page.evaluate(opened)
    recorder.finish()
    expect(page.locator("#findings")).to_contain_text("Worker 3")
    assert browsers.barriers(page) == []


def test_every_control_has_a_name_and_every_chart_a_table(recorder, watched, tab):
    go_on(recorder, 0, 60)
    page = tab(watched(recorder.run_dir).url)
    says(page, "All 60 rounds")
    named = page.evaluate(
        "[...document.querySelectorAll('button, [tabindex]')].every(e => (e.ariaLabel || e.innerText).length > 3)"
    )
    assert named
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(e => +e.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    for title in ("Time per round", "Load per worker", "Speed of each worker", "Loss against time"):
        figure = page.locator("figure", has=page.get_by_role("heading", name=title))
        figure.locator("summary").click()
        expect(figure.locator("tbody tr")).to_have_count(12)
    table = page.locator("figure", has_text="Load per worker").first.locator("tbody tr").first
    assert table.locator("td").all_text_contents() == ["Round 0", "64", "64", "64", "64"]
    go_on(recorder, 60, 70)  # an open table stays open
    says(page, "All 70 rounds")
    expect(page.locator("figure details[open]")).to_have_count(4)


def server_rounds(recorder, first, end, workers=4):
    """Rounds as a parameter server records them: it waits for all but one, and drops what comes late."""
    for t in range(first, end):
        late = (t // 20) % workers
        loads = [0 if i == late else 64 for i in range(workers)]
        compute = [0.0 if i == late else 0.05 + 0.001 * i for i in range(workers)]
        recorder.round(
            round=t, epoch=0, time=0.06 * (t + 1), seconds=0.06, batch=64 * (workers - 1), loads=loads,
            compute=compute, shares=[1 / workers] * workers, loss=2.3 / (1 + t / 50), quorum=workers - 1,
            present=workers, rate=0.1, staleness=[0] * (workers - 2) + [t % 3], dropped={"late": t % 2},
            dropped_samples=64 * (t % 2),
        )  # fmt: skip


def test_a_servers_run_shows_its_gate_and_k(tmp_path, watched, tab):
    config = {"engine": "ray", "policy": "equal", "sync": "bsp", "backup": "static:3", "steps": 100}
    with start(tmp_path / "run", **config) as recorder:
        server_rounds(recorder, 0, 60)
    page = tab(watched(tmp_path / "run").url)
    sentences = page.locator("#sentences")
    expect(sentences).to_contain_text(
        "An update waits for 3 of 4 workers lately (gate bsp and backup policy static:3); "
        "its gradients were up to 2 updates old; gradients not used in the whole run: 30 late."
    )
    expect(page.locator("#cards")).to_contain_text("60 of 100 rounds")
    expect(page.locator("#cards")).to_contain_text("in 3.6 s, about 2 s left")
    titles = page.locator("#charts h3")
    expect(titles.nth(3)).to_have_text("Gradients that each update waited for")
    expect(titles.nth(4)).to_have_text("Staleness and waste")


def test_sentences_name_the_straggler_as_the_charts_do(recorder, watched, tab):
    go_on(recorder, 0, 1, names=["gpu-a", "gpu-b", "gpu-c", "gpu-d"])
    go_on(recorder, 1, 40)
    page = tab(watched(recorder.run_dir).url)
    expect(page.locator("#workers li").nth(3)).to_contain_text("worker 3, gpu-d")
    expect(page.locator("#sentences")).to_contain_text(
        "Worker 3 (gpu-d) has been the straggler since round 10"
    )
    expect(page.locator("#sentences")).to_contain_text("Worker 3 (gpu-d) is")
    recorder.finish()
    expect(page.locator("#findings")).to_contain_text("Worker 3 (gpu-d) was last")


def test_names_are_text(tmp_path, watched, tab):
    evil = '<img src="x" onerror="document.title=1"><script>alert(1)</script>'
    with start(tmp_path / evil.replace("/", "-"), policy=evil, model=evil, sync=evil) as recorder:
        server_rounds(recorder, 0, 5)
    page = tab(watched(recorder.run_dir).url)
    expect(page.locator("h1")).to_have_text(f"{evil} on 4 workers")
    expect(page.locator("#sentences")).to_contain_text(f"gate {evil}")
    shutil.move(recorder.run_dir, tmp_path / "away")
    expect(page.locator("#notice")).to_contain_text("onerror")
    assert page.locator("main img, main script[src]").count() == 0


def test_many_workers_and_one_process_that_appends(tmp_path, watched, tab):
    script = [sys.executable, "-m", "support.growing", str(tmp_path / "run"), "0", "12", "0.05"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    appending = subprocess.Popen(script, env=environment)
    try:
        while not (tmp_path / "run" / "run.json").exists():
            assert appending.poll() is None
        page = tab(watched(tmp_path / "run").url)
        expect(page.locator("#state")).to_have_text("Finished")
        says(page, "All 12 rounds")
    finally:
        appending.kill()
        appending.wait()
    with start(tmp_path / "many", workers=300) as recorder:
        go_on(recorder, 0, 15, workers=300, slow=7)
    page = tab(watched(tmp_path / "many").url)
    says(page, "All 15 rounds")
    expect(page.locator("#workers li")).to_have_count(64)
