"""A package of one's own to begin from: a task, its settings, its tests, and a tiny model for it."""
