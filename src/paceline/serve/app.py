"""The HTTP API: its requests, the answers to requests that fail, and its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pathlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from fastapi.security import APIKeyHeader, HTTPBearer
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

import paceline
from paceline.client import Part
from paceline.errors import PacelineError
from paceline.live import app as live
from paceline.serve import models, pages, server
from paceline.serve.catalog import SPANS
from paceline.serve.events import STATUS, status_of
from paceline.serve.jobs import Job
from paceline.serve.models import Settings
from paceline.serve.server import BODY_SECONDS, MOST_WAIT, USUAL_WAIT, Bounded
from paceline.serve.service import TICK, Service

_log = logging.getLogger(__name__)
NAMED = 1000  # most workers with metrics of their own, over all jobs, so that a scrape stays short
MEANINGS = {
    400: "The body is not valid JSON.",
    401: "The token is missing or wrong.",
    405: "The path does not support this method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body's type is not application/json.",
    422: "A value is missing, unknown or out of range.",
    500: "The service failed; its state is unchanged.",
} | {status: kind.__doc__ for kind, status in STATUS.items()}
FIGURES: tuple[tuple[Any, str, str, Callable[[Job], float]], ...] = (  # of each job
    (CounterMetricFamily, "rounds", "Completed rounds.", lambda job: job.closed),
    (CounterMetricFamily, "reports", "Reports of all workers.", lambda job: job.reports),
    (CounterMetricFamily, "samples", "Samples reported.", lambda job: job.samples),
    (CounterMetricFamily, "dropped", "Workers dropped because of silence.", lambda job: job.drops),
    (GaugeMetricFamily, "workers_present", "Workers that take part now.", lambda job: job.members.count),
    (GaugeMetricFamily, "deadline_seconds", "Seconds of silence after which a worker is dropped.", Job.limit),
)
Name = Annotated[str, Path(pattern=models.NAME, description="The job's name.")]
Worker = Annotated[str, Path(pattern=models.NAME, description="The worker's name in the job.")]
PLAIN = {
    "description": "Text in the format of Prometheus.",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}
WAIT = Query(ge=0, le=MOST_WAIT, allow_inf_nan=False, description="Seconds to wait for a plan.")
Wait = Annotated[float, WAIT]
SECRET = APIKeyHeader(
    name="X-Worker-Secret", auto_error=False, description="The secret that the worker's join returned."
)
Secret = Annotated[str, Depends(SECRET)]


def errs(*statuses: int) -> Any:
    """The descriptions, for OpenAPI, of these errors and of the errors that every request may get."""
    return {
        status: {"model": models.Error, "description": MEANINGS[status]}
        for status in sorted({400, 401, 405, 408, 413, 415, 422, 500, *statuses})
    }


def make(
    service: Service,
    token: str | None,
    job: tuple[str, Settings] | None = None,
    body_seconds: float = BODY_SECONDS,
) -> FastAPI:
    """The ASGI application. token: the digest of the service's token; None admits all. job: to create at start."""
    registry = CollectorRegistry()
    registry.register(_Jobs(service))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start(job)
        ticking = asyncio.create_task(_tick(service))
        try:
            yield
        finally:
            ticking.cancel()
            await service.stop()

    app = FastAPI(
        title="Paceline",
        version=paceline.__version__,
        description="How many samples each worker should run in its next round, so that all workers finish together.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # "/v1/jobs/" is a job without a name, not the list of jobs
        generate_unique_id_function=lambda route: route.name,
    )
    guarded = (
        [] if token is None else [Depends(HTTPBearer(auto_error=False, description="The service's token."))]
    )
    app.include_router(_jobs(service), prefix="/v1", dependencies=guarded)
    app.include_router(_workers(service), prefix="/v1/jobs/{job}/workers", dependencies=guarded)

    @app.get("/metrics", dependencies=guarded, response_class=Response, responses=errs() | {200: PLAIN})
    async def prometheus() -> Response:
        """Prometheus metrics."""
        text = await service.shown(lambda: generate_latest(registry))
        return Response(text, media_type="text/plain; version=0.0.4")

    @app.get(server.HEALTH, include_in_schema=False)
    async def health() -> dict[str, bool]:
        """For probes of containers, which have no token: well if no job is set aside and the state can be stored."""
        return {"well": not service.catalog.aside and not service.trouble}

    @app.get("/", include_in_schema=False)
    async def jobs() -> HTMLResponse:
        text = await service.shown(lambda: pages.render(service.catalog, service.now()))
        return HTMLResponse(text, headers=pages.PAGE)

    @app.get("/jobs/{job}", include_in_schema=False)
    async def live_page(job: Name, request: Request) -> RedirectResponse:
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"{job}/{query}")

    def run_of(request: Request) -> pathlib.Path | None:
        name = request.path_params["job"]
        run_dir = service.runs / name
        return run_dir if re.fullmatch(models.NAME, name) and run_dir.is_dir() else None

    app.mount("/jobs/{job}", live(run_of))
    for kind in (PacelineError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _refused)
    app.add_middleware(Bounded, service=service, token=token, seconds=body_seconds)  # innermost
    text = "Seconds from a request to its answer, including its wait for a plan."
    answers = Histogram("paceline_answer_seconds", text, ["route"], registry=registry, buckets=SPANS)
    app.add_middleware(_timed, answers=answers)
    return app


