"""Every error titan_rl raises on purpose. Each has one owner; user code raises plain exceptions.

TitanRLError
  ConfigError           the user's settings, found before any process starts
  MissingExtraError     an optional dependency is not installed
  ModelError            a model folder cannot be used
  DataError             a dataset or environment returned something unusable
  RewardError           a reward or advantage function failed or returned a non-finite value
  RequestError          one generation request can never succeed; it fails alone
    EpisodeEndedError   the request's episode is over
  BusyError             a limit on concurrent work is reached; a later attempt may succeed
  GenerationError       generation infrastructure failed; another replica may succeed
    EngineDeadError     the engine loop has ended; later calls fail at once
    EngineStalledError  nothing has come from the engine for too long
    NoReplicaError      no replica is serving
  StateDictError        weights could not be published or pulled
    UnavailableWeightsError  a version is not available, and nothing was changed
    VerificationError   pulled weights do not reproduce the trainer's logprobs
  TrainingError         the trainer cannot continue (failed step)
    UntrainableError    a batch cannot be trained on (non-finite loss); the weights are unchanged
    AdaptersFailedError  some adapters of a run have failed; the error has the results of the others
  CheckpointError       a checkpoint could not be written or read
    DamagedCheckpointError  a checkpoint's bytes differ from those that were written
    NoSpaceError        the disk is full
  ActorDiedError        an actor's process is gone or does not answer
  NoHostError           the run lacks a host without which it cannot continue
  ProviderError         a provider could not supply hosts
  StrayCancellationError  awaited code was cancelled, although no waiter requested it
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

TYPE_CHECKING = False  # importing `typing`, or what `install_command` needs, takes longer than this whole module
if TYPE_CHECKING:
    from typing import Any


class TitanRLError(Exception):
    """Base of every error titan_rl raises on purpose."""


class ConfigError(TitanRLError, ValueError):
    """A setting is wrong. The message names the field, the value and the fix."""


class MissingExtraError(TitanRLError, ImportError):
    """An optional dependency is not installed. The message names the extra that installs it."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"{module} is not installed; run: {install_command(extra)}", name=module)
        self.extra = extra


def in_one_line(error: Exception, most: int = 300) -> str:
    """Message of an error of another library, on one line and cut to at most `most` characters.

    A message that may be a mere name, such as that of a `KeyError`, is preceded by the type of the error.
    """
    message = " ".join(str(error).split())
    if not message or not isinstance(error, (ValueError, OSError)):
        message = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return message if len(message) <= most else f"{message[: most - 4]} ..."


