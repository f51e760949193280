"""Exact gradients: weighted, gathered over a round's pieces, reduced over the ranks, and stepped with once."""
