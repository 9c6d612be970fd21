"""Requirements of a run on its machine: disk space, GPUs and packages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from titan_rl.cluster.hosts.placement import (
    choose_transport,
    least_gpu_bytes,
    place_generators,
    place_trainer,
    visible_gpus,
)
from titan_rl.config.build import is_single_turn, make_renderer
from titan_rl.config.dense_shapes import is_known_to_fit
from titan_rl.config.experimental import experimental_warning
from titan_rl.config.model_files import read_json
from titan_rl.config.model_folder import BYTES, count_adapter, count_parameters
from titan_rl.config.run import RunConfig
from titan_rl.core.errors import ConfigError, MissingExtraError, ModelError, NoSpaceError, TitanRLError, in_one_line
from titan_rl.rollout.renderer.registry import ChosenRenderer, chat_support, choose_renderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.run.process.environment import allow_open_files
from titan_rl.run.terminal.waiting import WAITING
from titan_rl.training.models.families import EXPERT_COUNTS, PROVED, choose_implementation
from titan_rl.training.models.finite_weights import check_finite_folder
from titan_rl.weights.transports.registry import find_transport

LEFT_FREE = 1 << 24
"""Bytes that a checkpoint leaves free for journal, metrics and logs, which continue if a checkpoint is skipped for lack
of room."""

_RESERVE = f"{LEFT_FREE / 1e6:.1f} MB for journal, metrics and logs"

_AVERAGES = {"adamw": 2, "adam": 2, "muon": 2, "sgd": 1}  # averages that the optimizer keeps of each parameter


def checkpoint_bytes(config: RunConfig) -> int:
    """Approximate size of a checkpoint in bytes: the trained weights and the optimizer's averages."""
    training, folder = config.training, Path(config.model.path)
    count = count_adapter(folder, training.adapter) if training.adapter.is_on else count_parameters(folder)
    averages = _AVERAGES.get(training.optimizer, 2) * {**BYTES, "int8": 1}[training.optimizer_dtype]
    return count * (BYTES[training.master_dtype] + averages)


def check_room(config: RunConfig, folder: Path, held: int = 0) -> None:
    """Check that the disk has room for the checkpoints of a run.

    Args:
        folder: Folder of the run, or the folder in which it will be created.
        held: Bytes of the run's existing checkpoints.

    Raises:
        ConfigError: The disk does not have enough room.
    """
    policies = [*config.experiments.values()] or [config]
    each = sum(map(checkpoint_bytes, policies))
    export = count_parameters(Path(config.model.path)) * BYTES[config.model.dtype] * len(policies)
    keeps_best = config.checkpoint.keep == "best"
    num_kept = config.checkpoint.num_newest + keeps_best
    kept = f'"best": {num_kept}' if keeps_best else num_kept
    needed = each * (num_kept + 1) + export + LEFT_FREE
    free = free_bytes(folder)
    if needed > free + held:
        more = f" more than the {gigabytes(held)} of its checkpoints" if held else ""
        raise ConfigError(
            f"run_dir = {config.run_dir!r}: {folder} has {gigabytes(free)} free, and this run needs "
            f"{gigabytes(needed - held)}{more}: checkpoint.keep = {kept} checkpoints of "
            f"{gigabytes(each)} each, the one that is being written, {gigabytes(export)} of the exported policy, and "
            f"{_RESERVE}; free some space, lower checkpoint.keep, or set run_dir to a folder on another disk"
        )


def require_room(folder: Path, num_bytes: int) -> None:
    """Check that the disk has room for a checkpoint.

    Raises:
        NoSpaceError: The checkpoint does not fit.
    """
    free = free_bytes(folder)
    if num_bytes + LEFT_FREE > free:
        raise NoSpaceError(no_space(folder, num_bytes, free))


def no_space(folder: Path, num_bytes: int, free: int) -> str:
    """Error message for a checkpoint that does not fit on the disk."""
    now = " again, now that what was written is removed" if free >= num_bytes + LEFT_FREE else ""
    return (
        f"no space left in {folder}: a checkpoint takes {gigabytes(num_bytes)} and leaves {_RESERVE}, "
        f"{gigabytes(num_bytes + LEFT_FREE)} together; {gigabytes(free)} are free{now}"
    )


