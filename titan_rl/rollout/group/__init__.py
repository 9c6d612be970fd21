"""Running a group: its siblings run concurrently, turn by turn, each in its own environment."""
