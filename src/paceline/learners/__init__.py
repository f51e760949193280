"""Models with their data that compute one gradient at a time, for engines and experiments."""
