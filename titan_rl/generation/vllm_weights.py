"""What vLLM leaves out when it loads weights anew on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def with_tied_head(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Name the output head too: on CPU vLLM keeps a packed copy, which loading the embedding alone leaves as it was."""
    embedding, names = None, set[str]()
    for name, tensor in items:
        names.add(name)
        if name == "model.embed_tokens.weight":
            embedding = tensor
        yield name, tensor
    if embedding is not None and "lm_head.weight" not in names:
        yield "lm_head.weight", embedding


def drop_packed_experts(worker: Any) -> None:
    """Have vLLM pack the experts of a mixture anew: on CPU a reload leaves them out, and reads what is not packed as if
    it were."""
    for module in worker.get_model().modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
