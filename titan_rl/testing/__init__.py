"""Contracts, fakes and simulation for tests of your own engines, transports and routing. Requires at most pytest."""
