"""What a run must not forget between two checkpoints."""
