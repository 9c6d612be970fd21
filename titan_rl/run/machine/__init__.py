"""What a run borrows from its machine: environment, disk, signals, and a guard that gives it all back."""
