"""Teachers: models that score the policy's own tokens, for on-policy distillation.

A teacher is a `GenerateFn` that returns the logprobs of a prompt (`SamplingParams.prompt_logprobs`): a server, or the
policy's own generators. It reads the policy's tokens as they are; nothing is tokenized again. The scores are logprobs
at temperature 1. They are stored in the turns of a rollout, so the journal records them.

In self-distillation the policy itself is the teacher, and reads another prompt, with the answer, feedback or a hint.
Only the tokens before the first completion differ:

    student   prompt              completion  observation  completion
    teacher   privileged prompt   completion  observation  completion
                                  scored                   scored

If the history of a rollout is edited, later turns are scored in the same way if their prompts begin with the first
prompt, and have no score otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from titan_rl.core.calls.cancellation import gather_or_cancel
from titan_rl.core.calls.retries import Backoff, Outage
from titan_rl.core.console import LOG, Console
from titan_rl.core.errors import GenerationError, RequestError, TrainingError
from titan_rl.core.tracing.spans import span
from titan_rl.rollout.shared_tokens import context_after
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus, Turn
from titan_rl.training.data.sample_builder import extending_runs
from titan_rl.types import GenerateFn, PromptScores, SamplingParams

OUTAGE_S = 1800.0
"""Longest outage of a teacher, in seconds. Groups wait in their slots meanwhile, so an outage delays the run but loses
nothing."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0

MOST_IN_FLIGHT = 64
"""Maximum number of simultaneous requests to one teacher."""

LEAST_MEDIAN = -100.0
"""Least plausible median of the logprobs of a text. A model that knows nothing has -log(vocabulary), about -12."""

MAX_ROUNDING = 0.1
"""Largest logprob that rounding explains: a probability is at most 1."""

PromptFn = Callable[[Rollout], Sequence[int]]
"""Function from a rollout to the tokens that the teacher reads instead of the rollout's first prompt."""


