"""The one server that processes of tests are forked from: it has PyTorch, Paceline and what else they load.

``start`` runs a function in a fork; ``support.ranks.run_ranks`` runs one on several ranks. Within ``warm()``, each
``subprocess.Popen`` of this interpreter is a fork that does what ``python WORDS...`` does, and so is each that such a
program starts, and the server of forks that ``multiprocessing`` starts there: the processes, their parents and their
sessions are the same, but nobody imports PyTorch once more. What a program finds in ``sys.modules`` is not the same:
tests of imports start interpreters.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import importlib.util
import inspect
import io
import multiprocessing
import os
import pickle
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from support.ports import free_port

sys.dont_write_bytecode = False  # in the server: each rank would compile the module of its test for itself
LOADED = (
    "pytest", "hypothesis",  # of test modules, whose functions run in forks
    "torch", "torch.distributed", "torch.distributed.run", "torch._dynamo", "torch.profiler._cupti_monitor", "numpy",
    "paceline.torch", "paceline.torch.launcher", "paceline.train.launch", "paceline.doctor.probe",
    *(f"paceline.cli.{each}" for each in ("train", "doctor", "verify", "whatif", "report", "simulate", "watch")),
    "paceline.cli.serve", "paceline.verify.inside", "rich.markdown", "typer", "support.elastic_runs",
)  # fmt: skip
# A server that has them all serves the tests of every host: each start of another one would load PyTorch once more.
HOSTS = (
    "lightning", "accelerate", "transformers.trainer", "transformers.models.llama", "transformers.models.bert",
)  # fmt: skip
SECONDS = 900.0  # only a hang takes as long, however busy the machine is
FIRST, LAST = "support.uncollected", ("paceline.train.forked", "support.collapsed")  # cheap starts
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LENGTH = 1 << 17  # bytes of the longest request: arguments and an environment
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36  # of <sys/prctl.h>
TEMPLATE = "template"  # the name of processes that only fork others
CLONE_NEWNET = 0x40000000  # of <sched.h>


def load(*modules: str) -> None:
    """Have these modules loaded in the server, which starts once more where it has others."""
    wanted = {*LOADED, *modules}
    if not wanted <= _loaded:
        _loaded.update(wanted)
        if _Template.current is not None:
            _Template.current.close()  # the server ends with the last of its forks
            _Template.current = None
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        forkserver.set_forkserver_preload([FIRST, *sorted(_loaded), *LAST])


_loaded: set[str] = set()


class Fork:
    """A function in a fork of the server: a ``WorkerProcess`` of ``paceline.torch.elastic``."""

    def __init__(self, function: Callable[..., object], *arguments: Any, daemon: bool = True) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        load()
        made = multiprocessing.get_context("forkserver").Process
        self.process = made(target=function, args=arguments, daemon=daemon)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return None if self.process.is_alive() else self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def terminate(self) -> None:
        self.process.terminate()


@contextlib.contextmanager
def warm(*modules: str) -> Iterator[None]:
    """Until the end, ``subprocess.Popen([sys.executable, ...])`` starts a fork. modules: to have loaded as well."""
    load(*modules)
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    _replace_popen(lambda: _Template.now())
    try:
        yield
    finally:
        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


class Program(subprocess.Popen[str]):
    """``python WORDS...`` in this folder and in a session of its own, forked; its output is kept.

    words: a file, or ``-m`` and a module, and its arguments. environment: variables beside those of the tests; those
    with None are left out. limits: of ``resource.setrlimit``. ignored: signals that its parent ignores. network: the
    name of a network namespace. whole: end as the interpreter ends, which destroys all objects.
    """

    def __init__(
        self,
        words: Sequence[object],
        place: Path,
        environment: Mapping[str, str | None] | None = None,
        limits: Mapping[int, int] | None = None,
        ignored: Sequence[int] = (),
        network: str = "",
        whole: bool = False,
    ) -> None:
        load()
        self._kept = tempfile.TemporaryDirectory()
        self._also = {
            "limits": dict(limits or {}), "ignored": [*map(int, ignored)], "network": network, "whole": whole,
        }  # fmt: skip
        every = dict(os.environ) | dict(environment or {})
        variables = {name: value for name, value in every.items() if value is not None}
        out, err = (open(Path(self._kept.name, name), "w") for name in ("out", "err"))  # noqa: SIM115
        with out, err:
            super().__init__(
                [sys.executable, *map(str, words)], stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=place,
                env=variables, start_new_session=True, text=True,
            )  # fmt: skip

    def _execute_child(self, *given: Any) -> None:
        _forked(self, _Template.now(), inspect.signature(_REAL).bind(self, *given).arguments, self._also)

    def said(self) -> tuple[str, str]:
        """What it has written to standard output and to standard error so far."""
        out, err = (Path(self._kept.name, name).read_text() for name in ("out", "err"))
        return out, err

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote until its end."""
        self.wait(timeout)
        return self.said()


