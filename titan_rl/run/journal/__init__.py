"""Journal of a run: events between two checkpoints that a resumed run needs."""
