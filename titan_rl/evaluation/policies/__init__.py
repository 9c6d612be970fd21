"""Policies that are asked and not trained: which one somebody names, and starting what answers for it."""
