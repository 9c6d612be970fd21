"""The protocols that clients speak: how each asks, and how it is told."""
