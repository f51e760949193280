"""``paceline train``: its configuration, its workers, its checkpoints, and one file per engine."""
