"""A game of many turns."""