def install_command(extra: str, options: str = "") -> str:
    """The shell command that adds an extra to this installation, from the source of the installation: a clone, a wheel,
    a repository, or a package index.

    Args:
        extra: Name of the extra, such as "cpu".
        options: Options of `pip install`, such as "--force-reinstall".
    """
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from shlex import quote
    from urllib.parse import unquote

    try:
        origin: dict[str, Any] = json.loads(distribution("titan-rl").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    url, folder = origin.get("url", ""), origin.get("dir_info")
    if folder is not None:
        path = quote(f"{unquote(url.removeprefix('file://'))}[{extra}]")
        what = f"-e {path}" if folder.get("editable") else path
    elif "vcs_info" in origin:
        what = quote(f"titan-rl[{extra}] @ {origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}")
    else:
        what = f"'titan-rl[{extra}]{f' @ {url}' if url else ''}'"
    return " ".join(["pip install", *options.split(), what])


class ModelError(TitanRLError):
    """A model folder lacks a file, or its config and weights do not fit together."""


class DataError(TitanRLError):
    """A dataset or environment returned something that cannot be used."""


class RewardError(TitanRLError):
    """A reward or advantage function raised, took too long, or returned something that is not a finite number.

    Args:
        text: Message: the function that failed, its input, and the failure.
        where: Line of the user's code, which is appended to the message.

    Attributes:
        ends_run: Whether the error ends the run. Otherwise only its group is lost.
    """

    ends_run = True

    def __init__(self, text: str, where: str | None = None) -> None:
        super().__init__(text if where is None else f"{text} ({where})")
        self.text = text
        self.where = where


class RequestError(TitanRLError, ValueError):
    """This generation request can never succeed: too long, bad parameters, duplicate id."""


class PromptTooLongError(RequestError):
    """The prompt of this request leaves no room for an answer in the context of the model that is asked."""


class UnsupportedSamplingError(RequestError):
    """The engine does not honour a field of the request's `SamplingParams`.

    Attributes:
        parameter: Name of the field.
    """

    def __init__(self, message: str, parameter: str) -> None:
        super().__init__(message, parameter)
        self.parameter = parameter

    def __str__(self) -> str:
        return str(self.args[0])


class EpisodeEndedError(RequestError):
    """The episode that a request belongs to is over. The message says how it ended."""


class BusyError(TitanRLError):
    """A limit on concurrent work is reached. The same call may succeed later; the message names the limit."""


class GenerationError(TitanRLError):
    """The generation infrastructure failed. The same request may succeed on another replica."""


class EngineDeadError(GenerationError):
    """The engine loop has ended, by `close` or by an engine failure, which is the cause."""


class EngineStalledError(GenerationError):
    """Nothing has come from an engine that has requests: it hangs, or cannot be reached."""


class NoReplicaError(GenerationError):
    """No generator replica serves within the time limit."""


class StateDictError(TitanRLError):
    """Weights could not be published, found or read. The old weights stay loaded."""


class UnavailableWeightsError(StateDictError):
    """A version is not available, or no longer. None of its weights were loaded, and the generators keep serving the
    version that they have."""


class VerificationError(StateDictError):
    """Pulled weights do not reproduce the logprobs that the trainer published with them."""


class TrainingError(TitanRLError):
    """The trainer cannot continue."""


NAMED_ROLLOUTS = 8
"""Rollouts that a message lists before it counts the others."""


class UntrainableError(TrainingError):
    """No optimizer step can be made of a minibatch: its loss or gradient is not finite, no token counts, or
    one of its samples does not fit the model. The weights are unchanged, and another batch may be trained.

    Args:
        reason: Reason why the minibatch cannot be trained.
        rollout_ids: Rollouts of the minibatch, on all ranks.
        at_fault: Rollouts that are known to cause the error; empty if they are not known.
    """

    def __init__(self, reason: str, rollout_ids: Sequence[str] = (), at_fault: Sequence[str] = ()) -> None:
        self.reason = reason
        self.rollout_ids = tuple(rollout_ids)
        self.at_fault = tuple(at_fault)
        super().__init__(f"{reason}; rollouts: {listed(at_fault or rollout_ids)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.rollout_ids, self.at_fault)


def listed(rollout_ids: Sequence[str]) -> str:
    """List rollouts for a message.

    Example: `listed(["train-4/0", ..., "train-5/7"])` is "train-4/0, ..., train-4/7 and 8 more".
    """
    more = f" and {len(rollout_ids) - NAMED_ROLLOUTS} more" if len(rollout_ids) > NAMED_ROLLOUTS else ""
    return ", ".join(rollout_ids[:NAMED_ROLLOUTS]) + more


class AdaptersFailedError(TrainingError):
    """Some adapters of a run have failed; the others have trained all their steps.

    Attributes:
        failed: Error of each adapter that has failed, by its name.
        finished: Summary of each of the others, a `RunSummary`, by its name.
    """

    def __init__(self, text: str, failed: Mapping[str, Exception], finished: Mapping[str, Any]) -> None:
        super().__init__(text)
        self.failed = failed
        self.finished = finished


class CheckpointError(TitanRLError):
    """A checkpoint could not be written or read. The previous one stays valid."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's bytes are not those that were written. The message names the file; an older one may be whole."""


class NoSpaceError(CheckpointError):
    """A checkpoint does not fit on the disk. The message names the folder, the space needed and the free space."""


def means_no_space(error: BaseException) -> bool:
    """Whether the error means that a disk is full, or that the user's quota is exhausted."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class ActorDiedError(TitanRLError):
    """An actor's process is gone, or did not answer within its time limit.

    Args:
        excused: Whether the host is gone or is being removed, so that the process itself is not to blame.
    """

    def __init__(self, text: str, *, excused: bool = False) -> None:
        super().__init__(text)
        self.excused = excused


class NoHostError(TitanRLError):
    """No host became available in time for a part that the run cannot continue without. The run can be resumed once
    there is one."""


class ProviderError(TitanRLError):
    """A provider could not start its workers, or refused a job. The message quotes the provider's output."""


class StrayCancellationError(TitanRLError):
    """Awaited code was cancelled, although the task that awaited it was not."""
