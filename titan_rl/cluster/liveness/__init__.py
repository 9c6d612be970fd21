"""How it is known that a process, or a whole host, is dead or hangs. None of it needs Monarch."""
