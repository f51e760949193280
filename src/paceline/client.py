"""The client of ``paceline serve`` for a worker; it only needs the standard library.

```python
with Worker("http://127.0.0.1:7070", token="...", name="gpu-0") as worker:
    for part in worker.rounds(1000):
        began = time.perf_counter()
        gradient = ...  # of samples part.offset to part.offset + part.samples of round part.round
        worker.report(time.perf_counter() - began)
        ...  # sum part.weight * gradient over the workers, and step
```
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import secrets
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from paceline.errors import PacelineError, number
from paceline.tokens import TOKEN

__all__ = ["Dropped", "Part", "Worker"]

Lengths = Callable[[int], Sequence[float]]
WAIT = 30.0  # seconds that one request waits for a plan


def _says(text: str) -> dict[str, str]:
    """The metadata of a field with this description, which the service's OpenAPI document has too."""
    return {"description": text}


class Dropped(PacelineError):
    """The service has removed this worker, which was silent for too long or has left."""


@dataclass(frozen=True, slots=True)
class Part:
    """This worker's part of a round: samples ``offset`` to ``offset + samples`` of its ``batch``.

    Attributes:
        round: The round's number.
        samples: Samples of this worker, b_i.
        offset: Its first sample among the round's.
        batch: Samples of all workers, B.
        present: Workers in the round, n.
        weight: Weight of these samples' mean gradient in a sum over the workers, b_i / B.
        weight_in_mean: Its weight in a mean over the workers, n b_i / B.
        indices: In a job with a cost, the positions of these samples among the round's; else None.
        sizes: In a job with a cost, the samples of each micro-batch; else None.
    """

    round: int = field(metadata=_says("The round's number."))
    samples: int = field(metadata=_says("Samples of this worker, b_i."))
    offset: int = field(metadata=_says("Its first sample among the round's."))
    batch: int = field(metadata=_says("Samples of all workers, B."))
    present: int = field(metadata=_says("Workers in the round, n."))
    weight: float = field(
        metadata=_says("Weight of these samples' mean gradient in a sum over the workers, b_i / B.")
    )
    weight_in_mean: float = field(metadata=_says("Its weight in a mean over the workers, n b_i / B."))
    indices: list[int] | None = field(
        default=None,
        metadata=_says("In a job with a cost, the positions of these samples among the round's; else null."),
    )
    sizes: list[int] | None = field(
        default=None,
        metadata=_says("In a job with a cost, the samples of each micro-batch, in this order; else null."),
    )


