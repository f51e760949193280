"""DOLBIE (distributed online load balancing, batch sizes of 30 workers): its experiments."""

from __future__ import annotations

from paceline.papers import Experiment
from paceline.papers.dolbie_accuracy import fig6, fig7, fig8
from paceline.papers.dolbie_rounds import fig3, fig4, fig5, fig9, fig10, fig11

EXPERIMENTS: dict[str, Experiment] = {
    each.__name__: each for each in (fig3, fig4, fig5, fig6, fig7, fig8, fig9, fig10, fig11)
}
