"""Attention inside the documents of a packed row."""
