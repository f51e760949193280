"""``paceline watch``: what it serves, and what it refuses."""

import http.client
import json
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from support.commands import assert_refused, installs, paceline, python
from support.growing import go_on, start


def test_watch_prints_its_address_and_ends_on_a_signal(tmp_path):
    with start(tmp_path / "run") as recorder:
        go_on(recorder, 0, 3)
    command = [sys.executable, "-c", "from paceline.cli import main; main()", "watch", str(tmp_path / "run")]
    server = subprocess.Popen(
        [*command, "--no-open"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = server.stdout.readline()
        assert line.startswith(f"Watching {tmp_path / 'run'} at http://127.0.0.1:")
        url = line.split(" at ")[1].split()[0]
        with urllib.request.urlopen(url) as page:
            assert "<title>Paceline</title>" in page.read().decode()
        elsewhere = urllib.request.Request(url, headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(elsewhere)
        kept = http.client.HTTPConnection(url.split("/")[2])  # a page that is open
        kept.request("GET", "/panel")
        assert json.loads(kept.getresponse().read())["rounds"] == 3
        server.send_signal(2)
        assert server.wait(400) == 0
        assert server.stderr.read() == ""
    finally:
        server.kill()
        server.wait()


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(paceline("watch", tmp_path / "file"), "file is a file; expected the directory of a run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    assert_refused(
        paceline("watch", tmp_path / "other"),
        r"other is not a run directory \(neither it nor a directory in it has a run.json\)",
    )


def test_a_port_that_cannot_be_had_is_refused(tmp_path):
    start(tmp_path / "run").close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_refused(
            paceline("watch", tmp_path / "run", "--no-open", "--port", port), f"port {port} is in use; choose"
        )
    assert_refused(
        paceline("watch", tmp_path / "run", "--port", 70000),
        "--port=70000: expected a whole number, 0 to 65,535",
    )
    assert_refused(paceline("watch", tmp_path / "run", "--host", "192.0.2.1"), "cannot listen on 192.0.2.1:0")


def test_missing_extra_is_named(tmp_path):
    start(tmp_path / "run").close()
    hide = (
        "import sys; sys.modules['starlette'] = sys.modules['uvicorn'] = sys.modules['fastapi'] = None; "
        f"from paceline.cli import main; main(['watch', {str(tmp_path / 'run')!r}, '--no-open'])"
    )
    said = python(hide)
    assert (said.returncode, said.stdout) == (2, "")
    assert re.fullmatch(f"paceline: uvicorn is not installed; {installs('cli')}\n", said.stderr)
