"""The closed loop: a recorded script once more, with the fixed files in place of the original ones."""
