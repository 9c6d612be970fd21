"""Questions that take calls of tools."""
