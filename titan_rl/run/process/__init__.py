"""Process of a command: its environment, signals, and a guard process that cleans up after it."""
