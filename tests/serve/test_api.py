"""The API without a network: what is answered, in which terms."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")

from paceline import runs
from paceline.serve import server
from paceline.serve.events import Report
from paceline.serve.service import Service
from support.calling import GOOD, JOB, KEY, Caller, playing, refused, serving
from support.guarantees import guarantee
from support.served import TOKEN

REPEATED = guarantee(
    "A repeated join changes nothing, and a service that restarts within a round continues with the same "
    "plan."
)

pytestmark = pytest.mark.anyio
REFUSES = guarantee(
    "Malformed, unknown, unauthorized and impossible requests are refused with a message and change nothing."
)


async def test_a_round(tmp_path: Path) -> None:
    async with playing(tmp_path) as call:
        assert await call.ask("PUT", "/jobs/j", JOB) == (200, await call.state())
        assert await call.ask("GET", "/jobs") == (200, {"jobs": ["j"], "set_aside": {}, "storing": ""})
        part = {"round": 0, "samples": 6, "offset": 0, "batch": 12, "present": 2}
        part |= {"weight": 0.5, "weight_in_mean": 1.0}
        assert await call.next("a") == (200, part)
        assert await call.next("b") == (200, part | {"offset": 6})
        call.clock.now += 2.0
        waits = {"round": 0, "next": None, "waiting": "round 0 waits for the report of b"}
        assert await call.report("a", GOOD) == (200, waits)
        answer = await call.asks("a", "j", "POST", "/reports", GOOD)
        assert answer == (200, {"round": 0, "next": None, "waiting": ""}), "not asked for"
        assert await call.next("a") == (202, {"waiting": "round 0 waits for the report of b"})
        waiting = asyncio.create_task(call.next("a", wait=10.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        answer = await call.report("b", {"round": 0, "samples": 6, "seconds": 1.5, "cpu": 0.5, "memory": 1})
        assert answer == (200, {"round": 0, "next": part | {"round": 1, "offset": 6}, "waiting": ""})
        assert await waiting == (200, part | {"round": 1})
        state = await call.state()
        assert (state["rounds"], state["reports"], state["samples"], state["present"]) == (1, 2, 12, 2)
        assert state["workers"][1] == {
            "name": "b", "place": 1, "present": True, "gone": "", "round": 0, "samples": 6, "seconds": 1.5,
        }  # fmt: skip
        scraped = await call.page("/metrics")
        assert 'paceline_reports_total{job="j"} 2.0' in scraped
        assert 'paceline_worker_samples{job="j",worker="a"} 6.0' in scraped
        assert 'paceline_round_seconds_count{job="j"} 1.0' in scraped
        for name in "ab":
            assert await call.leave(name) == (204, None)
        assert await call.ask("DELETE", "/jobs/j") == (204, None)
        refused(await call.ask("GET", "/jobs/j"), 404, "job 'j' is unknown here")
        await call.create("j", "")
    assert len(runs.read(tmp_path / "runs" / "j").round) == 0, "the new job's"
    run = runs.read(tmp_path / "runs" / "j~1")
    np.testing.assert_equal(run.loads, [[6, 6]])
    np.testing.assert_equal(run.compute, [[1.0, 1.5]])
    assert run.seconds.tolist() == [2.0]
    assert run.config["engine"] == "service"
    assert run.summary["steps"] == 1


async def test_a_report_that_counts_is_answered_so_although_its_worker_has_left(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process of the same name leaves between the report and the question for the next part."""
    assert (await call.next("a"))[0] == 200
    report = call.service.report

    async def report_then_leave(job: str, name: str, secret: str, told: Report) -> None:
        await report(job, name, secret, told)
        await call.service.leave(job, name, secret)

    monkeypatch.setattr(call.service, "report", report_then_leave)
    status, said = await call.report("a", GOOD)
    assert status == 200
    assert said["next"] is None
    assert "left" in said["waiting"]
    assert (await call.state())["reports"] == 1
    assert (await call.next("a"))[0] == 410


@REPEATED
async def test_a_join_whose_answer_was_lost_may_be_repeated(call: Caller) -> None:
    """A round was handed out meanwhile, of which the worker has a part."""
    assert (await call.leave("b"))[0] == 204
    secret = "the-secret-of-worker-b"
    joined = await call.join("b", secret=secret)
    assert (await call.next("a"))[1]["present"] == 2
    assert await call.join("b", secret=secret) == joined
    part = (await call.next("b"))[1]
    assert (part["round"], part["samples"], part["offset"]) == (0, 6, 6)
    for name in "ab":
        assert (await call.report(name, GOOD))[0] == 200
    assert (await call.state())["samples"] == 12


