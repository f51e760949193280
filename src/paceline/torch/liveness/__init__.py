"""Failure detection: which ranks live, which are missing or lost and why; and how a process group begins and ends."""
