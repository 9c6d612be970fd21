"""Terminal output of commands. It knows nothing of runs."""