def _jobs(service: Service) -> APIRouter:
    router = APIRouter(tags=["jobs"])

    @router.get("/jobs", responses=errs())
    async def list_jobs() -> models.Jobs:
        """The jobs by name, the jobs that were set aside, and why nothing can be stored at present, if so."""
        catalog = service.catalog
        return models.Jobs(jobs=sorted(catalog.running), set_aside=catalog.aside, storing=service.trouble)

    @router.put(
        "/jobs/{job}", responses=errs(409, 507) | {201: {"model": models.JobState, "description": "Created."}}
    )
    async def create_job(job: Name, body: Settings, response: Response) -> models.JobState:
        """Create a job; repeating the same request changes nothing."""
        runtime, new = await service.create(job, body)
        response.status_code = 201 if new else 200
        return await service.shown(runtime.state)

    @router.get("/jobs/{job}", responses=errs(404, 409))
    async def read_job(job: Name) -> models.JobState:
        """The state of a job and of its workers."""
        return await service.shown(service.catalog.find(job).state)

    @router.delete("/jobs/{job}", status_code=204, responses=errs(404, 507))
    async def delete_job(job: Name) -> None:
        """End a job; its record stays."""
        await service.delete(job)

    return router


def _workers(service: Service) -> APIRouter:
    router = APIRouter(tags=["workers"])
    waiting = {"model": models.Waiting, "description": "The part is not planned yet."}
    planned = errs(403, 404, 409, 410, 507) | {202: waiting}

    @router.post("", status_code=201, responses=errs(404, 409, 507))
    async def join(job: Name, body: models.Join) -> models.Joined:
        """Take part, from the next plan on."""
        place, secret = await service.join(job, body.name, body.secret, body.place)
        return models.Joined(name=body.name, place=place, secret=secret)

    @router.post("/{worker}/reports", response_model=models.Reported, responses=errs(403, 404, 409, 410, 507))
    async def report(
        job: Name,
        worker: Worker,
        body: models.WorkerReport,
        secret: Secret,
        wait: Annotated[float | None, WAIT] = None,
    ) -> JSONResponse:
        """Report a round. With a wait, also request the next part, which is returned if it is planned by then."""
        return await server.report(service, job, worker, secret or "", body, wait)

    @router.get("/{worker}/next", response_model=Part, responses=planned)
    async def next_part(job: Name, worker: Worker, secret: Secret, wait: Wait = USUAL_WAIT) -> JSONResponse:
        """The worker's part of its next round: the same part until it is reported."""
        return await server.next_part(service, job, worker, secret or "", wait)

    @router.post("/{worker}/next", response_model=Part, responses=planned)
    async def next_part_of_lengths(
        job: Name, worker: Worker, body: models.Lengths, secret: Secret, wait: Wait = USUAL_WAIT
    ) -> JSONResponse:
        """The worker's part of a round whose samples have these lengths, in a job with a cost."""
        return await server.next_part(service, job, worker, secret or "", wait, body)

    @router.delete("/{worker}", status_code=204, responses=errs(403, 404, 409, 410, 507))
    async def leave(job: Name, worker: Worker, secret: Secret) -> None:
        """Leave the job; the other workers do not wait."""
        await service.leave(job, worker, secret or "")

    return router


