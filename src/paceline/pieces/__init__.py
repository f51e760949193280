"""Rounds in pieces: what is run at once, what whoever is free claims next, and what the pieces' seconds tell."""
