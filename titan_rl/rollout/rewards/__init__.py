"""Rewards of a group: reward functions, their weighted sum in a rubric, and the advantages of siblings."""