async def _tick(service: Service) -> None:
    while True:
        await asyncio.sleep(TICK)
        try:
            await service.tick()
        except Exception:  # an error must not end the loop
            _log.exception("the deadlines cannot be checked")


def _timed(app: ASGIApp, answers: Histogram) -> ASGIApp:
    """Measures the seconds of answers, by route."""

    async def timed(scope: Scope, receive: Receive, send: Send) -> None:
        begin = time.perf_counter()
        try:
            await app(scope, receive, send)
        finally:
            # A mounted application without a route for the path has no name.
            name = getattr(scope.get("endpoint"), "__name__", None)
            if name is not None:
                answers.labels(name).observe(time.perf_counter() - begin)

    return timed


class _Jobs(Collector):
    """The metrics of the present jobs, computed at each scrape."""

    def __init__(self, service: Service) -> None:
        self._catalog = service.catalog

    def collect(self) -> Iterator[Metric]:
        running = self._catalog.running
        for kind, name, text, figure in FIGURES:
            family = kind(f"paceline_{name}", text, labels=["job"])
            for job, runtime in running.items():
                family.add_metric([job], figure(runtime.job))
            yield family
        for name in ("samples", "seconds"):
            text = f"{name.capitalize()} in the worker's newest report."
            family = GaugeMetricFamily(f"paceline_worker_{name}", text, labels=["job", "worker"])
            named = 0
            for job, runtime in running.items():
                named += runtime.job.members.count
                for member in runtime.job.members.by_name.values() if named <= NAMED else ():
                    if member.last is not None and member.present:
                        family.add_metric([job, member.name], getattr(member.last, name))
            yield family
        spans = HistogramMetricFamily("paceline_round_seconds", "Wall seconds of each round.", labels=["job"])
        for job, runtime in running.items():
            counts = [str(each) for each in (*SPANS, "+Inf")], runtime.spans.cumsum().tolist()
            spans.add_metric([job], list(zip(*counts, strict=True)), runtime.spent)
        yield spans
        yield GaugeMetricFamily(
            "paceline_jobs_set_aside", "Jobs that cannot continue.", len(self._catalog.aside)
        )


def _refused(request: Request, error: Exception) -> Response:
    """The answer to a request that failed: one sentence, for any error."""
    status, headers = 500, {}
    sentence = "the service failed at this request: its state is unchanged; see its log"
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        status, sentence = 422, models.mistake(first)
        if first["type"] == "json_invalid":
            why = first.get("ctx", {}).get("error", first["msg"])
            status, sentence = 400, f"the body is not valid JSON ({why}): send application/json"
    elif isinstance(error, HTTPException):
        status, headers = error.status_code, dict(error.headers or {})
        if status == 405:
            # All methods of the path; each route knows only one.
            paths, asked = request.app.openapi()["paths"], request.url.path
            here = [each for each in paths if re.fullmatch(re.sub(r"{\w+}", "[^/]+", each), asked)]
            headers["Allow"] = ", ".join(sorted({method.upper() for each in here for method in paths[each]}))
        sentence = f"{str(error.detail).lower()}: see /openapi.json for the API"
    elif isinstance(error, PacelineError):
        status = status_of(error)
        sentence = str(error)
    return JSONResponse({"error": sentence}, status, headers)
