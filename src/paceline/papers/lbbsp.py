"""Chen et al. (2018), "Fast Distributed Deep Learning via Worker-adaptive Batch Sizing" (LB-BSP): its experiments."""

from __future__ import annotations

from paceline.papers import Experiment
from paceline.papers.lbbsp_forecasts import fig11, table3
from paceline.papers.lbbsp_overhead import fig14
from paceline.papers.lbbsp_timing import fig3, fig6

EXPERIMENTS: dict[str, Experiment] = {
    "fig3": fig3,
    "fig6": fig6,
    "fig11": fig11,
    "table3": table3,
    "fig14": fig14,
}
