"""A run that goes on when a rank is killed, freezes, leaves or joins: members, sums, and what a joiner gets."""
