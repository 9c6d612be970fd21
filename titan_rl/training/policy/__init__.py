"""A model that scores tokens, and a batch as tensors."""
