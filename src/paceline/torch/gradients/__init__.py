"""Exact gradients: weighted, accumulated over a round's pieces, reduced over the ranks, and applied in one step."""
