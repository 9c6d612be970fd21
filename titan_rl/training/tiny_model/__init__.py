"""Models of about a million parameters with a tokenizer built for a task, so that two cores can train them."""

from titan_rl.training.tiny_model.folder import make_tiny_model

__all__ = ["make_tiny_model"]
