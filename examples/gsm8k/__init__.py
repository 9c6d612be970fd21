"""Word problems from a file of rows."""
