"""The parameter server's decisions, separate from any engine: who computes what, when parameters move, how far."""
