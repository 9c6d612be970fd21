"""Contracts and fakes for tests of your own engines, transports and routing. Requires at most pytest."""
