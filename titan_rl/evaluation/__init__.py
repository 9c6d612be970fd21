"""Use of trained policies: evaluate, play and serve them."""
