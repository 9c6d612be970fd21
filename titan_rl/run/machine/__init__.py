"""Use of the machine by a run: environment, disk, signals, and a guard process that cleans up."""
