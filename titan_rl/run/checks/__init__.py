"""Checks of a run, its machine and its model before they are used: disk, GPUs, packages, processes and memory."""
