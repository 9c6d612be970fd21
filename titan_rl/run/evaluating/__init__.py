"""`titan-rl eval`: policies of all kinds on the held-out prompts of a config's tasks."""