async def test_metrics_count_rounds_by_their_seconds(call: Caller) -> None:
    for name in "ab":
        await call.next(name)
    for name, seconds in (("a", 0.5), ("b", 2.0)):
        call.clock.now += seconds
        await call.report(name, GOOD | {"seconds": seconds})
    told = await call.page("/metrics")
    assert 'paceline_round_seconds_bucket{job="j",le="1.0"} 0.0' in told
    assert 'paceline_round_seconds_bucket{job="j",le="2.5"} 1.0' in told
    assert 'paceline_round_seconds_bucket{job="j",le="+Inf"} 1.0' in told
    assert 'paceline_round_seconds_sum{job="j"} 2.5' in told


@REFUSES
async def test_tokens_and_secrets(call: Caller) -> None:
    for wrong in ("Bearer wrong", f"Basic {TOKEN}", ""):
        answer = await call.ask("GET", "/jobs/j", headers={"Authorization": wrong})
        refused(answer, 401, "the token is missing or wrong")
    for path in ("/metrics", "/nowhere", "/v1/healthy", "/jobs/j/"):
        assert (await call.http.get(path)).status_code == 401
    assert (await call.http.get("/openapi.json")).status_code == 200
    health = await call.http.get("/v1/health")
    assert (health.status_code, health.json()) == (200, {"well": True}), "a container's probe has no token"
    browser = {"Accept": "text/html,application/xhtml+xml"}
    for path in ("/", "/jobs/j/"):
        asked = await call.http.get(path, headers=browser)
        assert asked.status_code == 401
        assert 'name="token"' in asked.text, "a person gets a field for it"
        assert "form-action 'self'" in asked.headers["content-security-policy"]
    refused(
        await call.ask("GET", "/jobs", headers=browser | {"Authorization": ""}), 401, "the token is missing"
    )
    assert (await call.http.get(f"/v1/jobs?token={TOKEN}")).status_code == 401, "for pages alone"
    assert 'href="jobs/j/"' in (await call.http.get(f"/?token={TOKEN}")).text
    entered = await call.http.get(f"/jobs/j/?a=b%26c&token={TOKEN}", headers=browser)
    assert (entered.status_code, entered.headers["location"]) == (303, "/jobs/j/?a=b%26c")
    assert TOKEN not in str(entered.headers), "neither in the address nor in the cookie"
    cookie = entered.headers["set-cookie"]
    assert cookie.endswith("; Path=/; HttpOnly; SameSite=Lax")
    kept = browser | {"Cookie": f"a=b; {cookie.partition(';')[0]}"}
    for path in ("/", "/jobs/j/", "/jobs/j/panel"):
        assert (await call.http.get(path, headers=kept)).status_code == 200
    assert (await call.http.get("/v1/jobs", headers=kept)).status_code == 401, "for pages alone"
    assert (await call.http.put("/jobs/j/", headers=kept)).status_code == 401
    other = kept | {"Cookie": kept["Cookie"][:-1] + "x"}
    assert (await call.http.get("/", headers=other)).status_code == 401
    assert "<title>Paceline" in (await call.http.get(f"/jobs/j/?token={TOKEN}")).text
    assert (await call.http.get(f"/jobs/..%2f/?token={TOKEN}")).status_code == 404
    await call.next("a")
    for secret in ("", "wrong", call.secrets["j", "b"]):
        refused(await call.report("a", GOOD, secret=secret), 403, "not the secret of worker 'a'")
    refused(await call.ask("DELETE", "/jobs/j/workers/a"), 403, "not the secret of worker 'a'")
    assert (await call.state())["reports"] == 0


async def test_service_without_a_token_asks_for_none(tmp_path: Path) -> None:
    async with serving(tmp_path, token=None) as call:
        assert (await call.http.get("/v1/jobs")).status_code == 200
        answer = await call.ask("GET", "/jobs", headers={"Host": "evil.example:7070"})
        refused(answer, 403, "only to localhost")


MISTAKES = [
    ({"seconds": -1.0}, 422, "seconds: expected 0 or more"),
    ({"seconds": 0.0}, 422, "seconds=0 for samples=6: expected 1e-09 or more"),
    ({"seconds": "1"}, 422, "seconds: input should be a valid number"),
    ({"samples": -1}, 422, "samples: expected 0 or more"),
    ({"samples": 2**40}, 422, "samples: expected at most 2,147,483,647"),
    (
        {"samples": 2**31 - 1},
        422,
        "samples=2147483647: expected at most 6, the plan of round 0 for worker 'a'",
    ),
    ({"overhead": 2.0}, 422, "overhead=2: expected 0 to seconds=1"),
    ({"cpu": 1.5}, 422, "cpu: expected at most 1"),
    ({"sample": 6}, 422, "sample: it is unknown; leave it out"),
    ({"round": 1}, 409, "a future round: expected round 0"),
    (b'{"round": 0, "samples": 6, "seconds": NaN}', 422, "seconds: expected a finite number"),
    (b'{"round": 0, "samples": 6, "seconds": Infinity}', 422, "seconds: expected a finite number"),
    (b'{"round": 0, "samples": 6, "seconds": 1e999}', 422, "seconds: expected a finite number"),
    (b'{"round": 0, "samples": 6', 400, "the body is not valid JSON"),
    (b"\xff\xfe", 400, ""),
    (b"[" * 100_000, 400, ""),
    (b'{"round": ' + b"9" * 5000 + b', "samples": 6, "seconds": 1.0}', 400, ""),
    (b"", 422, "the body: it is missing"),
    (b"[]", 422, "the body: input should be"),
    (b"x" * (server.BODY_BYTES + 1), 413, "the body is too large"),
]


