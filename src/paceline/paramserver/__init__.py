"""The parameter server's decisions, apart from any engine: who computes what, when parameters move, how far."""