class Worker:
    """Joins a job at the start of a ``with`` statement, and leaves it at the end. For one thread.

    Args:
        url: The service's address, as ``paceline serve`` printed it.
        name: This worker's name.
        token: As ``paceline serve`` printed it; by default that of $PACELINE_TOKEN.
        job: The job's name.
        place: This worker's place, if the job's limits are by place.
        patience: Seconds for which a service that cannot be reached is tried again, so that its restart goes
            unnoticed.

    Raises:
        PacelineError: If the service refuses a call.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        token: str | None = None,
        job: str = "default",
        place: int | None = None,
        patience: float = 60.0,
    ) -> None:
        if not all(isinstance(each, str) and each for each in (job, name)):
            raise PacelineError(f"job={job!r}, name={name!r}: expected the names of a job and of this worker")
        number("patience", patience, "seconds, 0 or more", lambda seconds: seconds >= 0)
        parts = urllib.parse.urlsplit(url if isinstance(url, str) else "")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PacelineError(f"{url!r} is no service's address: expected one as http://127.0.0.1:7070")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        try:
            self._connection = kind(parts.hostname, parts.port, timeout=2 * WAIT)
        except ValueError as error:
            raise PacelineError(f"{url!r} is no service's address: {error}") from error
        token = os.environ.get(TOKEN) if token is None else token
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            if not isinstance(token, str) or not token.isascii() or not token.isprintable():
                raise PacelineError("the token is no printable ASCII: give it as paceline serve printed it")
            self._headers["Authorization"] = f"Bearer {token}"
        self.name, self.job, self._place, self._patience = name, job, place, patience
        self._url, self._secret = url, secrets.token_urlsafe(32)
        # The service refuses names that UTF-8 cannot encode, since it also gets them in the body of the join.
        quoted, mine = (urllib.parse.quote(each, safe="", errors="replace") for each in (job, name))
        self._workers, self._mine = f"{parts.path.rstrip('/')}/v1/jobs/{quoted}/workers", f"/{mine}"
        self._part: Part | None = None  # received and not yet reported
        self._joined = False

    def join(self) -> None:
        """Take part from the next plan on."""
        body = {"name": self.name, "place": self._place, "secret": self._secret}
        self._headers["X-Worker-Secret"] = self._secret
        self._call("POST", "", body)
        self._joined, self._part = True, None

    def next(self, lengths: Lengths | None = None) -> Part:
        """Wait until the next round is planned.

        Args:
            lengths: In a job with a cost, a function from the number of a round to the lengths of its samples.

        Returns:
            This worker's part; the same one until it is reported.

        Raises:
            PacelineError: If the job has a cost and ``lengths`` is missing, or the service refuses or does not
                answer.
            Dropped: If the service has removed this worker.
        """
        ask = f"{self._mine}/next?wait={WAIT:g}"
        while self._part is None:
            status, answer = self._call("GET", ask)
            if status == 202 and answer.get("round") is not None:
                number = int(answer["round"])
                if lengths is None:
                    raise PacelineError(
                        f"{answer['waiting']}: this job has a cost, so give rounds(lengths=...) or next(lengths=...)"
                    )
                body = {"round": number, "lengths": [float(length) for length in lengths(number)]}
                status, answer = self._call("POST", ask, body)
            if status == 200:
                self._part = Part(**answer)
            elif answer["waiting"] == "the service is stopping":
                time.sleep(0.2)
        return self._part

    def report(
        self,
        seconds: float,
        *,
        samples: int | None = None,
        overhead: float = 0.0,
        cpu: float | None = None,
        memory: float | None = None,
    ) -> None:
        """Report that the part is done.

        Args:
            seconds: Seconds that it took, without the wait for others.
            samples: Samples that ran, if not all did.
            overhead: Those of the seconds that do not grow with the samples.
            cpu: Portion of this machine's processors that this worker can have, 0 to 1, for policies that read it.
            memory: The same of its memory.

        Raises:
            PacelineError: If there is no part to report, a value is no finite number, or the service refuses or does
                not answer.
            Dropped: If the service has removed this worker.
        """
        if self._part is None:
            raise PacelineError("there is no round to report: ask for the next one first")
        done = self._part.samples if samples is None else samples
        body: dict[str, Any] = {"round": self._part.round, "samples": done, "seconds": seconds}
        body |= {"overhead": overhead, "cpu": cpu, "memory": memory}
        self._call("POST", f"{self._mine}/reports", body)
        self._part = None

    def rounds(self, most: int | None = None, lengths: Lengths | None = None) -> Iterator[Part]:
        """Iterate over this worker's parts; report each before you ask for the next.

        Args:
            most: Number of parts, at most; by default without end.
            lengths: As for ``next``.

        Returns:
            An iterator of parts.

        Raises:
            PacelineError: If a part was not reported, and as ``next``.
        """
        for _ in itertools.count() if most is None else range(most):
            part = self.next(lengths)
            yield part
            if self._part is not None:
                raise PacelineError(f"round {part.round} was not reported: call report() in each round")

    def leave(self) -> None:
        """Leave the job; the others no longer wait for this worker."""
        if self._joined:
            self._joined = False
            self._call("DELETE", self._mine)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self._patience = 0.0  # show the caller's error without delay
            self.leave()
        except PacelineError:
            if kind is None:
                raise
        finally:
            self.close()

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """The answer's status and content. Every call may be repeated, so it is tried until the service answers."""
        try:
            data = None if body is None else json.dumps(body, allow_nan=False).encode()
        except ValueError as error:
            raise PacelineError("a report has a value that is not a finite number: measure again") from error
        until, pause, tried = time.monotonic() + self._patience, 0.05, 0
        while True:
            try:
                status, answer = self._once(method, path, data)
            except (OSError, http.client.HTTPException, UnicodeError) as error:  # UnicodeError: a bad host
                self._connection.close()
                tried += 1
                # The first repeat is immediate: the service may have closed a connection that was idle for long.
                if tried > 1:
                    if time.monotonic() >= until:
                        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                        raise PacelineError(
                            f"the service at {self._url} does not answer ({reason}): is it running?"
                        ) from error
                    time.sleep(pause)
                    pause = min(2 * pause, 1.0)
                continue
            if status == 507 and time.monotonic() < until:
                time.sleep(1.0)
                continue
            if status < 300:
                return status, answer
            if method == "DELETE" and status in (404, 410) and tried:
                return 204, None  # an earlier try reached the service
            content = answer if isinstance(answer, dict) else {}
            sentence = f"{self._url} refuses: {content.get('error', f'status {status}')}"
            raise (Dropped if status == 410 else PacelineError)(sentence)

    def _once(self, method: str, path: str, data: bytes | None) -> tuple[int, Any]:
        self._connection.request(method, self._workers + path, data, self._headers)
        response = self._connection.getresponse()
        content = response.read()
        try:
            return response.status, json.loads(content) if content else None
        except ValueError:
            return response.status, None
