"""Shards on their way between hosts: one transfer a host and version, from host to host, of changed bytes alone."""
