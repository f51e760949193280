"""Models and data behind one gradient at a time: what engines and experiments train."""
