"""Tasks made of what other libraries have: their games, data sets, servers and reward functions."""
