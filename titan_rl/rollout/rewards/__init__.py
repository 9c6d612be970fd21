"""Rewards of a group: reward functions, their combination in a rubric, and the advantages of siblings."""