def as_torchrun(ranks: int, port: int = 0) -> list[dict[str, str]]:
    """What torchrun tells each of so many ranks on this machine. port: 0 for a free one."""
    shared = {
        "GROUP_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port()), "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    return [shared | dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)) for rank in range(ranks)]


class Ended(NamedTuple):
    """How a program ended, and what it wrote."""

    status: int
    out: str
    err: str


def ended(
    environments: Sequence[Mapping[str, str]],
    words: Sequence[object],
    place: Path | None = None,
    whole: bool = False,
) -> list[Ended]:
    """Run a program in a process for each of these sets of additional variables. place: the folder; else this one."""
    started = [Program(words, place or Path.cwd(), each, whole=whole) for each in environments]
    until = time.monotonic() + SECONDS
    try:
        for program in started:
            program.wait(max(0.0, until - time.monotonic()))
    finally:
        for program in started:
            program.kill()
            program.wait()
    return [Ended(program.returncode, *program.said()) for program in started]


def all_well(environments: Sequence[Mapping[str, str]], words: Sequence[object]) -> tuple[str, str]:
    """As ``ended``; what all wrote to standard output and to standard error.

    Raises AssertionError with what they wrote if one does not end with status 0.
    """
    every = ended(environments, words)
    out, err = "".join(each.out for each in every), "".join(each.err for each in every)
    assert not any(each.status for each in every), out + err
    return out, err


_REAL = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class _Template:
    """A process that is forked once more for each program; it is below the process whose programs these are."""

    current: _Template | None = None  # of this process

    def __init__(self, asking: socket.socket, alive: object = None) -> None:
        self._asking, self._lock, self._alive = asking, threading.Lock(), alive

    @classmethod
    def now(cls) -> _Template:
        """Of the process of the tests: a fork of the server."""
        if cls.current is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                cls.current = cls(ours, Fork(_serve, theirs))
            util.Finalize(None, cls.current.close, exitpriority=1)  # before it is waited for
        return cls.current

    @classmethod
    def below(cls) -> _Template:
        """Of this process, which is a fork itself, and has no threads yet."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            try:
                ours.close()
                _serve(theirs)
            finally:
                os._exit(1)
        theirs.close()
        return cls(ours)

    def close(self) -> None:
        """No more programs, which ends it."""
        self._asking.close()

    def fork(self, request: dict[str, Any], files: dict[int, int]) -> int:
        """The process, a child of this one. files: by number, those that it has open, as they are numbered here."""
        message = pickle.dumps(request | {"numbers": [*files]})
        with self._lock:
            # Who forks it ends at once, and hands it on to the nearest process that takes orphans: to this one.
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._asking, [message], [*files.values()])
                return int(self._asking.recv(64))
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)


def _prctl(*given: int | bytes) -> None:
    assert ctypes.CDLL(None).prctl(*given, 0, 0, 0) == 0


def below(pid: int) -> list[psutil.Process]:
    """The processes that this one has started and that these have started, but for those that only fork others."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if each.name() != TEMPLATE:
                    found.append(each)
    return found


def _replace_popen(template: Callable[[], _Template]) -> None:
    named = inspect.signature(_REAL)

    def execute(self: Any, *given: Any, **options: Any) -> None:
        bound = named.bind(self, *given, **options).arguments
        plain = not (bound["shell"] or bound["preexec_fn"] or bound["executable"])
        words = _words(bound["args"], bound["env"], bound["cwd"]) if plain else None
        if words is None:
            _REAL(self, *given, **options)
        else:
            _forked(self, template(), bound | {"args": words}, {})

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def _words(command: Any, environment: Mapping[Any, Any] | None, folder: Any) -> list[str] | None:
    """The same command, if this interpreter runs it and ``_run`` can; a script such as torchrun by its place."""
    if isinstance(command, (str, bytes, os.PathLike)) or not (words := [*map(os.fsdecode, command)]):
        return None
    if words[0] != sys.executable:
        path = (os.environ if environment is None else environment).get("PATH")
        found = words[0] if os.sep in words[0] else shutil.which(words[0], path=path)
        if found is None or not os.path.isfile(
            script_path := os.path.join(os.fsdecode(folder or "."), found)
        ):
            return None
        with open(script_path, "rb") as script:
            if script.readline().strip() != b"#!" + os.fsencode(sys.executable):
                return None
        words = [sys.executable, found, *words[1:]]
    return words if _known(words[1:]) else None


