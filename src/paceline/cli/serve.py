"""``paceline serve``: hand out batch sizes over HTTP, to workers of any framework and language."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import quote

from typer import Option

from paceline import tokens
from paceline.cli import startup
from paceline.cli.options import options_of
from paceline.cli.watch import LOCAL, listen
from paceline.errors import PacelineError, saying
from paceline.serve import server
from paceline.serve.app import make
from paceline.serve.models import NAME, Settings
from paceline.serve.service import Service
from paceline.tokens import TOKEN


def first_request(address: str, job: str, settings: Settings | None, header: str) -> str:
    """A line for a shell: joins a first worker, or creates a job if there is none. header: of the token."""
    sent = f"{header}-H 'Content-Type: application/json'"
    if settings is None:
        return f"""curl -X PUT {address}/v1/jobs/{job} {sent} -d '{{"batch": 256, "workers": 2}}'"""
    return f"""curl -X POST {address}/v1/jobs/{job}/workers {sent} -d '{{"name": "first"}}'"""


def _header(secret: str | None, token: str | None, where: Path) -> str:
    """curl's option for the token, which it does not show: from the environment or a file."""
    if secret is None:
        return ""
    if token is None:
        return f'-H "Authorization: Bearer $(cat {shlex.quote(str(where))})" '
    known = f"${TOKEN}" if os.environ.get(TOKEN) == token else "TOKEN"
    return f'-H "Authorization: Bearer {known}" '


@options_of(
    Settings, "batch", "workers", "policy", "start", "limits", "quantum", "cost", "grace", panel="A job"
)
def command(
    at_once: bool = Option(
        False, help="Hand out the newest plan at once, instead of waiting for all reports."
    ),
    job: str = Option("default", help="The name of the job made at the start."),
    host: str = Option("127.0.0.1", help="Address to listen on; 0.0.0.0 for all."),
    port: int = Option(7070, help="Port; 0 takes any free one."),
    dir_: Path = Option(
        Path("paceline-serve"), "--dir", help="Where the state, the token and the runs' records are kept."
    ),
    token: str | None = Option(
        None, envvar=TOKEN, help="The token that clients must send; default: made, and kept in --dir."
    ),
    token_file: Path | None = Option(
        None, help="Read the token from this file, which is made if it does not exist."
    ),
    no_token: bool = Option(
        False, "--no-token", help="Let every process of this machine in; only on a local address."
    ),
    record: bool = Option(True, help="Leave a run directory for each job."),
    sync: bool = Option(False, help="Force each commit to the disk: survives a power cut, too."),
    **given: Any,
) -> None:
    """Hand out batch sizes over HTTP, to workers of any framework and language.

    For example: paceline serve --batch 256 --workers 3
    """
    if no_token and host not in LOCAL:
        raise PacelineError(
            f"--no-token on {host} would let the whole network in; leave it out, or listen on 127.0.0.1"
        )
    if no_token + (token is not None) + (token_file is not None) > 1:
        raise PacelineError("--token, --token-file and --no-token exclude each other; give one")
    if ("batch" in given) != ("workers" in given):
        raise PacelineError("--batch and --workers only make a job together; give both or neither")
    if "batch" not in given and (unused := [*given, *["at-once"] * at_once]):
        raise PacelineError(
            f"--{unused[0]} is for the job made at the start: expected --batch and --workers with it; add them, or "
            f"leave --{unused[0]} out"
        )
    if not re.fullmatch(NAME, job):
        raise PacelineError(
            f"--job {job!r}: expected at most 64 letters, digits, dots, dashes and underscores, a letter or digit "
            "first"
        )
    settings = Settings.of(**given, ahead=int(at_once)) if "batch" in given else None
    with startup.interruptible() as ended, listen(host, port) as listening:
        with saying(f"cannot make {dir_}", "choose another --dir"):
            dir_.mkdir(parents=True, exist_ok=True, mode=0o700)
        where = token_file if token_file is not None else dir_ / "token"
        secret = None
        if not no_token:
            otherwise = "choose another --token-file, or --dir"
            secret = tokens.checked(token) if token is not None else tokens.kept_in(where, otherwise)
        service = Service(dir_, record=record, sync=sync)
        if settings is not None and job not in service.catalog.aside:
            service.catalog.present(job, settings)
        app = make(
            service,
            None if secret is None else tokens.digest(secret),
            None if settings is None or job in service.catalog.aside else (job, settings),
        )
        address = server.url(listening)
        # The whole address, so that a click opens it; a token that the user chose is not shown.
        page = "" if secret is None else f"?token={quote(secret, safe='') if token is None else 'TOKEN'}"
        print(f"paceline serves at {address} (the API: {address}/openapi.json)")
        if secret is None:
            print("no token is needed: every process of this machine may use it")
        else:
            print(f"token: {secret}" if token is None else "token: as given")
        print(f"state: {dir_}")
        print(f"watch the jobs in a browser: {address}/{page}")
        print(
            f"a first request, to paste: {first_request(address, job, settings, _header(secret, token, where))}"
        )
        print(
            "examples/service_client.mjs and .pl are whole workers; docs/service.md has the API", flush=True
        )
        server.run(app, service, listening, ended)
        if ended():
            raise KeyboardInterrupt
