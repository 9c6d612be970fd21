"""Sums graded by a judge instead of an exact check."""
