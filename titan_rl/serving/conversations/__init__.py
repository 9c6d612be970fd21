"""Conversations that keep their tokens: which turn a history extends, and which session samples the next turn."""
