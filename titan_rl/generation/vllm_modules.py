"""Modules that an engine of vLLM imports, for a fork server that imports them before it forks generators."""

import os

from titan_rl.generation.vllm_arguments import ENVIRONMENT

for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

import vllm.v1.engine.core_client
import vllm.v1.worker.cpu_worker  # noqa: F401
