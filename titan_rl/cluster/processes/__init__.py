"""Actor processes: how they begin, which GPUs they see, and how their end is heard of."""
