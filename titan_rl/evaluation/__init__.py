"""Use of trained policies: evaluation, play and serving."""
