"""What the micro-steps of a loop are given: a loader's batches, a stream's samples, or a number of samples."""
