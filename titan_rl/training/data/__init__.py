"""From rollouts to rows: samples, how they are packed, and which rank trains which. Standard library only."""
