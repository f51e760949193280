"""DBW's Fig. 9: half of the workers become slower while the run goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.papers import Result, write
from paceline.papers.dbw_compare import DYNAMIC
from paceline.papers.dbw_runs import (
    NETWORKS,
    WORKERS,
    network,
    play,
    smoothed,
)
from paceline.simulate.figure import figure
from paceline.simulate.roundtrips import Change
from paceline.simulate.timing import Constant


def fig9(out: Path, quick: bool) -> Result:
    """Half of the workers become five times slower at 160 s."""
    at, seconds = (20.0, 40.0) if quick else (160.0, 300.0)
    change = [Change(at, tuple(range(WORKERS // 2)), 5.0)]
    picture = figure(2)
    rows, ends = [], {}
    remembering = ("dbw:memory=0.9", "dbw:worth=noise,memory=0.9")  # old times fade: within about 10 updates
    for name in (*DYNAMIC, *remembering, "static:8", "static:16"):
        rate = "proportional" if name.startswith("static") else "fixed"
        updates, _ = play(
            name,
            Constant(1.0),
            rate=rate,
            target=None,
            seconds=seconds,
            changes=change,
            model=network(quick),
        )
        now = [u.now for u in updates]
        picture.axes[0].plot(now, smoothed(updates), label=name, linewidth=1)
        picture.axes[1].plot(now, [u.quorum for u in updates], label=name, linewidth=1)
        rows += [{"policy": name, "seconds": u.now, "loss": u.loss, "k": u.quorum} for u in updates]
        before = [u.quorum for u in updates if u.now <= at]
        after = [u.quorum for u in updates if u.now > at + 0.2 * (seconds - at)]
        ends[name] = (float(np.median(before)), float(np.median(after)), float(smoothed(updates)[-1]))
    picture.axes[0].set(xlabel="virtual seconds", ylabel="loss", yscale="log")
    picture.axes[1].set(xlabel="virtual seconds", ylabel="k")
    picture.axes[0].legend(fontsize="x-small")
    return write(
        out,
        "fig9",
        picture,
        rows,
        {
            "claim": "DBW waits for 16 before the slowdown and for 8 after it",
            "ours": "median k before and after, and the loss at the end: "
            + ", ".join(f"{name} {b:.0f} -> {a:.0f}, {loss:.3f}" for name, (b, a, loss) in ends.items()),
            "why": "eq. (17) averages all samples alike, 160 old ones against each new one; memory=0.9 lets "
            "old ones fade",
            "setting": f"MNIST, {NETWORKS[network(quick)]}, n = 16, B = 500, round trips of 1 s; "
            f"from {at:g} s on half of the workers take 5 s",
            "command": "paceline reproduce dbw fig9" + (" --quick" if quick else ""),
        },
    )
