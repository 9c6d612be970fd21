"""Actor processes: their start, the GPUs that they see, and the detection of their end."""
