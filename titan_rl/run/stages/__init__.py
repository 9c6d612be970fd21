"""Stages of the training loop: groups, calls of the trainer, weight sync, validation."""
