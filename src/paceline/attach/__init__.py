"""Enter a command that the user starts: run it, and call a function where its processes first make some object."""