def _known(words: list[str]) -> bool:
    """Whether ``_run`` does what an interpreter does with these words."""
    while words and words[0] in ("-u", "-B"):
        words = words[1:]
    if words and words[0] in ("-m", "-c"):
        return len(words) > 1
    return bool(words) and not words[0].startswith("-")


def _forked(popen: Any, template: _Template, bound: dict[str, Any], also: dict[str, Any]) -> None:
    """``Popen._execute_child``, of which ``bound`` has the arguments."""
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    standard = {0: bound["p2cread"], 1: bound["c2pwrite"], 2: bound["errwrite"]}
    files = {number: number if file == -1 else file for number, file in standard.items()}
    files |= {int(file): int(file) for file in bound["pass_fds"]}
    environment = os.environ if bound["env"] is None else bound["env"]
    request = {
        "words": bound["args"][1:],
        "folder": os.fspath(os.getcwd() if bound["cwd"] is None else bound["cwd"]),
        "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
        "ignored": [int(each) for each in SIGNALS if signal.getsignal(each) is signal.SIG_IGN],
        "session": bool(bound["start_new_session"]),
        "group": bound.get("process_group", -1),
    }
    if not os.path.isdir(request["folder"]):
        raise FileNotFoundError(2, os.strerror(2), request["folder"])
    sys.stdout.flush()
    popen.pid = template.fork(request | also, files)
    popen._child_created = True
    popen._close_pipe_fds(*(bound[end] for end in ends))


