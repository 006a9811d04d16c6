"""One run of each command, from options to result."""
