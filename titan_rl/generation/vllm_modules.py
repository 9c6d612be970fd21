"""Modules of vLLM that every engine imports. A fork server imports this module before it forks generators."""

import os

from titan_rl.generation.vllm_arguments import ENVIRONMENT

for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

import vllm.v1.engine.core_client  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401
