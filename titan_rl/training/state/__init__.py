"""The training state on disk."""
