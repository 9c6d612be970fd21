"""Kuhn poker by self-play: one policy plays both seats."""
