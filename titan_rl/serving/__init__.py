"""Server of a policy: conversations that keep their tokens, episodes, and endpoints of the protocols that agents use.

`app.make_app` makes the ASGI application, `server.serve` runs it, and `client.HttpGenerateFn` turns any server of
`/inference/v1/generate` into a `GenerateFn`.
"""

LEAST_LOGPROB = -9999.0
"""Number that represents minus infinity, which JSON does not have."""
