"""Inputs of runs: images to train on, and recorded speeds of workers."""
