"""Samples that cost differently: their cost model, and the division of a round's samples by cost, not by count."""

from paceline.samples.cost import CostModel, SampleCosts
from paceline.samples.deal import Deal, Room, deal
from paceline.samples.learner import CostLearner
from paceline.samples.pool import InPieces, Pool, in_pieces

__all__ = ["CostLearner", "CostModel", "Deal", "InPieces", "Pool", "Room", "SampleCosts", "deal", "in_pieces"]