@REFUSES
async def test_bad_reports(call: Caller) -> None:
    await call.next("a")
    for change, status, words in MISTAKES:
        body = change if isinstance(change, bytes) else GOOD | change  # type: ignore[operator]
        refused(await call.report("a", body), status, words)
    assert (await call.state())["reports"] == 0
    assert (await call.report("a", GOOD))[0] == 200
    assert (await call.report("a", GOOD))[0] == 200, "the same again is no mistake"
    refused(await call.report("a", GOOD | {"seconds": 2.0}), 409, "has reported round 0 already")
    assert (await call.state())["reports"] == 1
    await call.next("b")
    await call.report("b", GOOD)
    await call.next("a")
    await call.report("a", GOOD | {"round": 1})
    refused(await call.report("a", GOOD), 409, "has no part in a round")
    await call.next("b")
    refused(await call.report("b", GOOD | {"seconds": 3.0}), 409, "has reported round 0 already")


@REFUSES
async def test_bad_requests(call: Caller) -> None:
    refused(await call.join("a"), 409, "worker 'a' is present already")
    refused(await call.join("c"), 409, "all 2 places are taken")
    refused(await call.join("c", place=1), 409, "place 1 is taken by worker 'b'")
    refused(await call.join("c", place=2), 409, "the job has places 0 to 1")
    refused(await call.join("../c"), 422, "name: string should match")
    refused(await call.join("c", secret="short"), 422, "secret: string should match")
    refused(await call.join("c", job="k"), 404, "job 'k' is unknown here: create it first (known jobs: j)")
    refused(await call.next("z"), 404, "worker 'z' is unknown here: join first")
    refused(await call.next("b", wait=61.0), 422, "wait: expected at most ")
    refused(await call.next("b", wait=float("nan")), 422, "wait")
    refused(await call.ask("PUT", "/jobs/j", JOB | {"batch": 24}), 409, "job 'j' exists with other settings")
    for change, words in (
        ({"policy": "levle"}, "policy 'levle' is unknown"),
        ({"workers": 0}, "workers: expected 1 or more"),
        ({"limits": [[1, 2, 3]]}, "limits.0: list should have at most 2 items"),
    ):
        refused(await call.ask("PUT", "/jobs/k", JOB | change), 422, words)
    refused(await call.ask("PUT", "/jobs/.k", JOB), 422, "job: string should match")
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"Content-Type": kind}
        refused(await call.ask("PUT", "/jobs/k", JOB, headers=headers), 415, "application/json")
    refused(await call.ask("POST", "/jobs"), 405, "method not allowed")
    answer = await call.http.options("/v1/jobs/j", headers=KEY)
    assert (answer.status_code, answer.headers["Allow"]) == (405, "DELETE, GET, PUT")
    refused(await call.ask("GET", "/nothing"), 404, "not found")


@REFUSES
@guarantee(
    "Browsers refuse to frame the service's pages elsewhere and to run "
    "foreign scripts in them (content security policies)."
)
async def test_paths_that_lead_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with playing(tmp_path) as call:
        for path in ("/jobs/j/nope", "/jobs//", "/jobs/", "/v1/jobs/", "/v1/jobs//workers", "/jobs/no/such"):
            answer = await call.http.get(path, headers=KEY)
            refused((answer.status_code, answer.json()), 404, "not found")
        refused(await call.ask("PUT", "/jobs/", JOB), 404, "not found")
        answer = await call.http.get("/jobs/j?token=x&a=b", headers=KEY)
        assert (answer.status_code, answer.headers["location"]) == (307, "j/?token=x&a=b")
        for path in ("/", "/jobs/j/"):
            policy = (await call.http.get(path, headers=KEY)).headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
    assert not caplog.records


