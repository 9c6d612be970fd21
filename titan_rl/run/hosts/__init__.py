"""Hosts come to a run and leave it while it goes on."""
