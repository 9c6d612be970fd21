"""Scheduling of groups: admission, the bound on staleness, and batches for training."""