async def test_the_silent_are_dropped(call: Caller) -> None:
    for name in "ab":
        await call.next(name)
    await call.report("a", GOOD)
    waiting = asyncio.create_task(call.next("a", wait=10.0))
    await asyncio.sleep(0)
    call.clock.now += 6.0
    status, part = await waiting
    assert (status, part["samples"], part["present"], part["weight_in_mean"]) == (200, 12, 1, 1.0)
    late = await call.report("b", GOOD | {"seconds": 6.0})
    refused(late, 410, "worker 'b' was dropped in round 0 after 6.0 s of silence")
    refused(await call.next("b"), 410, "join again to take part")
    assert (await call.state())["dropped"] == 1
    assert (await call.join("b"))[0] == 201
    await call.report("a", {"round": 1, "samples": 12, "seconds": 2.0})
    assert (await call.next("b"))[1]["samples"] == 6


async def test_a_slow_body_is_not_waited_for() -> None:
    said: list[Any] = []
    late = [b"12345", b"67890"]

    async def receive() -> Any:
        if not said:
            await asyncio.sleep(10.0)
        return {"type": "http.request", "body": late.pop(), "more_body": bool(late)}

    async def send(message: Any) -> None:
        said.append(message)

    async def app(*_: Any) -> None:
        raise AssertionError("reached")

    headers = [(b"content-length", b"10"), (b"host", b"localhost")]
    scope = {"type": "http", "path": "/v1/jobs", "headers": headers}
    await server.Bounded(app, None, None, seconds=0.05)(scope, receive, send)
    assert said[0]["status"] == 408
    assert (b"connection", b"close") in said[0]["headers"]
    assert not late, "what still comes is thrown away, so that the client can read the answer"


@REPEATED
@pytest.mark.parametrize("policy", ["level", "level:forecast=narx"])  # test_jobs.py has all policies
async def test_restart_continues_with_the_same_plan(tmp_path: Path, policy: str) -> None:
    """Twice the same job, once with restarts in every state of a round, and a stored state between."""
    paces = {"a": 0.004, "b": 0.002, "c": 0.001}

    async def train(directory: Path, restarts: bool) -> list[Any]:
        handed: list[Any] = []
        secrets: dict[tuple[str, str], str] = {}
        steps = [(number, name) for number in range(8) for name in paces]
        while len(handed) < len(steps):
            async with serving(directory) as call:
                call.secrets = secrets
                if not secrets:
                    assert (await call.ask("PUT", "/jobs/j", {"batch": 700, "workers": 3, "policy": policy}))[
                        0
                    ] == 201
                    for name in paces:
                        await call.join(name)
                for number, name in steps[len(handed) :][: 2 if restarts else None]:
                    status, part = await call.next(name)
                    assert status == 200
                    assert part["round"] == number
                    assert await call.next(name) == (200, part)
                    handed.append(part)
                    seconds = paces[name] * part["samples"] * (1 + 0.1 * (number % 3))
                    body = {"round": number, "samples": part["samples"], "seconds": seconds}
                    assert (await call.report(name, body | {"cpu": 0.5, "memory": 0.5}))[0] == 200
                    if number == 4 and name == "b":
                        call.service.write_state(call.service.catalog.running["j"])
        return handed

    plain = await train(tmp_path / "plain", False)
    assert await train(tmp_path / "restarted", True) == plain
    assert {part["samples"] for part in plain} > {233, 234}
    records = [runs.read(tmp_path / kind / "runs" / "j") for kind in ("plain", "restarted")]
    np.testing.assert_equal(records[0].loads, records[1].loads)
    np.testing.assert_equal(records[0].extras["shares"], records[1].extras["shares"])
    assert records[0].round.tolist() == records[1].round.tolist() == list(range(8))


@pytest.mark.parametrize(("comes_and_goes", "most"), [(False, 14), (True, 20)])
async def test_whole_states_keep_the_log_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_and_goes: bool, most: int
) -> None:
    """Of ten rounds, or of a worker that joins and leaves fifty times."""
    monkeypatch.setattr("paceline.serve.service.CALLS", 10)
    monkeypatch.setattr("paceline.serve.service.CALLS_PER_WORKER", 1)
    async with serving(tmp_path) as call:
        await call.create("j", "" if comes_and_goes else "ab")
        await call.rounds(*range(0 if comes_and_goes else 10))
        for _ in range(50 * comes_and_goes):
            await call.join("a")
            assert (await call.leave("a"))[0] == 204
        state = call.service.catalog.running["j"].job.state_dict()
        (kept,) = call.service.store.read()
    assert len(kept.calls) <= most
    service = Service(tmp_path)
    assert json.dumps(service.catalog.running["j"].job.state_dict()) == json.dumps(state)
    with pytest.raises(ValueError, match="in use by another service"):
        Service(tmp_path)
    await service.store.close()


async def test_at_most_so_many_jobs(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.serve.catalog.MOST_JOBS", 2)
    await call.create("k", "")
    refused(await call.ask("PUT", "/jobs/l", JOB), 409, "there are 2 jobs: delete one first")
