"""The times of this rank's rounds, the ranks' reports of them to each other, and the run's record."""
