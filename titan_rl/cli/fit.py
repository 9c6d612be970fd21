"""`titan-rl fit CONFIG.toml ... --gpus N --memory GIB`: the memory of each GPU, and settings that would make it fit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING

from titan_rl.cli.options import Parser
from titan_rl.core.errors import ConfigError, MissingExtraError
from titan_rl.run.terminal.standard_streams import print_result, print_stderr
from titan_rl.run.terminal.waiting import WAITING

if TYPE_CHECKING:
    from titan_rl.run.checks.gpu_memory import Fit, GPUMemory, Saving

GIB = 2**30


def set_up(parser: Parser) -> None:
    parser.add_run_config()
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.gpus < 1:
        raise ConfigError(f"--gpus {arguments.gpus}: a run on GPUs needs at least one; give 1 or more")
    if not 0 < arguments.memory < 2**20:
        raise ConfigError(f"--memory {arguments.memory:g}: give the memory of a GPU in GiB, such as 80")
    if find_spec("torchtitan") is None:
        raise MissingExtraError("torchtitan", "cpu")
    with nullcontext() if arguments.json else WAITING.shown("computing the memory"):
        from titan_rl.config.load import read_config
        from titan_rl.run.checks.gpu_memory import plan_memory, savings, smallest_change

        config, _ = read_config(arguments.config, arguments.overrides)
        fit = plan_memory(config, arguments.gpus, int(arguments.memory * GIB))
    if not arguments.json:
        print_result("\n".join(_lines(fit)) + "\n")
        print_stderr(f"titan-rl: {_verdict(fit)}")
    searching = nullcontext() if arguments.json else WAITING.shown("trying settings that save memory")
    with searching:
        saving = [] if fit.fits else savings(config, fit)
        change, changed = ([], fit) if fit.fits else smallest_change(config, fit)
    if arguments.json:
        print_result(json.dumps(_as_json(fit, saving, change, changed)) + "\n")
    else:
        for line in _advice(fit, saving, change, changed):
            print_result(line + "\n")
    return 0 if fit.fits else 1


def _verdict(fit: Fit) -> str:
    from titan_rl.run.checks.gpu_memory import TRAINER_ERROR

    fullest = fit.fullest
    usage = f"{fullest.total / GIB:.1f} GiB of {fit.limit / GIB:.1f} on {_name(fullest)}"
    if fit.fits:
        return f"fits: {usage}"
    if fit.may_fit:
        usage += f", and up to {TRAINER_ERROR:.0%} more for the trainer, whose memory is computed"
    return f"{'may not fit' if fit.may_fit else 'does not fit'}: {usage}; trying settings that save memory"


def _lines(fit: Fit) -> Iterator[str]:
    """Table of all GPUs, in GiB."""
    yield f"{fit.parameters / 1e9:.2f}B parameters; computed, in GiB"
    for gpu in fit.gpus:
        yield f"\n{_name(gpu)}"
        for owner, parts in (("trainer", gpu.trainer), ("engine", gpu.engines)):
            for part, size in parts.items():
                room = f" of {gpu.contexts} full contexts" if part == "KV cache" else ""
                yield f"  {owner:9}{part + room:30}{size / GIB:8.2f}"
        together = "the larger of trainer and engine" if gpu.lends else "total"
        yield f"  {'':9}{together:30}{gpu.total / GIB:8.2f}"
    if fit.host:
        yield "\nhost memory, of all ranks"
        for part, size in fit.host.items():
            yield f"  {'':9}{part:30}{size / GIB:8.2f}"


def _advice(fit: Fit, saving: list[Saving], change: list[Saving], changed: Fit) -> Iterator[str]:
    if fit.fits:
        return
    if saving:
        yield f"\neach of these settings saves memory on {_name(fit.fullest)}"
    else:
        yield f"\nno single setting saves memory on {_name(fit.fullest)}"
    for each in saving:
        enough = ", which is enough" if each.fits else ""
        yield f"  {each!s:48}{each.bytes / GIB:8.2f}{enough}"
    settings = ", ".join(map(str, change))
    if changed.fits:
        yield f"it fits with {settings}: {changed.fullest.total / GIB:.1f} GiB"
    else:
        least = f"{changed.fullest.total / GIB:.1f} GiB of {fit.limit / GIB:.1f}"
        yield (
            f"no settings make it fit: with {settings} it still needs {least} on a GPU; use more or larger GPUs"
            if settings
            else "no settings make it fit; use more or larger GPUs"
        )


def _name(gpu: GPUMemory) -> str:
    first, last = gpu.gpus[0], gpu.gpus[-1]
    if len(gpu.gpus) == 1:
        return f"GPU {first}"
    if last - first == len(gpu.gpus) - 1:
        return f"each of GPUs {first} to {last}"
    return f"each of GPUs {', '.join(map(str, gpu.gpus))}"


def _as_json(fit: Fit, saving: list[Saving], change: list[Saving], changed: Fit) -> dict[str, object]:
    return {
        "parameters": fit.parameters,
        "limit": fit.limit,
        "fits": fit.fits,
        "may_fit": fit.may_fit,
        "gpus": [
            {"gpus": each.gpus, "trainer": each.trainer, "engines": each.engines, "total": each.total}
            | {"at_most": each.at_most, "contexts": each.contexts}
            for each in fit.gpus
        ],
        "host": fit.host,
        "savings": [{"setting": str(each), "bytes": each.bytes, "fits": each.fits} for each in saving],
        "change": [str(each) for each in change],
        "fits_with_change": changed.fits,
    }
