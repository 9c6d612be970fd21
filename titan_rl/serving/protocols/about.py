"""What the server tells of itself."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from titan_rl.serving.http.metrics import ServerMetrics
from titan_rl.serving.policy.served_policy import ServedPolicy


def about_routes(
    policy: ServedPolicy,
    metrics: ServerMetrics,
    trouble: Callable[[], str | None] | None = None,
    version: Callable[[], int] | None = None,
) -> list[Route]:
    """
    Args:
        trouble: why the policy cannot answer at present; None while it can.
        version: of the policy that answers new requests, for the model's card.
    """
    # Of OpenAI's form and of Anthropic's, whose path is the same.
    always: dict[str, object] = {
        "id": policy.model,
        "type": "model",
        "display_name": policy.model,
        "created_at": datetime.fromtimestamp(policy.created, UTC).isoformat(),
        "object": "model",
        "created": policy.created,
        "owned_by": "titan_rl",
        "max_model_len": policy.max_context,
    }

    def card() -> dict[str, object]:
        return always if version is None else {**always, "weight_version": str(version())}

    async def health(request: Request) -> Response:
        if trouble is not None and (why := trouble()) is not None:
            return JSONResponse({"status": "unavailable", "reason": why}, 503, {"retry-after": "1"})
        return JSONResponse({"status": "ok"})

    async def metric_text(request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(request: Request) -> Response:
        page = {"has_more": False, "first_id": policy.model, "last_id": policy.model}
        return JSONResponse({"object": "list", "data": [card()], **page})

    async def one_model(request: Request) -> Response:
        policy.check_model(request.path_params["name"])
        return JSONResponse(card())

    return [
        Route("/health", health),
        Route("/metrics", metric_text),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
    ]
