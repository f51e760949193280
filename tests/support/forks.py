"""A launcher such as torchrun, ``forks.py RANKS SCRIPT ...``, which loads PyTorch once and forks its ranks.

Each rank ends as the interpreter ends. With ``PACELINE_TESTS_SAID`` in the environment, a folder, each has its
standard error in a file there, by its number, and how each ended is printed at last.
"""

import json
import os
import runpy
import socket
import sys

import torch
import torch.distributed


def main() -> None:
    ranks, script = int(sys.argv[1]), sys.argv[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    said = os.environ.get("PACELINE_TESTS_SAID")
    started = []
    for rank in range(ranks):
        if (process := os.fork()) == 0:
            os.environ.update(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            if said is not None:
                os.dup2(os.open(f"{said}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
            torch.set_num_threads(1)
            sys.argv, sys.path[0] = sys.argv[2:], os.path.dirname(script)
            runpy.run_path(script, run_name="__main__")
            return
        started.append(process)
    ended = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started]
    if said is not None:
        print(json.dumps(ended))
    else:
        sys.exit(next((1 for status in ended if status), 0))


if __name__ == "__main__":
    main()
