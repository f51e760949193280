"""The input of a loop's micro-steps: a loader's batches, a stream's samples, or a number of samples."""
