"""Environments of a policy: in tokens, in chat messages, with several seats, and in code that blocks."""
