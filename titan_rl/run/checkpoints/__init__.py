"""Checkpoints of a run, and resumption from them."""