def free_bytes(folder: Path) -> int:
    """Bytes that are free for this user in a folder, or in its nearest parent that exists."""
    while not os.path.exists(folder):  # also if its name is too long, which will be reported when it is created
        folder = folder.absolute().parent
    return shutil.disk_usage(folder).free


def size_of(folder: Path) -> int:
    """Size of all files in a folder in bytes, without files that disappear meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def gigabytes(num_bytes: float) -> str:
    """Format a size: `gigabytes(12_300_000_000)` is "12.3 GB", and `gigabytes(12_300_000)` is "12.3 MB"."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


SUFFIX_PACKAGE = "arctic-inference"


def require_modules(*modules: str) -> None:
    """Check that modules are installed.

    Raises:
        MissingExtraError: A module is missing.
    """
    for module in modules:
        if find_spec(module) is None:
            raise MissingExtraError(module, "cpu")


def check_needs(config: RunConfig) -> None:
    """Check that this machine has the GPUs and packages that the settings need. Other hosts are checked when their
    workers answer.

    Raises:
        ConfigError: The ranks of trainer and generators cannot be placed, or a setting needs a GPU or a package that
            this machine lacks, or too few files may be open. The message names the setting and the fix.
    """
    allow_open_files()
    if config.hosts.elsewhere:
        _check_placement(config, _gpus_of_a_pod(config))
        return
    gpus = visible_gpus()
    if not gpus:
        _check_without_gpus(config)
    elif _has_adapters(config) and config.generation.engine == "vllm" and config.model.dtype == "float32":
        raise ConfigError(
            'model.dtype = "float32", and vLLM computes adapters in bfloat16 only where generators have GPUs; set '
            'model.dtype = "bfloat16"'
        )
    _check_placement(config, gpus)
    guesses = config.generation.speculative
    if guesses.method == "suffix" and config.generation.engine == "vllm" and find_spec("arctic_inference") is None:
        raise ConfigError(
            f'generation.speculative.method = "suffix" needs {SUFFIX_PACKAGE}, which is not installed; run: '
            f'pip install {SUFFIX_PACKAGE}, or set it to "ngram"'
        )


def describe_transport(config: RunConfig) -> str:
    """Describe a run's transport, and the reason if it was chosen automatically.

    Example: `statedict.transport is shared_memory: trainer and generators are on one host, not all on GPUs`
    """
    name, why = _chosen_transport(config)
    return f"statedict.transport is {name}{why}"


def describe_implementation(config: RunConfig) -> str:
    """Describe the implementation of a run's policy, and the reason for it.

    Example: `model.implementation is transformers: torchtitan's models here have no model_type 'qwen2', only ...`

    Raises:
        ModelError: The model cannot be trained.
    """
    hf = read_json(Path(config.model.path), "config.json")
    chosen = choose_implementation(
        hf,
        config.model.implementation,
        tensor_parallel=config.training.tensor_parallel,
        expert_parallel=config.training.expert_parallel,
        context_parallel=config.training.context_parallel,
        has_adapter=config.training.adapter.is_on,
    )
    untried = chosen.name == "transformers" and hf.get("model_type") not in PROVED
    advice = (
        f"; no test covers this family, check it with titan-rl doctor --model {config.model.path}" if untried else ""
    )
    divided = ""
    if (ranks := config.training.expert_parallel) > 1:
        count = next(hf[name] for name in EXPERT_COUNTS if hf.get(name))
        divided = f"; each rank holds {count // ranks} of {count} experts (training.expert_parallel = {ranks})"
    return f"model.implementation is {chosen.name}: {chosen.reason}{divided}{advice}"


