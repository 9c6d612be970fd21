"""Relay of shards from host to host: each host receives a version once, and only its changed bytes."""
