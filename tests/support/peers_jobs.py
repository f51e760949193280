"""What ranks do that meet with hindrances."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.torch import peers
from paceline.torch.measuring import exchange, piece_reports
from paceline.torch.measuring.meter import ROW_WITH_PIECES


def left_early(rank: int, ranks: int, seconds: float) -> str:
    """Rank 0 goes as soon as it has the store that it hosts, and rank 1 connects ``seconds`` late; how that ended."""
    connect = dist.TCPStore

    @functools.wraps(connect)
    def late(*arguments: Any, **options: Any) -> dist.TCPStore:
        time.sleep(seconds)
        return connect(*arguments, **options)

    if rank == 1:
        dist.TCPStore = late  # type: ignore[misc,assignment]
    return own_store(5.0)


def out_of_reach(rank: int, ranks: int, who: int) -> str:
    """The sentence that a rank gets when rank ``who`` cannot reach the store."""
    connect = dist.TCPStore

    @functools.wraps(connect)
    def elsewhere(host: str, port: int, *arguments: Any, **options: Any) -> dist.TCPStore:
        return connect("192.0.2.1", port, *arguments, **options)  # kept for documentation: nobody is there

    if rank == who:
        dist.TCPStore = elsewhere  # type: ignore[misc,assignment]
    return own_store(0.5)


def own_store(timeout: float) -> str:
    """Connect and let go again; the sentence where that fails."""
    try:
        peers.own_store(timeout)
    except PacelineError as error:
        return str(error)
    return "connected"


def exchanged(rank: int, ranks: int) -> dict[str, list[dict[str, Any]]]:
    """What this rank receives of all ranks' reports by either exchange; rank r has run r + 1 pieces."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in (exchange.StoreExchange(ROW_WITH_PIECES), exchange.GroupExchange(ROW_WITH_PIECES, ranks)):
        row = np.zeros((), ROW_WITH_PIECES)
        row["step"], row["seconds"] = 7, rank / 2
        numbers = piece_reports.report(range(1, rank + 2), [1.0] * (rank + 1), 1e-3)
        row["pieces"] = np.array(numbers).view(piece_reports.ROW)[0]
        kind.send(7, row)
        rows = kind.receive(7)
        sizes = piece_reports.PieceReports.of(rows["pieces"]).pieces
        found[type(kind).__name__] = [
            {"step": one["step"], "seconds": one["seconds"], "sizes": size}
            for one, size in zip(rows, sizes, strict=True)
        ]
        kind.close()
    return found
