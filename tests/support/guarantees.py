"""The promise that a test shows, of which ``python docs/guarantees.py`` makes a row of docs/guarantees.md.

Tests with the same promise share a row. Where the tests of a file show a promise together, the file has it in a
constant: ``GUARANTEES = ("...",)``.
"""

import pytest


def guarantee(promise: str) -> pytest.MarkDecorator:
    """Mark a test with its promise: subject, condition, result, in at most 160 characters."""
    return pytest.mark.guarantee(promise)
