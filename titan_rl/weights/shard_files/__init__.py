"""Versions as files in shared memory, which die with their writer."""
