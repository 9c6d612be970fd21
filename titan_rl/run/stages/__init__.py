"""What the training loop calls in its stages: groups, calls of the trainer, the way of the weights, validation."""
