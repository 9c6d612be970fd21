"""Terminal output of commands. It does not depend on runs."""
