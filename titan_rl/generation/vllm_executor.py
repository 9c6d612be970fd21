"""vLLM's executor for ranks that are started from outside, made fit for many replicas on one host. Importing it imports
vLLM."""

from __future__ import annotations

import os
from pathlib import Path

from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher


class RankExecutor(ExecutorWithExternalLauncher):
    """One rank of a replica. Ranks on a CPU share memory, which vLLM names after what follows the last colon of the
    address where they meet: here it is the port, which no other replica of the host has."""

    def _distributed_args(self) -> tuple[str, int, int]:
        _, rank, local_rank = super()._distributed_args()
        return f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", rank, local_rank

    def _init_executor(self) -> None:
        super()._init_executor()
        # All ranks have it mapped by now. Without a name it goes with them, however they end.
        for path in Path("/dev/shm").glob(f"{os.environ['MASTER_PORT']}-*-cpushm_*"):
            path.unlink(missing_ok=True)
