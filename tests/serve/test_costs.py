"""Samples that cost differently, over HTTP: who runs which of a round's samples, also after a kill of the service."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi")

from paceline import Cluster, PacelineError, client, policies
from paceline.balancer import Balancer
from paceline.samples import CostLearner, SampleCosts
from paceline.serve.events import RoundDeal, Settle, logged, read
from support.events import until
from support.served import TOKEN, process

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("serve")]

GUARANTEES = (
    "Every sample is dealt once within all limits, with the same deal on every rank, in pieces, in the "
    "service and on the virtual clock.",
)
BATCH, ROUNDS, SPEEDS = 48, 14, (1.0, 1.0, 0.25)


def lengths_of(number: int) -> list[float]:
    drawn = np.random.default_rng(number).lognormal(5, 1, BATCH)
    return np.clip(np.round(drawn), 16, 1024).tolist()


def seconds_of(part: client.Part, speed: float) -> float:
    """What the part really takes: padded micro-batches, of whose lengths and launches the service knows nothing."""
    assert part.indices is not None
    assert part.sizes is not None
    assert len(part.indices) == sum(part.sizes) == part.samples
    lengths, start, cost = np.array(lengths_of(part.round))[part.indices], 0, 0.0
    for size in part.sizes:
        longest = lengths[start : start + size].max()
        cost += size * (longest + 1e-3 * longest**2) + 20.0
        start += size
    return cost * 1e-4 / speed


def worker(url: str, place: int, log: list[client.Part]) -> None:
    with client.Worker(url, name=f"w{place}", token=TOKEN, place=place) as mine:
        for part in mine.rounds(ROUNDS, lengths_of):
            log.append(part)
            mine.report(seconds_of(part, SPEEDS[place]))


def alone() -> list[list[list[int]]]:
    """The same rounds by a balancer in this process: each worker's samples."""
    first = SampleCosts.checked(lengths_of(0), BATCH)
    learner = CostLearner(first, 3, BATCH, padded=True)
    loop = Balancer(policies.create("level", Cluster(3, BATCH, np.zeros(3), np.full(3, float(BATCH)))))
    loop.learn(learner, 0)
    rounds = []
    for number in range(ROUNDS):
        dealt = loop.deal(number, np.array(lengths_of(number)))
        rounds.append([dealt.of(place).tolist() for place in range(3)])
        parts = [
            client.Part(
                number, int(dealt.loads[w]), 0, BATCH, 3, 0.0, 0.0, rounds[-1][w], dealt.sizes[w].tolist()
            )
            for w in range(3)
        ]
        seconds = np.array([seconds_of(part, speed) for part, speed in zip(parts, SPEEDS, strict=True)])
        loop.report(number, dealt.loads, seconds, np.zeros(3), parts=dealt.parts)
    return rounds


def test_each_worker_receives_its_samples_after_kills_of_the_service(tmp_path: Path) -> None:
    options = ("--batch", BATCH, "--workers", 3, "--cost", "padded")
    with process(tmp_path, *options) as service:
        logs: list[list[client.Part]] = [[], [], []]
        threads = [
            threading.Thread(target=worker, args=(service.url, place, logs[place])) for place in range(3)
        ]
        for thread in threads:
            thread.start()
        until(lambda: min(map(len, logs)) > 4)
        assert service.end(signal.SIGKILL) == -signal.SIGKILL
        service.start()
        for thread in threads:
            thread.join(400)
    assert [len(log) for log in logs] == [ROUNDS] * 3
    for parts, expected in zip(zip(*logs, strict=True), alone(), strict=True):
        assert [part.indices for part in parts] == expected
        assert sorted(index for part in parts for index in part.indices or []) == list(range(BATCH))
    seconds = [seconds_of(log[-1], speed) for log, speed in zip(logs, SPEEDS, strict=True)]
    assert max(seconds) < 1.3 * min(seconds)
    assert logs[2][-1].samples < BATCH / 3 or max(logs[2][-1].sizes or [0]) > 1


def test_lengths_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with process(tmp_path, "--batch", 4, "--workers", 2) as service:
        job = "/v1/jobs/texts"
        for wrong, words in (
            ({"cost": "tokens"}, "cost: input should be 'sum' or 'padded'"),
            ({"cost": "sum", "quantum": 2}, "quantum=2 counts samples, and cost='sum' divides by cost"),
        ):
            answer = service.ask("PUT", job, {"batch": 4, "workers": 2} | wrong)
            assert answer.status == 422
            assert words in answer.content["error"]
        assert service.ask("PUT", job, {"batch": 4, "workers": 2, "cost": "sum"}).status == 201
        secrets = {
            (at, name): service.ask("POST", f"{at}/workers", {"name": name}).content["secret"]
            for at in (job, "/v1/jobs/default")
            for name in "ab"
        }

        def next_of(name: str, body: object, at: str = job) -> tuple[int, dict]:
            path, method = f"{at}/workers/{name}/next?wait=0", "GET" if body is None else "POST"
            answer = service.ask(method, path, body, secret=secrets[at, name])
            return answer.status, answer.content

        right = {"round": 0, "lengths": [9, 1, 1, 5.5]}
        assert next_of("a", None) == (
            202,
            {"waiting": "the lengths of round 0's samples are needed", "round": 0},
        )
        for body, status, words in (
            (right | {"lengths": [1, 2, 3]}, 422, "lengths: got 3 numbers for the data set's 4 samples"),
            (right | {"lengths": [1, 2, 3, 0]}, 422, "lengths.3: expected more than 0"),
            ({"lengths": [1, 2, 3, 4]}, 422, "round: it is missing"),
        ):
            found, said = next_of("a", body)
            assert (found, words in said["error"]) == (status, True), said
        assert next_of("a", right | {"round": 7})[1]["round"] == 0  # as if it had asked without lengths
        status, part = next_of("a", right)
        assert status == 200
        assert next_of("b", right | {"lengths": [9, 1, 1, 6]})[0] == 409
        status, other = next_of("b", None)  # who has no lengths at hand asks for what is its own
        assert sorted(part["indices"] + other["indices"]) == [0, 1, 2, 3]
        assert part["sizes"] == [part["samples"]]
        few = {"round": 0, "samples": max(part["samples"], other["samples"]) - 1, "seconds": 1.0}
        name = "a" if part["samples"] > other["samples"] else "b"
        said = service.ask("POST", f"{job}/workers/{name}/reports", few, secret=secrets[job, name])
        assert said.status == 422
        assert "it is unknown which of them were run" in said.content["error"]
        status, said = next_of("a", right, "/v1/jobs/default")
        assert status == 422
        assert "the job has no cost" in said["error"]
        # As clients of earlier versions expect.
        assert "indices" not in next_of("a", None, "/v1/jobs/default")[1]
        service.ask("PUT", "/v1/jobs/third", {"batch": 4, "workers": 1, "cost": "sum"})
        with (
            pytest.raises(PacelineError, match=r"give rounds\(lengths=\.\.\.\)"),
            client.Worker(service.url, name="c", token=TOKEN, job="third") as alone,
        ):
            alone.next()


def test_the_log_holds_what_a_round_was_dealt_by() -> None:
    event = Settle(1.0, 0, [2, 1], RoundDeal([3.0, 1.0, 2.0], [0, 1, 2], [[2], [1]]))
    assert read(json.loads(json.dumps(logged(event)))) == event
