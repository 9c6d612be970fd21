"""What is kept of a run so that it can go on, and going on from it."""
