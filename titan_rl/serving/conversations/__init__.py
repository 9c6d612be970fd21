"""Conversations that keep their tokens: which turn a history goes on from, and which session samples the next."""
