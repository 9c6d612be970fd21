"""Game of many turns."""
