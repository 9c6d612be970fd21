"""Sums and differences: one prompt, one answer."""
