"""Work that moves within a round: how it is divided, and the claims of whoever is free."""
