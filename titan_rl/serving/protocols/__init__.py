"""Protocols of clients: the form of requests and of answers."""
