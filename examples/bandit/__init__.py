"""Contextual bandit in tokens, learned by an untrained model."""
