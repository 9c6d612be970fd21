"""Results of an evaluation: figures of each task, computed from the lines of `rollouts.jsonl`, and the file of the
results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.clusters import repeated_prompts
from titan_rl.core.errors import DataError
from titan_rl.core.files import replace_file
from titan_rl.evaluation.statistics import Clusters, Estimate, Rewards, averages_at_k, clustered_mean, passes_at_k
from titan_rl.rollout.types import RolloutStatus

RESULTS = "results.json"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of a policy, by task.

    Attributes:
        policy: Name of the policy, such as "step 80 of runs/latest".
        version: Number of steps for which a run has trained the policy; 0 for a model or an endpoint.
        tasks: Results by the task's name.
        is_complete: Whether the evaluation was completed. If it was stopped, `tasks` has the results until then.
        folder: Folder with the transcripts; None if none were kept.

    Example:

        before, after = evaluate(config, "base"), evaluate(config, "runs/latest")
        print(after.reward, table([before, after]))
    """

    policy: str
    version: int
    tasks: Mapping[str, TaskResult]
    seconds: float
    is_complete: bool = True
    folder: Path | None = None

    @property
    def task(self) -> TaskResult:
        """Results of the only task.

        Raises:
            ValueError: There is not exactly one task.
        """
        if len(self.tasks) != 1:
            raise ValueError(f"there are {len(self.tasks)} tasks: {', '.join(self.tasks)}; name one: .tasks[name]")
        return next(iter(self.tasks.values()))

    @property
    def reward(self) -> float | None:
        """Mean reward of the only task; None if no sample has a reward."""
        return None if self.task.reward is None else self.task.reward.mean

    def write(self) -> None:
        """Replace `results.json` in the folder atomically."""
        if self.folder is not None:
            write_json(self.folder / RESULTS, self.to_json())

    def to_json(self) -> dict[str, object]:
        return {
            "policy": self.policy,
            "version": self.version,
            "is_complete": self.is_complete,
            "seconds": self.seconds,
            "folder": None if self.folder is None else str(self.folder),
            "tasks": {name: result.to_json() for name, result in self.tasks.items()},
        }


def write_json(path: Path, content: object) -> None:
    """Replace a file of results atomically."""
    replace_file(path, [(json.dumps(content, indent=2) + "\n").encode()])


def read_evaluation(path: str | Path) -> Evaluation:
    """Read the results of an evaluation.

    Args:
        path: Folder of an evaluation, or its `results.json`. It may also be the folder that was given as `out`, which
            has a folder for each policy, if there is only one.

    Raises:
        DataError: The path has no evaluation, several evaluations, or results that cannot be read.
    """
    several = evaluation_folders(path)
    if len(several) > 1:
        raise DataError(f"{path} has {len(several)} evaluations, name one: {', '.join(map(str, several))}")
    file = several[0] / RESULTS if several[0].is_dir() else several[0]
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        tasks = {name: TaskResult.from_json(result) for name, result in content["tasks"].items()}
        return Evaluation(
            content["policy"],
            content["version"],
            tasks,
            content["seconds"],
            content["is_complete"],
            file.absolute().parent,
        )
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; name the folder of an evaluation, which has a {RESULTS}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is not an evaluation's {RESULTS}: {error!r}") from error


