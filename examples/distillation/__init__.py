"""Sums, learned from a teacher's logprobs instead of rewards."""
