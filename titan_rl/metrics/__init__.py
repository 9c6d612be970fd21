"""Descriptions of all metrics that titan_rl writes: their meaning, normal values, and advice for other values."""
