"""Xu, Neglia and Sebastianelli (2021), "Dynamic Backup Workers for Parallel Machine Learning": its experiments."""

from __future__ import annotations

from paceline.papers import Experiment
from paceline.papers.dbw_alphas import fig4, fig6, fig10
from paceline.papers.dbw_batches import fig7, fig8
from paceline.papers.dbw_cifar import fig5
from paceline.papers.dbw_estimates import fig1, fig2, fig3
from paceline.papers.dbw_slowdown import fig9
from paceline.papers.dbw_speeds import speeds

EXPERIMENTS: dict[str, Experiment] = {
    each.__name__: each for each in (fig1, fig2, fig3, fig4, fig5, fig6, fig7, fig8, fig9, fig10, speeds)
}