def evaluation_folders(path: str | Path) -> list[Path]:
    """List the folders of the evaluations in a folder, sorted by name. If it has none, return the given path."""
    within = [] if (Path(path) / RESULTS).exists() else sorted(Path(path).glob(f"*/{RESULTS}"))
    return [results.parent for results in within] or [Path(path)]


Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Results of a policy on the held-out prompts of one task.

    Attributes:
        success: Least reward of a sample that counts as right.
        rewards: Rewards of samples by prompt and, if there are several seats, by seat. A sample has no reward, and is
            in no mean, if an environment or an endpoint failed, the answer could not be parsed, or the rubric failed.
        clusters: Identity of each prompt, equal for prompts that are the same.
        reward: Mean of `rewards`, with its standard error clustered by distinct prompt.
        avg_at: Mean of `averages_at_k` over prompts and seats, with its clustered standard error, by k.
        pass_at: Mean of `passes_at_k` over prompts and seats, with its clustered standard error, by k.
        statuses: Number of samples by `RolloutStatus`, including those without a reward.
        num_unscored: Number of samples without a reward.
        num_faults: Number of samples that were lost to faults of an environment, an endpoint or a reward. No mean
            includes them.
        num_unparsed: Number of samples without a reward whose answer could not be parsed, which is the policy's own
            fault.
        breakdown: Unweighted mean of each reward of the rubric.
        best_breakdown: Rewards of the rubric for the sample with the greatest reward.
        turns, completion_tokens: Mean numbers of turns and completion tokens of a sample, the latter if it is known.
        errors: Errors to which samples were lost, each with the number of samples, the most frequent first.
        measures: Measures that the task computes from all groups together, if the evaluation was not interrupted.
    """

    samples_per_prompt: int
    success: float
    rewards: dict[str, list[float]]
    reward: Estimate | None
    avg_at: dict[int, Estimate]
    pass_at: dict[int, Estimate]
    statuses: dict[str, int]
    num_unscored: int
    num_unparsed: int
    breakdown: dict[str, float]
    turns: float
    completion_tokens: float | None
    errors: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    measures: dict[str, float] = field(default_factory=dict[str, float])
    best_breakdown: dict[str, float] = field(default_factory=dict[str, float])
    num_faults: int = 0
    clusters: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def unreached_success(self) -> str | None:
        """Warning that no sample has reached `success`, so that pass@k is 0 regardless of the policy; None if a
        sample has."""
        best = max((reward for group in self.rewards.values() for reward in group), default=None)
        if best is None or best >= self.success:
            return None
        parts = ", ".join(f"{name} {value:g}" for name, value in self.best_breakdown.items())
        made_of = f" ({parts})" if len(self.best_breakdown) > 1 else ""
        return (
            f"no sample reached success = {self.success:g}, so pass@k is 0; the greatest reward is "
            f"{best:.4g}{made_of}. If a right answer is worth less, give its worth: --success {best:.4g}"
        )

    @property
    def of_prompts(self) -> dict[str, list[float]]:
        """Rewards by prompt, with those of all seats of a prompt joined, because they are from the same games."""
        return by_prompt(self.rewards)

    @property
    def seats(self) -> list[str]:
        """Names of the seats that the policy has played; empty if the environment has no seats."""
        return sorted({key.split(":", 2)[2] for key in self.rewards if key.count(":") >= 2})

    @property
    def num_distinct(self) -> int:
        """Number of distinct prompts."""
        return len({self.clusters.get(key, key) for key in self.of_prompts})

    @property
    def repeated_prompts(self) -> str | None:
        """Warning that few prompts are distinct, so that the standard errors are rough; None if enough are."""
        return repeated_prompts(self.num_prompts, self.num_distinct)

    @property
    def num_samples(self) -> int:
        return sum(self.statuses.values())

    @property
    def num_prompts(self) -> int:
        return len(self.of_prompts)

    def to_json(self) -> dict[str, Any]:
        """Content of `results.json` for the task."""
        names = ("num_prompts", "num_distinct", "num_samples", "unreached_success", "repeated_prompts")
        return asdict(self) | {name: getattr(self, name) for name in names}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TaskResult:
        values = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields}
        rewards = fields["rewards"]
        values.setdefault("clusters", {key: key.partition(":")[2] or key for key in by_prompt(rewards)})
        values |= _estimates(rewards, values["clusters"], fields["samples_per_prompt"], fields["success"])
        values["errors"] = [(text, count) for text, count in fields["errors"]]
        return cls(**values)


def prompt_key(record: Record) -> str:
    """Key of a sample's prompt: its place among the held-out prompts, its digest and, if there are seats, the sample's
    seat."""
    seat = record.get("seat")
    return f"{record['prompt']}:{record['prompt_digest']}" + ("" if seat is None else f":{seat}")


def by_prompt(rewards: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Join rewards by `prompt_key` to rewards by prompt, without seats."""
    joined: dict[str, list[float]] = {}
    for key, group in rewards.items():
        joined.setdefault(":".join(key.split(":", 2)[:2]), []).extend(group)
    return joined


