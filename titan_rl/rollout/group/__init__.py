"""Running a group: its siblings side by side, turn by turn, each in an environment of its own."""
