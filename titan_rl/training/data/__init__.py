"""Training data: samples from rollouts, and their packing into rows for the ranks. Imports no torch."""
