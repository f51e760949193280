"""Ray's workers, forked from a process that has loaded what they load beside Ray: NumPy, PyTorch, pandas.

Ray starts a program that prepares a worker's environment and then becomes the worker; it loads Ray, and so does the
worker. After ``use`` it starts this file in its place, which asks the loaded process for a fork: the same worker,
with the same environment, but another parent. This file lives as long as its worker, and loads nothing. The forks
load Ray themselves: where a process has loaded it, its forks find no cluster.
"""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator

PLACE = "PACELINE_TESTS_RAY_FORKS"  # the variable that has the socket's path
BESIDE_RAY = (
    "numpy", "requests", "jsonschema", "yaml", "google.protobuf.descriptor_pb2", "psutil", "click", "filelock",
    "msgpack",
)  # fmt: skip
BESIDE_RAY_TRAIN = (
    "torch.distributed", "torch._dynamo", "pandas", "pyarrow.fs", "pydantic.main", "pydantic.json_schema",
    "pydantic.dataclasses", "fsspec", "google.protobuf.json_format",
)  # fmt: skip
CONTEXT = "--serialized-runtime-env-context="
LENGTH = 1 << 17  # bytes of the longest request


@contextlib.contextmanager
def server() -> Iterator[None]:
    """Serves the Rays of this process and of those that it starts, wherever ``use`` was called."""
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        os.environ[PLACE] = os.path.join(folder, "forks")
        command = [sys.executable, __file__]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            load(*BESIDE_RAY)
            yield  # then the end of its standard input ends it
        del os.environ[PLACE]


def load(*modules: str) -> None:
    """Have the workers that start from now on find these modules loaded, too."""
    with _ask({"load": modules}) as asked:
        assert asked.recv(1), "the process that Ray's workers are forked from has failed"


def use() -> None:
    """Have the Rays that this process starts from now on fork their workers, and wait for their own processes."""
    from ray._private import ray_constants

    from support import ray_start

    ray_start.patient()
    ray_constants.SETUP_WORKER_FILENAME = os.path.abspath(__file__)


def _ask(request: object, *files: int) -> socket.socket:
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asking.connect(os.environ[PLACE])
    socket.send_fds(asking, [json.dumps(request).encode()], files)
    return asking


def _worker(arguments: list[str]) -> None:
    """What Ray starts: returns when the worker has ended."""
    environment = dict(os.environ)
    for argument in arguments:
        if argument.startswith(CONTEXT):
            environment |= json.loads(argument.removeprefix(CONTEXT))["env_vars"]
    program = [argument for argument in arguments if not argument.startswith((CONTEXT, "--language="))]
    _ask({"program": program, "environment": environment, "folder": os.getcwd()}, 0, 1, 2).recv(1)


def _serve() -> socket.socket:
    """Returns in each fork, as the process that was asked for; what it returns is open for as long as that lives."""
    import gc
    import importlib
    import random
    import selectors
    import signal

    import collapsed  # beside this file

    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(os.environ[PLACE])
    listening.listen(64)
    print("listens", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork
    ready = selectors.DefaultSelector()
    ready.register(0, selectors.EVENT_READ)
    ready.register(listening, selectors.EVENT_READ)
    while True:
        if any(key.fileobj == 0 for key, _ in ready.select()):
            os._exit(0)
        asked, _ = listening.accept()
        text, files, _, _ = socket.recv_fds(asked, LENGTH, 3)
        request = json.loads(text)
        if "load" in request:
            gc.disable()
            for module in request["load"]:
                importlib.import_module(module)
            assert "ray" not in sys.modules
            gc.collect()
            gc.freeze()
            gc.enable()
            collapsed.collapse()
            asked.send(b"+")
        elif os.fork() == 0:
            ready.close()
            listening.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            random.seed()
            os.chdir(request["folder"])
            os.environ.clear()
            os.environ.update(request["environment"])
            sys.argv = request["program"]
            sys.path[0] = os.path.dirname(sys.argv[0])
            return asked
        asked.close()
        for file in files:
            os.close(file)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _worker(sys.argv[1:])
    else:
        import runpy

        _open = _serve()
        import gc

        gc.disable()  # while it loads what stays
        # A worker learns where to find modules from this variable, as each process does when it starts.
        sys.path[1:1] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        __import__("ray")
        gc.freeze()
        gc.enable()
        runpy.run_path(sys.argv[0], run_name="__main__")
