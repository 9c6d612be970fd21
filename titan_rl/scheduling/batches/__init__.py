"""Which finished groups make a batch, and what a batch is."""
