"""Mistakes of a program that would train another model without a message: what finds them."""
