"""Which groups run now, how stale they may be, and in which batch they are trained."""
