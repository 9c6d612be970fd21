"""Cost of announcing a version of a mixture of 128 experts in 48 layers to a replica.

A manifest is packed, pickled and restored, the first time and every time after it. This is compared with a manifest
whose layout is sent as dataclasses.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.paired import report
from titan_rl.weights.manifest import KnownLayouts, pack
from titan_rl.weights.types import Manifest, Shard, TensorEntry

LAYERS, EXPERTS = 48, 128


def manifest(version: int) -> Manifest:
    entries: list[TensorEntry] = []
    offset = 0
    for layer in range(LAYERS):
        shapes = {f"self_attn.{part}_proj": (2048, 2048) for part in "qkvo"}
        for expert in range(EXPERTS):
            shapes |= {f"mlp.experts.{expert}.{part}_proj": (768, 2048) for part in ("gate", "up", "down")}
        for name, shape in shapes.items():
            size = 2 * shape[0] * shape[1]
            entries.append(TensorEntry(f"model.layers.{layer}.{name}.weight", "bfloat16", shape, offset, size))
            offset += size
    return Manifest(version, (Shard("/dev/shm/titan_rl-weights", offset, 1, tuple(entries)),))


def measure(rounds: int) -> None:
    def plainly() -> int:
        message = pickle.dumps(manifests[0])
        pickle.loads(message)
        return len(message)

    def first() -> int:
        message = pickle.dumps(pack(manifests[0]))
        KnownLayouts().unpack([pickle.loads(message)])
        return len(message)

    def later() -> int:
        message = pickle.dumps(pack(next(after), known.digests))
        known.unpack([pickle.loads(message)])
        return len(message)

    manifests = [manifest(version) for version in range(2)]
    known = KnownLayouts()
    after = iter([known.unpack([pack(one)])[0] for one in manifests * rounds])
    known.unpack([pack(manifests[0])])
    for name, way in (("plain", plainly), ("first", first), ("later", later)):
        _report(name, way, rounds)


def _report(name: str, way: Callable[[], Any], rounds: int) -> None:
    taken: list[float] = []
    size = 0
    for _ in range(rounds):
        began = time.perf_counter()
        size = way()
        taken.append(time.perf_counter() - began)
    report(f"manifest_128_experts_{name}_bytes", size, "bytes")
    report(f"manifest_128_experts_{name}_s", median(taken), "s")
