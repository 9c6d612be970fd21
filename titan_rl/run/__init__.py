"""One run, from a checked config to its end: the training loop, what it remembers, and what it says."""
