"""Samples that cost differently: their cost model, and a round's samples dealt by cost instead of by count."""

from paceline.samples.cost import CostModel, SampleCosts
from paceline.samples.deal import Deal, Room, deal

__all__ = ["CostModel", "Deal", "Room", "SampleCosts", "deal"]
