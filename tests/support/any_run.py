"""Records of any kind that an engine could leave, however odd."""

import numpy as np

from paceline.runs import Run


def any_run(random, folder):
    """Rounds and workers of any number; absences, zero loads, zero seconds, gaps, missing losses and waits."""
    rounds, workers = random.choice([1, 2, 3, 5, 16, 17, 40, 400]), random.choice([1, 2, 3, 8, 9, 20, 70])
    shape = (rounds, workers)
    compute = random.exponential(size=shape) * 10.0 ** random.integers(-6, 5)
    loads = random.integers(0, 50, shape).astype(float)
    seconds = random.exponential(size=rounds) * (random.random() < 0.8)
    kind = random.integers(6)
    if kind == 1:
        compute[random.random(shape) < 0.5] = np.nan
    elif kind == 2:
        compute[:] = 0
    elif kind == 3:
        compute[:] = np.nan
    elif kind == 4:
        loads[:] = 0
    elif kind == 5:
        loads[random.random(shape) < 0.2] = np.nan
    unknown = np.full(shape, np.nan)
    return Run(
        path=folder,
        config={"policy": "level", "resumed": [{"round": 3}]},
        round=np.cumsum(random.integers(1, 3, rounds)) - 1,
        epoch=np.zeros(rounds, int),
        time=np.cumsum(seconds),
        seconds=seconds,
        batch=np.nan_to_num(loads).sum(axis=1),
        loss=random.choice([np.nan, 0.0, 1.0]) * random.random(rounds),
        loads=loads,
        compute=compute,
        overhead=random.random(shape) if random.random() < 0.5 else unknown,
        wait=seconds[:, None] - compute if random.random() < 0.5 else unknown,
        extras={},
        summary={},
        notes=[],
    )
