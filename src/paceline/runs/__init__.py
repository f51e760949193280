"""The output of a run: its record, a summary, a report for people, a trace for Perfetto.

    with Recorder.create("runs/first", config) as recorder:
        recorder.round(round=0, ...)            # writes one line of rounds.jsonl, on disk when the call returns
        recorder.finish(test_accuracy=0.97)     # writes summary.json
    run = read("runs/first")

A run directory holds run.json (the configuration), rounds.jsonl (one line per round, append-only),
summary.json, report.html, trace.json and, from the training engine, checkpoint.pt.
"""

from paceline.runs.record import Recorder
from paceline.runs.run import Run, read
from paceline.runs.summary import summarize

__all__ = ["Recorder", "Run", "read", "summarize"]
