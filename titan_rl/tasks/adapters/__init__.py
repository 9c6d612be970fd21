"""Tasks from other libraries: their games, data sets, servers and reward functions."""
