"""Retired settings, with their last defaults and their replacements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_rl.core.files import as_table


@dataclass(frozen=True, slots=True)
class Retired:
    """Setting that is rejected with advice, unless its value is its last default."""

    default: Any
    advice: str


RESPAWNS = "set hosts.max_respawns, the limit of generators, trainer and rollout workers each"

OFFLOAD = 'set training.offload, a list of "optimizer", "parameters", "activations" and "reference"'

RETIRED: Mapping[str, Retired] = {
    "generation.max_respawns": Retired(3, RESPAWNS),
    "training.max_respawns": Retired(3, RESPAWNS),
    "rollout.max_respawns": Retired(3, RESPAWNS),
    "training.offload_optimizer": Retired(False, OFFLOAD),
    "training.offload_parameters": Retired(False, OFFLOAD),
    "training.offload_activations": Retired(False, OFFLOAD),
    "training.offload_reference": Retired(False, OFFLOAD),
    "generation.least_generators": Retired(1, "set generation.num_generators_range = [LEAST, MOST]"),
    "generation.most_generators": Retired(None, "set generation.num_generators_range = [LEAST, MOST]"),
    "generation.running_kv": Retired("keep", 'for "recompute" set generation.pull_mode = "recompute"'),
    "generation.reset_prefix_cache": Retired(True, 'for false set generation.prefix_cache = "keep"'),
    "generation.speculative.prompt_lookup_min": Retired(2, "set generation.speculative.prompt_lookup = [MIN, MAX]"),
    "generation.speculative.prompt_lookup_max": Retired(4, "set generation.speculative.prompt_lookup = [MIN, MAX]"),
    "hosts.kubernetes.folder": Retired("/workspace", 'set hosts.kubernetes.volume = "CLAIM:/FOLDER"'),
    "hosts.kubernetes.kubectl": Retired("kubectl", "set hosts.options, the options of kubectl"),
    "hosts.kubernetes.namespace": Retired("default", 'set hosts.options = ["--namespace=NAME"]'),
    "hosts.kubernetes.workers": Retired(1, "set hosts.count"),
    "hosts.slurm": Retired(
        {"nodes": 1, "options": [], "setup": [], "requeue": True, "grace_s": 120},
        'set hosts.count, hosts.setup and hosts.options = ["--time=LIMIT", "--no-requeue"]; a job ends in order for '
        "hosts.drain_s and a minute",
    ),
    "hosts.ssh": Retired(
        {"hosts": [], "options": [], "addresses": {}}, 'set hosts.names = ["HOST", "HOST=ADDRESS"] and hosts.options'
    ),
    "hosts.lease_s": Retired(15.0, "set hosts.silence_s: the lease is five times as long"),
    "logging.tensorboard": Retired({"flush_s": 10.0}, "leave it out: events are written every 10 s"),
    "logging.trace_mib": Retired(32, "leave it out: a process's trace has at most 32 MiB"),
    "rollout.judge_grace_s": Retired(10.0, "leave it out: rewards in progress have 10 s when generation is paused"),
    "routing.max_sessions": Retired(65536, "leave it out: the router remembers 262,144 sessions"),
    "scheduling.suspend_timeout_s": Retired(3600.0, "leave it out: it is an hour"),
    "scheduling.tail_age": Retired(1, "set scheduling.tail to the number of versions"),
    "sft.lr_decay": Retired("cosine", 'for "constant" set sft.min_lr_ratio = 1; otherwise it is a cosine'),
    "sft.warmup_ratio": Retired(0.05, "leave it out: the learning rate rises over 5% of the steps"),
    "statedict.fanout": Retired(1, "leave it out: each host sends a version to one other"),
    "training.clip_high": Retired(0.28, "set training.clip = [LOW, HIGH]"),
    "training.clip_low": Retired(0.2, "set training.clip = [LOW, HIGH]"),
    "training.eps": Retired(1e-8, "leave it out, or set training.optimizer to a function of yours, which chooses it"),
}
"""Retired settings by dotted name."""

FORMER_DEFAULTS: Mapping[str, Any] = {
    "logging.prometheus": {"host": "127.0.0.1", "port": 9464},
    "logging.trackio.project": "titan_rl",
    "logging.wandb.project": "titan_rl",
    "logging.wandb.tags": [],
}
"""Values in the config.toml of earlier runs that are equivalent to leaving the setting out."""


def advice(key: str) -> str | None:
    """Return the replacement of a retired setting, or None for any other key."""
    return RETIRED[key].advice if key in RETIRED else None


def drop_unchanged(tables: dict[str, Any]) -> None:
    """Remove retired settings that have their last default. The config.toml of every earlier run has such settings."""
    defaults = {name: retired.default for name, retired in RETIRED.items()}
    for name, default in {**defaults, **FORMER_DEFAULTS}.items():
        *path, key = name.split(".")
        table = tables
        for part in path:
            table = as_table(table.get(part))
        if key in table and table[key] == default:
            del table[key]