def task_result(
    records: Iterable[Record],
    *,
    samples_per_prompt: int,
    success: float,
    measures: Mapping[str, float] | None = None,
) -> TaskResult:
    """Compute the results of a task.

    Args:
        records: Transcripts of samples, each with "prompt" and "prompt_digest".
    """
    records = list(records)
    rewards: dict[str, list[float]] = {}
    for record in sorted(records, key=lambda record: (record["prompt"], record["sibling"])):
        rewards.setdefault(prompt_key(record), []).extend([] if _reward(record) is None else [record["reward"]])
    counted = [record for record in records if not is_fault(record) and record["status"] != RolloutStatus.ABORTED]
    tokens = [count for record in counted if (count := _tokens(record)) is not None]
    keys = {prompt_key({**record, "seat": None}): record for record in records}
    clusters = {key: record.get("prompt_id", record["prompt_digest"]) or key for key, record in keys.items()}
    scored = [record for record in records if _reward(record) is not None]
    best = max(scored, key=lambda record: record["reward"], default=None)
    return TaskResult(
        samples_per_prompt=samples_per_prompt,
        success=success,
        rewards=rewards,
        clusters=clusters,
        **_estimates(rewards, clusters, samples_per_prompt, success),
        statuses=_statuses(records),
        num_unscored=sum(_reward(record) is None for record in records),
        num_unparsed=sum(_is_unparsed(record) for record in records),
        breakdown=_breakdown(records),
        turns=fmean(len(record["turns"]) for record in counted) if counted else 0.0,
        completion_tokens=fmean(tokens) if tokens else None,
        errors=Counter(_error(record) for record in records if is_fault(record)).most_common(8),
        measures=dict(measures or {}),
        best_breakdown={} if best is None else _values(best),
        num_faults=sum(map(is_fault, records)),
    )


def is_fault(record: Record) -> bool:
    """Return whether a sample was lost to a fault, so that it says nothing about the policy and should be repeated."""
    return RolloutStatus(record["status"]).is_fault or record.get("reward_failed") is not None


def _reward(record: Record) -> float | None:
    return None if is_fault(record) else record["reward"]


def _is_unparsed(record: Record) -> bool:
    return record["status"] == RolloutStatus.ERROR_PARSE and not is_fault(record) and record["reward"] is None


def _estimates(rewards: Rewards, clusters: Clusters, samples_per_prompt: int, success: float) -> dict[str, Any]:
    """Compute the means of a `TaskResult`."""
    averages = {samples_per_prompt: averages_at_k(rewards, samples_per_prompt)}
    passes = {k: passes_at_k(rewards, k, success) for k in _powers_of_two(samples_per_prompt)}
    return {
        "reward": clustered_mean(by_prompt(rewards), clusters),
        "avg_at": _clustered(averages, clusters),
        "pass_at": _clustered(passes, clusters),
    }


def _clustered(values: Mapping[int, Rewards], clusters: Clusters) -> dict[int, Estimate]:
    """Clustered means by k, for each k for which some prompt has enough samples."""
    estimates = {k: clustered_mean(by_prompt(of_groups), clusters) for k, of_groups in values.items()}
    return {k: estimate for k, estimate in estimates.items() if estimate is not None}


def _powers_of_two(most: int) -> list[int]:
    """List 1, 2, 4 and so on up to `most`, and `most` itself."""
    return sorted({most, *(2**power for power in range(most.bit_length()) if 2**power <= most)})


def _statuses(records: Sequence[Record]) -> dict[str, int]:
    counts = Counter(str(record["status"]) for record in records)
    return {str(status): counts[status] for status in RolloutStatus if counts[status]}


def _breakdown(records: Sequence[Record]) -> dict[str, float]:
    parts: dict[str, list[float]] = {}
    for record in records:
        for name, value in _values(record).items() if _reward(record) is not None else ():
            parts.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in sorted(parts.items())}


def _values(record: Record) -> dict[str, float]:
    """Values by the names of rewards, without those that are null because JSON cannot represent them."""
    return {name: value for name, value in record["reward_breakdown"].items() if value is not None}


def _tokens(record: Record) -> float | None:
    """Number of completion tokens: the number that an endpoint has reported, if it has, otherwise the number of known
    tokens; None if unknown."""
    num_tokens = record["metrics"].get("completion_tokens")
    return num_tokens if num_tokens is not None else record["num_completion_tokens"] or None


def _error(record: Record) -> str:
    if record.get("reward_failed") is not None:
        return f"a reward that failed: {_first_line(record['reward_failed'])}"
    location = f" ({record['error_at']})" if record.get("error_at") else ""
    return f"{record['status']}: {_first_line(record['error'] or 'no reason is known')}{location}"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
