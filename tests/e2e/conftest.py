"""Fork servers of the tests that start generators and trainers in processes of their own."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from titan_rl.cluster.processes.fork_server import fork_servers
from titan_rl.generation.gpu_share import has_gpu_driver


@pytest.fixture(scope="session", autouse=True)
def servers() -> Iterator[None]:
    """Import vLLM and torchtitan once for all actors that these tests start. Runs have servers of their own."""
    if has_gpu_driver() or find_spec("vllm") is None or find_spec("monarch") is None:
        yield
        return
    with fork_servers(("trainer", "generator")):
        yield
