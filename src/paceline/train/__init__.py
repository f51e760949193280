"""``paceline train``: its configuration, its workers, its checkpoints, and one file for each engine."""