class Teacher:
    """Scores finished rollouts with a model.

    Args:
        name: Folder or URL of the model, for messages.
        generate: Function that returns the logprobs of prompts.
        max_context: Maximum number of tokens that the model reads. Later tokens get no score.
        top_k: Number of top tokens to request at each position.
        prompt: Function that replaces the first prompt of a rollout, for self-distillation.
        outage_s: Longest time that the teacher may keep failing, in seconds.
        console: Console for reports of outages and of rollouts that are too long for the teacher.
    """

    def __init__(
        self,
        name: str,
        generate: GenerateFn,
        *,
        max_context: int,
        top_k: int = 0,
        prompt: PromptFn | None = None,
        outage_s: float = OUTAGE_S,
        console: Console = LOG,
    ) -> None:
        self.name = name
        self._generate = generate
        self._max_context = max_context
        self._sampling = SamplingParams(max_tokens=1, prompt_logprobs=top_k)
        self._prompt = prompt
        self._outage_s = outage_s
        self._slots = asyncio.Semaphore(MOST_IN_FLIGHT)
        self._console = console
        self._outage = Outage(f"the teacher {name}", console)
        self._is_length_reported = False

    async def score(self, group: RolloutGroup) -> None:
        """Score, in place, the turns of a finished group that may be trained on. Turns that have scores keep them.

        Sets the rollouts' metrics `teacher_seconds` and `teacher_kl`.

        Raises:
            TrainingError: The teacher refuses a request, or has failed for `outage_s`.
        """
        if group.failure is not None or group.is_aborted:
            return
        pending: dict[tuple[int, ...], asyncio.Task[PromptScores]] = {}
        try:
            await gather_or_cancel(
                [self._score(rollout, pending) for rollout in group.rollouts if _is_trained(rollout)]
            )
        finally:
            for task in pending.values():
                task.cancel()

    async def _score(self, rollout: Rollout, pending: dict[tuple[int, ...], asyncio.Task[PromptScores]]) -> None:
        """Score the turns of one rollout, in place.

        Args:
            pending: Requests of the group by their tokens. Siblings with the same tokens share a request.
        """
        clock = asyncio.get_running_loop().time
        began, turns = clock(), list[Turn]()
        replaced = () if self._prompt is None else tuple(rollout.turns[0].prompt_token_ids)
        replacement = None if self._prompt is None else list(self._prompt(rollout))
        with span("teacher", "reward", lane="reward", fine=True, of=rollout.rollout_id):
            for number, run in enumerate(extending_runs(rollout)):
                request_id = f"{rollout.rollout_id}/teacher/{number}"
                if tuple(run[0].prompt_token_ids[: len(replaced)]) != replaced:
                    turns += run  # without scores: an edited history has no place for the privileged prompt
                else:
                    turns += await self._score_run(run, request_id, len(replaced), replacement, pending)
        rollout.turns[:] = turns
        rollout.metrics["teacher_seconds"] = clock() - began
        if (kl := sampled_kl(turns)) is not None:
            rollout.metrics["teacher_kl"] = kl

    async def _score_run(
        self,
        run: Sequence[Turn],
        request_id: str,
        num_replaced: int,
        replacement: Sequence[int] | None,
        pending: dict[tuple[int, ...], asyncio.Task[PromptScores]],
    ) -> list[Turn]:
        """Score turns that extend each other, with one request.

        Args:
            num_replaced: Number of the first tokens of the turns that `replacement` replaces for the teacher.
        """
        if all(turn.teacher is not None for turn in run):
            return list(run)
        prompt = [*(replacement or ()), *context_after(run[-1])[num_replaced:]]
        if replacement is not None and len(prompt) > self._max_context:
            self._report_length(run[0], len(replacement), len(prompt))
        prompt = prompt[: self._max_context - 1]
        if len(prompt) < 2:
            return list(run)
        if (task := pending.get(tuple(prompt))) is None:
            task = pending[tuple(prompt)] = asyncio.ensure_future(self._ask(prompt, request_id))
        scores, shift = await asyncio.shield(task), len(replacement or ()) - num_replaced
        scored: list[Turn] = []
        for turn in run:
            start = len(turn.prompt_token_ids) + shift
            stop = min(start + len(turn.completion.token_ids), len(prompt))
            has_scores = 1 <= start < stop
            scored.append(replace(turn, teacher=scores.between(start, stop)) if has_scores else turn)
        return scored

    def _report_length(self, first: Turn, num_teacher: int, num_tokens: int) -> None:
        """Report, only once, that the privileged prompt leaves too little room for the policy's tokens."""
        if self._is_length_reported:
            return
        self._is_length_reported = True
        self._console.warning(
            f"the teacher's prompt of {first.completion.request_id!r} has {num_teacher} tokens, and {num_tokens} with "
            f"the policy's; those after model.max_context = {self._max_context} have no score, and are not learned "
            "from. Return shorter teacher_messages, or raise model.max_context"
        )

    async def _ask(self, prompt: Sequence[int], request_id: str) -> PromptScores:
        """Request the scores of a prompt. A failing teacher is asked again after growing pauses."""
        backoff: Backoff | None = None
        attempt = 0
        while True:
            unique = request_id if not attempt else f"{request_id}-{attempt}"
            try:
                scores = await self._attempt(prompt, unique)
            except RequestError as refused:
                raise TrainingError(f"the teacher {self.name} refuses to score {request_id!r}: {refused}") from refused
            except GenerationError as failed:
                error = failed
            else:
                self._outage.answered()
                return scores
            self._outage.failed(error, self._outage_s)
            if backoff is None:  # starts at the first failure, because the request may have waited long for a slot
                backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, limit_s=self._outage_s)
            if backoff.is_over:
                raise TrainingError(f"the teacher {self.name} has failed for {self._outage_s:g} s: {error}") from error
            await backoff.pause()
            attempt += 1

    async def _attempt(self, prompt: Sequence[int], request_id: str) -> PromptScores:
        async with self._slots:
            try:
                async with asyncio.timeout(self._outage_s):
                    with self._outage.waiting(self._outage_s):
                        completion = await self._generate(prompt, request_id=request_id, sampling=self._sampling)
            except TimeoutError as error:
                raise GenerationError(f"no answer within {self._outage_s:g} s") from error
        if completion.prompt_scores is None:
            raise GenerationError("it returned no logprobs of the prompt")
        if (count := len(completion.prompt_scores.logprobs)) != len(prompt) - 1:
            raise TrainingError(
                f"the teacher {self.name} returned {count} logprobs for a prompt of {len(prompt)} tokens; it must "
                "return one for each token after the first"
            )
        if (problem := _implausible(completion.prompt_scores.logprobs)) is not None:
            raise TrainingError(
                f"the teacher {self.name} returned {problem} for {request_id!r}, which no language model computes; "
                "check its server and its weights"
            )
        return completion.prompt_scores


def _is_trained(rollout: Rollout) -> bool:
    return bool(rollout.turns) and rollout.advantage is not None and rollout.status is not RolloutStatus.ABORTED


def _implausible(logprobs: Sequence[float]) -> str | None:
    """Logprobs of a text that cannot be right, for a message; None if they may be. Single tokens may be improbable."""
    if not all(logprob <= MAX_ROUNDING for logprob in logprobs):
        return f"a logprob of {next(logprob for logprob in logprobs if not logprob <= MAX_ROUNDING)}"
    median = sorted(logprobs)[len(logprobs) // 2]
    return None if median >= LEAST_MEDIAN else f"logprobs with a median of {median:g}"


def sampled_kl(turns: Sequence[Turn]) -> float | None:
    """Mean of log pi - log pi_T over the scored tokens, in nats: an estimate of the reverse KL divergence per token.
    None without scored tokens."""
    differences = [
        own - taught
        for turn in turns
        if turn.teacher is not None
        for own, taught in zip(turn.completion.logprobs, turn.teacher.logprobs, strict=False)
    ]
    return sum(differences) / len(differences) if differences else None
