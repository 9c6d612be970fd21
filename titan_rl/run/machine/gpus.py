"""Settings that need a GPU, on a machine that has none."""

from __future__ import annotations

from titan_rl.actors.processes.gpus import visible_gpus
from titan_rl.config.run import RunConfig
from titan_rl.errors import ConfigError
from titan_rl.weights.transports.registry import find_transport


def check_gpus(config: RunConfig) -> None:
    """What other hosts have is known when their workers answer, and is not looked at.

    Raises:
        ConfigError: the run's processes are on this machine, and a setting needs a GPU that it lacks. Names the setting
            and the fix.
    """
    if config.hosts.elsewhere or visible_gpus():
        return
    if config.scheduling.on_batch_ready == "sleep" and config.generation.engine == "vllm":
        raise ConfigError(
            'scheduling.on_batch_ready = "sleep", and this machine has no GPU: vLLM cannot sleep on CPUs; set it to '
            '"continue", "keep" or "abort"'
        )
    transport = config.statedict.transport
    if find_transport(transport).needs_gpus:
        raise ConfigError(f"statedict.transport = {transport!r}, and this machine has no GPU; set it to 'auto'")
