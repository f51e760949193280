"""Fuzzes the service's API against its own OpenAPI description: nothing but documented answers.

    python -m support.fuzz SECONDS     (from tests/; or make fuzz SECONDS=...)

Schemathesis makes requests that fit the description and such that do not. What it makes up rarely names a job or a
worker that exists: three of four valid names are replaced by those of a job and workers that do, and waits are cut
short.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SECRET = "secret-of-a-fuzzed-worker"
CONFIG = """
[checks]
positive_data_acceptance.expected-statuses = ["2xx", "401", "403", "404", "409", "410", "422"]
negative_data_rejection.expected-statuses = ["4xx"]
missing_required_header.expected-statuses = ["401", "403", "404", "422"]
"""


def known(value: Any, *names: str) -> Any:
    """One of the names in place of most that might be one."""
    if isinstance(value, str) and NAME.fullmatch(value):
        chosen = zlib.crc32(value.encode())
        return names[chosen // 4 % len(names)] if chosen % 4 else value
    return value


def main(seconds: int) -> int:
    """Schemathesis' exit status."""
    from support.served import TOKEN, process

    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "schemathesis.toml"
        config.write_text(CONFIG)
        directory = Path(scratch) / "state"
        with process(directory, "--batch", 24, "--workers", 2, "--start", 1, "--at-once") as service:
            for name in "ab":
                service.ask("POST", "/v1/jobs/default/workers", {"name": name, "secret": SECRET})
            done = subprocess.run(
                [
                    str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(config), "run",
                    f"{service.url}/openapi.json", "--max-time", str(seconds), "--checks", "all",
                    "--header", f"Authorization: Bearer {TOKEN}", "--suppress-health-check", "all",
                    "--warnings", "off", "--seed", "0", "--request-timeout", "30", "--max-response-time", "30",
                ],
                env=os.environ | {"SCHEMATHESIS_HOOKS": "support.fuzz", "PYTHONPATH": str(Path(__file__).parents[1])},
                cwd=scratch,
            )  # fmt: skip
            alive = service.ask("GET", "/v1/jobs").status == 200
            service.end()
            errors = service.last
    print(errors)
    return done.returncode or (0 if alive and "Traceback" not in errors else 1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

if "SCHEMATHESIS_HOOKS" in os.environ:
    import schemathesis

    @schemathesis.hook
    def map_path_parameters(context: Any, path_parameters: dict[str, Any]) -> dict[str, Any]:
        deletes = context.operation.method.lower() == "delete"
        if path_parameters and "worker" in path_parameters:
            path_parameters["worker"] = known(path_parameters["worker"], "a", "b")
        if path_parameters and "job" in path_parameters and not (deletes and "worker" not in path_parameters):
            path_parameters["job"] = known(path_parameters["job"], "default")
        return path_parameters

    @schemathesis.hook
    def map_query(context: Any, query: dict[str, Any]) -> dict[str, Any]:
        wait = (query or {}).get("wait")
        if isinstance(wait, int | float) and not isinstance(wait, bool) and 0 <= wait <= 60:
            query["wait"] = min(wait, 0.05)
        return query

    @schemathesis.hook
    def map_headers(context: Any, headers: dict[str, Any]) -> dict[str, Any]:
        if headers and "X-Worker-Secret" in headers:
            headers["X-Worker-Secret"] = SECRET
        return headers