def check_policy(config: RunConfig) -> str | None:
    """Build the policy without memory, as the trainer does, and compare its tensors with those of the folder. A dense
    model whose tensors are confirmed by formulas is not built, and nothing is checked if torchtitan is not installed.

    Returns:
        A note that names tensors of the folder that are not trained; None if there are none.

    Raises:
        ModelError: The model that config.json describes cannot be built, or the weights in the folder do not fit it.
        ConfigError: An adapter does not fit the model.
    """
    model, adapter = config.model, config.training.adapter
    if find_spec("torchtitan") is None or (not adapter.is_on and is_known_to_fit(model)):
        return None
    from titan_rl.training.models.hf_model import HFModel
    from titan_rl.training.parallel import World

    try:
        built = HFModel(
            Path(model.path),
            World(),
            max_context=model.max_context,
            adapter=adapter if adapter.is_on else None,
            implementation=model.implementation,
        )
    except TitanRLError:
        raise
    except Exception as error:  # the code of a family may raise anything for fields that it does not expect
        raise ModelError(f"the model in {model.path} cannot be built from config.json: {in_one_line(error)}") from error
    if not (names := built.untrained_names):
        return None
    named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{model.path} has tensors that are not trained, and exports keep them as they are: {named}"


def check_finite(folders: Iterable[Path]) -> None:
    """Check the weights of model folders for values that are not finite.

    Raises:
        ModelError: A folder has such a value, or a file cannot be read.
    """
    for folder in folders:
        with WAITING.shown(f"reading the weights in {folder}"):
            check_finite_folder(folder)


def describe_chat(config: RunConfig) -> list[str]:
    """Describe, in lines, the renderer of a run and the reason for it, its turns, tool calls and stop tokens. There are
    no lines if the package that reads the tokenizer is not installed.

    Raises:
        ModelError: The chat template cannot be extended turn by turn, but a rollout may have several turns.
        ConfigError: The renderer does not exist, or it refuses the tokenizer.
    """
    try:
        tokenizer = load_tokenizer(config.model.path)
    except MissingExtraError:
        return []
    single_turn = is_single_turn(config)
    if config.model.renderer == "auto":
        chosen = choose_renderer(tokenizer, single_turn=single_turn)
    else:
        chosen = ChosenRenderer(make_renderer(config.model, single_turn=single_turn), "model.renderer names it")
    return [*chat_support(tokenizer, chosen).lines()]


def warn_of_experimental(config: RunConfig) -> str | None:
    """Line that names the experimental settings of a run, including the transport that is chosen on this machine; None
    if there are none."""
    name, _ = _chosen_transport(config)
    return experimental_warning(config, name)


def _chosen_transport(config: RunConfig) -> tuple[str, str]:
    if config.statedict.transport != "auto":
        return config.statedict.transport, ", as set"
    gpus_of = {"here": () if config.hosts.elsewhere else visible_gpus()}
    trainer = () if config.hosts.elsewhere else place_trainer(config.training, ["here"], gpus_of)
    generators = place_generators(config.generation, ["here"], gpus_of, trainer)
    name, why = choose_transport(config, trainer, generators, least_gpu_bytes)
    return name, f": {why}"


def _has_adapters(config: RunConfig) -> bool:
    return config.training.adapter.is_on or bool(config.adapters)


def _check_without_gpus(config: RunConfig) -> None:
    if config.scheduling.on_batch_ready == "sleep" and config.generation.engine == "vllm":
        raise ConfigError(
            'scheduling.on_batch_ready = "sleep", and this machine has no GPU: vLLM cannot sleep on CPUs; set it to '
            '"continue", "keep" or "abort"'
        )
    transport = config.statedict.transport
    if find_transport(transport).needs_gpus:
        raise ConfigError(f"statedict.transport = {transport!r}, and this machine has no GPU; set it to 'auto'")


def _check_placement(config: RunConfig, gpus: tuple[str, ...]) -> None:
    """Check that the ranks of trainer and generators can be placed.

    Args:
        gpus: GPUs of each host; empty if the hosts have none, or if they are unknown.
    """
    hosts = (
        [f"host {number + 1}" for number in range(config.hosts.train)] if config.hosts.elsewhere else ["this machine"]
    )
    of_hosts = dict.fromkeys(hosts, gpus)
    place_trainer(config.training, hosts, of_hosts)
    place_generators(config.generation, hosts[:1], of_hosts)


def _gpus_of_a_pod(config: RunConfig) -> tuple[str, ...]:
    """GPUs of a Kubernetes pod, if the settings give their number; otherwise empty."""
    wanted = config.hosts.kubernetes.resources.get("nvidia.com/gpu", "")
    return tuple(map(str, range(int(wanted)))) if config.hosts.provider == "kubernetes" and wanted.isdigit() else ()
