"""Optimizers, which compute new weights from gradients."""
