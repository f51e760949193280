"""Which ranks live, which are missed or lost and why, and how a process group begins and ends."""
