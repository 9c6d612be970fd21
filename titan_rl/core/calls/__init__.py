"""Calling code that is not titan_rl's: within what time, in which thread, and whose failure it is."""
