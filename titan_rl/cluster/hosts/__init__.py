"""Hosts of a run: discovery, preflight checks, lifecycle, and placement of processes."""
