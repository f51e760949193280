"""Rounds in pieces: what runs at once, what a free worker claims next, and estimates from the pieces' seconds."""