def _serve(asked: socket.socket) -> None:
    """Fork a program for each request, until nobody may ask any more."""
    _prctl(PR_SET_NAME, TEMPLATE.encode())
    for each in SIGNALS:  # to the group, which are for its programs
        signal.signal(each, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    _finalize_at_exit(False)
    while True:
        message, files, _, _ = socket.recv_fds(asked, LENGTH, 64)
        if not message:
            os._exit(0)
        ready, tell = os.pipe()
        if (between := os.fork()) == 0:
            between = os.getpid()
            if (program := os.fork()) == 0:
                while os.getppid() == between:
                    time.sleep(0.0005)
                try:
                    _become(pickle.loads(message), files)
                finally:  # where it did not come to the program
                    traceback.print_exc()
                    os._exit(1)
            os.write(tell, str(program).encode())
            os._exit(0)
        os.close(tell)
        os.waitpid(between, 0)
        asked.send(os.read(ready, 64))
        for file in (ready, *files):
            os.close(file)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Be the program that was asked for; does not return."""
    _files(dict(zip(request["numbers"], files, strict=True)))
    if request["session"]:
        os.setsid()
    if (group := request["group"]) is not None and group >= 0:
        os.setpgid(0, group)
    os.environ.clear()
    os.environ.update(request["environment"])
    _loaded.update(LOADED)
    os.chdir(request["folder"])
    for each in SIGNALS:
        usual = signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL
        signal.signal(each, signal.SIG_IGN if each in request["ignored"] else usual)
    for kind, most in request.get("limits", {}).items():
        resource.setrlimit(kind, (most, most))
    if network := request.get("network"):
        with open(f"/run/netns/{network}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _prctl(PR_SET_NAME, b"python")
    if request.get("starts", True):
        _Template.current = template = _Template.below()
        _replace_popen(lambda: template)
        _replace_spawn(template)
    _like_new()
    if request.get("whole"):
        _finalize_at_exit(True)
    status = _run(request["words"])
    if request.get("whole"):
        ctypes.pythonapi.Py_Exit(status)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _finalize_at_exit(wanted: bool) -> None:
    """Whether the finalizers of what is loaded run at the end. PyTorch's remove each of its operators: 0.05 s."""
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = wanted


def _files(wanted: dict[int, int]) -> None:
    """Have these files under these numbers, and no others."""
    above = max(wanted) + 1
    high = {number: fcntl.fcntl(file, fcntl.F_DUPFD, above) for number, file in wanted.items()}
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in high.values():
            with contextlib.suppress(OSError):  # the one that lists them
                os.close(number)
    for number, file in high.items():
        os.dup2(file, number)
        os.close(file)


class _Main(process.BaseProcess):
    """As ``multiprocessing`` has one in each main process, whose class it keeps to itself."""

    def __init__(self) -> None:
        self.__dict__ |= {
            "_identity": (),
            "_name": "MainProcess",
            "_parent_pid": None,
            "_popen": None,
            "_closed": False,
        }
        self._config = {"authkey": process.AuthenticationString(os.urandom(32)), "semprefix": "/mp"}

    def close(self) -> None: ...


def start_warm() -> None:
    """Have ``multiprocessing`` in this fork, which has no threads yet, fork what it would start as an interpreter."""
    _replace_spawn(_Template.below())


def _replace_spawn(template: _Template) -> None:
    real = util.spawnv_passfds  # type: ignore[attr-defined]

    def spawn(path: Any, arguments: Sequence[Any], passed: Sequence[int]) -> int:
        words = [os.fsdecode(word) for word in arguments]
        while len(words) > 1 and words[1] in ("-B", "-s", "-E", "-u"):
            del words[1]
        if os.fsdecode(path) != sys.executable or not _known(words[1:]):
            return int(real(path, arguments, passed))
        request = {
            "words": words[1:], "folder": os.getcwd(), "environment": dict(os.environ), "session": False, "group": -1,
            "starts": False,  # what it starts itself, it forks
            "ignored": [int(each) for each in SIGNALS if signal.getsignal(each) is signal.SIG_IGN],
        }  # fmt: skip
        return template.fork(request, {number: number for number in (0, 1, 2, *map(int, passed))})

    util.spawnv_passfds = spawn  # type: ignore[attr-defined]


def _like_new() -> None:
    """What an interpreter has at its beginning: a main process, streams, random numbers, folders of modules."""
    process._current_process = _Main()  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    process._children = set()  # type: ignore[attr-defined]
    for none in (forkserver._forkserver, resource_tracker._resource_tracker):  # type: ignore[attr-defined]
        none.__init__()
    multiprocessing.set_start_method(None, force=True)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    direct = "PYTHONUNBUFFERED" in os.environ
    for number, name in ((1, "stdout"), (2, "stderr")):
        written = open(number, "wb", 0 if direct else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            written, errors="backslashreplace" if number == 2 else "strict",
            line_buffering=number == 2 or os.isatty(number), write_through=direct,
        )  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    first = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = ["", *first, *(each for each in sys.path[1:] if each not in first)]
    found = PathFinder.find_spec("sitecustomize", first)
    if found is None or found.loader is None:
        return
    module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    for finder in [each for each in sys.meta_path if type(each).__module__ == "sitecustomize"]:
        if finder._module in sys.modules:  # attach/site/sitecustomize.py waits for its import
            sys.meta_path.remove(finder)
            module._hand_over(getattr(sys.modules[finder._module], finder._kind), finder._function)


def _run(words: list[str]) -> int:
    """Run a program as the interpreter does, down to what is registered for its end; its exit status."""
    sys.orig_argv = [sys.executable, *words]
    while words[0] in ("-u", "-B"):
        words = words[1:]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    kind, status = words[0], 0
    try:
        if kind == "-m":
            sys.argv, sys.path[0] = words[1:], os.getcwd()
            if not hasattr(sys.modules.get(words[1]), "__path__"):
                sys.modules.pop(words[1], None)  # which nobody has imported yet
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        elif kind == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
        elif os.path.isdir(kind):
            sys.argv = words
            runpy.run_path(kind, run_name="__main__")
        else:
            sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(kind))
            main.__file__, main.__spec__ = os.path.abspath(kind), None
            try:
                source = Path(kind).read_bytes()
            except OSError as error:
                sys.exit(_no_file(kind, error))
            exec(compile(source, main.__file__, "exec"), main.__dict__)
    except SystemExit as ended:
        status = _status(ended)
    except BaseException as error:
        while error.__traceback__ and error.__traceback__.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status


def _no_file(name: str, error: OSError) -> int:
    place = os.path.abspath(name)
    print(
        f"{sys.executable}: can't open file {place!r}: [Errno {error.errno}] {error.strerror}",
        file=sys.stderr,
    )
    return 2


def _status(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return (ended.code or 0) & 0xFF
    print(ended.code, file=sys.stderr)
    return 1
