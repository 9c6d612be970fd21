"""The hosts of a run: how they are found, what is asked of each, and which process goes where."""
