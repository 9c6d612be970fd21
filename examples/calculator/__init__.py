"""Questions that need tool calls."""
