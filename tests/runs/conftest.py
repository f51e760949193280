"""Small synthetic records: what the engines would have written."""

import numpy as np
import pytest

from paceline.runs import Recorder


@pytest.fixture
def config():
    return {"policy": "level", "workers": 4, "global_batch": 64, "data": "digits", "model": "mlp", "seed": 0}


@pytest.fixture
def write(config):
    """Writes a bulk-synchronous run without noise: a round takes as long as its slowest worker.

    loads, per_sample: shape (T, n); NaN in per_sample where a worker was absent.
    """

    def write(folder, loads, per_sample, finish=None, epoch=10, losses=True, **changes):
        loads, per_sample = np.asarray(loads), np.asarray(per_sample, float)
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
