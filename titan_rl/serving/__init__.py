"""A policy behind the protocols that agents speak: conversations that keep their tokens, episodes, endpoints."""
