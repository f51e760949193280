"""``paceline watch RUN_DIR``: the live page of a run."""

from __future__ import annotations

import contextlib
import errno
import socket
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Argument, Option

from paceline.errors import PacelineError, whole
from paceline.runs.run import CONFIG, runs_in

if TYPE_CHECKING:
    import uvicorn

BACKLOG = 2048  # connections that wait while the server starts: all workers of a service may connect at once
LOCAL = ("127.0.0.1", "localhost", "::1")


def command(
    run_dir: Path = Argument(
        ...,
        help="A running or finished run, a folder of several, or a run that will begin later.",
        metavar="RUN_DIR",
    ),
    port: int = Option(0, help="The page's port; 0 takes any free one."),
    host: str = Option("127.0.0.1", help="The address to listen on; 0.0.0.0 lets other machines in."),
    open_: bool = Option(True, "--open/--no-open", help="Open the page in the browser."),
) -> None:
    """Show a run in the browser while it is running: who is slow, what it costs, what balancing saves.

    For example: paceline watch runs/digits-mlp-level
    """
    check(run_dir)
    with listen(host, port) as listener:
        where = f"[{host}]" if ":" in host else host
        url = f"http://{where}:{listener.getsockname()[1]}/"
        server = make_server(run_dir, host)
        waits = "" if run_dir.exists() else "; it is not there yet, and the page waits for it"
        print(f"Watching {run_dir} at {url} (Ctrl-C ends){waits}", flush=True)
        if open_:
            webbrowser.open(url)
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the usual end
            server.run(sockets=[listener])


def check(run_dir: Path) -> None:
    """Raise PacelineError unless the path is a run, a directory of runs, empty or missing."""
    if run_dir.is_dir() and any(run_dir.iterdir()):
        if not (run_dir / CONFIG).is_file() and not runs_in(run_dir):
            raise PacelineError(
                f"{run_dir} is not a run directory (neither it nor a directory in it has a {CONFIG}); expected what "
                "--out of a run named"
            )
    elif run_dir.exists() and not run_dir.is_dir():
        raise PacelineError(f"{run_dir} is a file; expected the directory of a run, as --out named it")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises PacelineError if the port is in use or the address is not this machine's."""
    whole("--port", port, 0, 65535)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PacelineError(f"port {port} is in use; choose another with --port, or 0 for any") from error
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise PacelineError(
            f"cannot listen on {host}:{port}: {reason}; choose an address of this machine with --host, another "
            "port with --port"
        ) from error
    except (TypeError, UnicodeError) as error:  # Python raises these for names that no resolver accepts
        raise PacelineError(
            f"--host {host!r} is no address; expected one of this machine, such as 127.0.0.1"
        ) from error


def make_server(run_dir: Path, host: str) -> uvicorn.Server:
    """The server of the page."""
    import uvicorn
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from paceline.live.pages import folder_app

    page: Any = folder_app(run_dir)
    if host in LOCAL:  # another site must not reach this page under its own host name (DNS rebinding)
        page = TrustedHostMiddleware(page, allowed_hosts=[*LOCAL, "[::1]"])
    return uvicorn.Server(
        uvicorn.Config(page, log_level="error", access_log=False, timeout_graceful_shutdown=3)
    )
