"""A bandit in tokens, learned from nothing."""
