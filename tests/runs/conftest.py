"""Small synthetic records: what the engines would have written."""

import numpy as np
import pytest

from paceline.runs import Recorder, read

CONFIG = {"policy": "level", "workers": 4, "global_batch": 64, "data": "digits", "model": "mlp", "seed": 0}


@pytest.fixture
def config():
    return dict(CONFIG)


def writing(config, place):
    """Writes a bulk-synchronous run without noise: a round takes as long as its slowest worker.

    loads, per_sample: shape (T, n), or what is the same in all rounds or for all workers; NaN in per_sample where a
    worker was absent. rounds: T, where neither tells it.
    """

    def write(name, loads, per_sample, rounds=40, finish=None, epoch=10, losses=True, **changes):
        folder, shape = place / name, np.broadcast_shapes(np.shape(loads), np.shape(per_sample), (1, 1))
        shape = (rounds, shape[1]) if shape[0] == 1 else shape
        loads, per_sample = np.broadcast_to(loads, shape), np.broadcast_to(per_sample, shape)
        compute = loads * per_sample
        seconds = np.nanmax(compute, axis=1)
        with Recorder.create(folder, config | {"workers": loads.shape[1]} | changes) as recorder:
            for t, time in enumerate(np.cumsum(seconds)):
                recorder.round(
                    round=t,
                    epoch=t // epoch,
                    time=time,
                    seconds=seconds[t],
                    batch=int(loads[t].sum()),
                    loads=loads[t],
                    compute=compute[t],
                    shares=loads[t] / loads[t].sum(),
                    loss=2.0 / (1 + t) if losses else None,
                )
            if finish is not None:
                recorder.finish(**finish)
        return folder

    return write


@pytest.fixture
def write(config, tmp_path):
    return writing(config, tmp_path)


@pytest.fixture(scope="module")
def ran_once(tmp_path_factory):
    """Like ``ran``, for what all tests of a module share."""
    write = writing(CONFIG, tmp_path_factory.mktemp("runs"))
    return lambda *given, **changes: read(write(*given, **changes))


@pytest.fixture
def ran(write):
    """The same run, read."""
    return lambda *given, **changes: read(write(*given, **changes))
