"""From rollouts to rows: training samples, and their packing for the ranks. Imports no torch."""
