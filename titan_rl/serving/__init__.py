"""A policy behind the protocols that agents speak: conversations that keep their tokens, episodes, endpoints.

`app.make_app` makes the ASGI application, `server.serve` runs it, and `client.HttpGenerateFn` makes any server of
`/inference/v1/generate` a `GenerateFn`.
"""

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not."""
