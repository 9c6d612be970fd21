"""Readers that pull the newest version while the next ones are published."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from titan_rl.core.errors import StateDictError
from titan_rl.weights.types import Manifest

Weights = dict[str, torch.Tensor]


def race(
    publish: Callable[[int], Manifest], pull: Callable[[Manifest], Weights], expected: Callable[[int], Weights]
) -> set[int]:
    """Return the versions that two readers saw during 200 publishes. A version that is gone by the time it is opened is
    not an error; wrong content is."""
    newest = [publish(0)]
    done = threading.Event()
    wrong: list[object] = []
    seen: set[int] = set()

    def read() -> None:
        while not done.is_set():
            manifest = newest[0]
            try:
                found = pull(manifest)
            except StateDictError as error:
                if "checksum" in str(error):
                    wrong.append(error)
                continue
            seen.add(manifest.version)
            if not torch.equal(found["a"], expected(manifest.version)["a"]):
                wrong.append(manifest.version)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for version in range(1, 200):
        newest[0] = publish(version)
    done.set()
    for thread in threads:
        thread.join(timeout=150)
    assert not wrong
    return seen
