"""What this rank's rounds took, what the ranks tell each other of them, and the run's record."""
