"""Chen et al. (2018), "Fast Distributed Deep Learning via Worker-adaptive Batch Sizing" (LB-BSP): its experiments."""

from __future__ import annotations

from paceline.papers import Experiment
from paceline.papers.lbbsp_clusters import fig8, fig9, fig10, fig12, fig13
from paceline.papers.lbbsp_forecasts import fig11, table3
from paceline.papers.lbbsp_network import fig13real
from paceline.papers.lbbsp_overhead import fig14
from paceline.papers.lbbsp_sync import fig8sync
from paceline.papers.lbbsp_timing import fig3, fig6

EXPERIMENTS: dict[str, Experiment] = {
    each.__name__: each
    for each in (fig3, fig6, fig8, fig8sync, fig9, fig10, fig11, table3, fig12, fig13, fig13real, fig14)
}
