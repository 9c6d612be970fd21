"""What settings need that a machine has or has not."""

from __future__ import annotations

from importlib.util import find_spec

from titan_rl.cluster.hosts.placement import (
    choose_transport,
    least_gpu_bytes,
    place_generators,
    place_trainer,
    visible_gpus,
)
from titan_rl.config.experimental import experimental_warning
from titan_rl.config.run import RunConfig
from titan_rl.core.errors import ConfigError
from titan_rl.weights.transports.registry import find_transport

SUFFIX_PACKAGE = "arctic-inference"


def check_needs(config: RunConfig) -> None:
    """What other hosts have is known when their workers answer, and is not looked at.

    Raises:
        ConfigError: the ranks of trainer and generators cannot be shared out. Or the run's processes are on this
            machine, and a setting needs a GPU or a package that it lacks. Names the setting and the fix.
    """
    if config.hosts.elsewhere:
        _check_places(config, _gpus_of_a_pod(config))
        return
    gpus = visible_gpus()
    if not gpus:
        _check_without_gpus(config)
    _check_places(config, gpus)
    guesses = config.generation.speculative
    if guesses.method == "suffix" and config.generation.engine == "vllm" and find_spec("arctic_inference") is None:
        raise ConfigError(
            f'generation.speculative.method = "suffix" needs {SUFFIX_PACKAGE}, which is not installed; run: '
            f'pip install {SUFFIX_PACKAGE}, or set it to "ngram"'
        )


def describe_transport(config: RunConfig) -> str:
    """The transport of a run, and the reason if that is chosen from what this machine has.

    Example: `statedict.transport is shared_memory: trainer and generators are on one host, not all on GPUs`
    """
    name, why = _chosen_transport(config)
    return f"statedict.transport is {name}{why}"


def warn_of_experimental(config: RunConfig) -> str | None:
    """A line that names the experimental settings of a run, with the transport that this machine leads to."""
    name, _ = _chosen_transport(config)
    return experimental_warning(config, name)


def _chosen_transport(config: RunConfig) -> tuple[str, str]:
    if config.statedict.transport != "auto":
        return config.statedict.transport, ", as set"
    here = {"here": () if config.hosts.elsewhere else visible_gpus()}
    trainer = () if config.hosts.elsewhere else place_trainer(config.training, ["here"], here)
    generators = place_generators(config.generation, ["here"], here, trainer)
    name, why = choose_transport(config, trainer, generators, least_gpu_bytes)
    return name, f": {why}"


def _check_without_gpus(config: RunConfig) -> None:
    if config.scheduling.on_batch_ready == "sleep" and config.generation.engine == "vllm":
        raise ConfigError(
            'scheduling.on_batch_ready = "sleep", and this machine has no GPU: vLLM cannot sleep on CPUs; set it to '
            '"continue", "keep" or "abort"'
        )
    transport = config.statedict.transport
    if find_transport(transport).needs_gpus:
        raise ConfigError(f"statedict.transport = {transport!r}, and this machine has no GPU; set it to 'auto'")


def _check_places(config: RunConfig, gpus: tuple[str, ...]) -> None:
    """
    Args:
        gpus: of each host; none where it has none, or nobody knows.
    """
    hosts = (
        [f"host {number + 1}" for number in range(config.hosts.train)] if config.hosts.elsewhere else ["this machine"]
    )
    of_hosts = dict.fromkeys(hosts, gpus)
    place_trainer(config.training, hosts, of_hosts)
    place_generators(config.generation, hosts[:1], of_hosts)


def _gpus_of_a_pod(config: RunConfig) -> tuple[str, ...]:
    """As far as the settings say it."""
    wanted = config.hosts.kubernetes.resources.get("nvidia.com/gpu", "")
    return tuple(map(str, range(int(wanted)))) if config.hosts.provider == "kubernetes" and wanted.isdigit() else ()
