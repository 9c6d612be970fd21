"""Calls of user code: time limits, threads, cancellation, and attribution of failures."""
