"""Sort a growing list of names over several turns."""
