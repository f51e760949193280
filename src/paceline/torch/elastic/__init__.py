"""Runs that continue when a rank is killed, freezes, leaves or joins: members, sums, recovery, and the handover."""
