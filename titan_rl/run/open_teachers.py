"""Teachers of a run's tasks: the policy itself, servers, and folders that are served alongside the run."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import urldefrag

import httpx

from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.core.calls.parsing import server_root
from titan_rl.core.console import Console
from titan_rl.core.errors import ConfigError, GenerationError
from titan_rl.generation.continuation import Generation, Resume
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.renderer.text import prompt_ids
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.rollout.task import calling, wrong_result
from titan_rl.rollout.types import Rollout
from titan_rl.serving.client import HttpGenerateFn
from titan_rl.tasks.policy_servers import Served, new_log, serving
from titan_rl.training.teacher import OUTAGE_S, Teacher

SELF = "self"
"""Value of `training.teacher` for the policy itself."""

KEY = "TITAN_RL_TEACHER_KEY"
"""Environment variable with the key of a teacher's server."""

START_S = 600.0
"""Longest time until a teacher's server listens, in seconds."""

SCORE_S = 600.0
"""Longest time of one request for scores, in seconds."""

ASK_S = 60.0
"""Longest time until a teacher's server answers how it tokenizes a text, in seconds."""


def teachers_of(config: RunConfig) -> dict[str, str]:
    """Teachers by the names of their tasks."""
    return {source.name: name for source in config.tasks if (name := config.teacher_of(source))}


def is_url(name: str) -> bool:
    """Whether a teacher is a server."""
    return name.startswith(("http://", "https://"))


async def check_servers(config: RunConfig) -> None:
    """Check that the servers of a run's teachers answer, and tokenize as the policy's tokenizer does.

    Raises:
        ConfigError: A teacher has another tokenizer than the policy, or cannot be asked how it tokenizes.
        GenerationError: A server cannot be reached.
    """
    for name in dict.fromkeys(filter(is_url, teachers_of(config).values())):
        await check_tokens(name, *server_of(name), TokenCheck.of_policy(config.model.path))


@asynccontextmanager
async def open_teachers(
    config: RunConfig, folder: Path, router: GeneratorRouter, renderer: Renderer, console: Console
) -> AsyncGenerator[dict[str, Teacher]]:
    """Open the teachers, by the names of their tasks, for the block. A folder is served only once, even if it teaches
    several tasks. Servers have been checked with `check_servers`.

    Args:
        folder: Folder of the run.
        router: Router to the policy's generators, with which the policy teaches itself.

    Raises:
        ConfigError: The model of a folder has another tokenizer than the policy.
        GenerationError: A folder cannot be served.
    """
    named = teachers_of(config)
    async with AsyncExitStack() as resources:
        opened: dict[str, HttpGenerateFn] = {}
        for name in dict.fromkeys(named.values()):
            if name != SELF:
                opened[name] = await _open(name, config, folder, resources, console)
        yield {
            source.name: _teacher(config, source, named[source.name], opened, router, renderer, console)
            for source in config.tasks
            if source.name in named
        }


def _teacher(
    config: RunConfig,
    source: TaskSource,
    name: str,
    opened: Mapping[str, HttpGenerateFn],
    router: GeneratorRouter,
    renderer: Renderer,
    console: Console,
) -> Teacher:
    training = config.training
    top_k = 0 if training.distill == "sampled" else training.distill_top_k
    context = config.model.max_context
    if name != SELF:
        return Teacher(name, opened[name], max_context=context, top_k=top_k, console=console)
    generate = Generation(router.stream, resume=Resume(router.wait_resumed, OUTAGE_S))
    prompt = PrivilegedPrompt(source, renderer)
    name = f"of task {source.name!r}, the policy itself,"
    return Teacher(name, generate, max_context=context, top_k=top_k, prompt=prompt, console=console)


class PrivilegedPrompt:
    """Function that renders the messages that a task's teacher reads instead of a rollout's first prompt.

    Args:
        source: Task with `teacher_messages`.
    """

    def __init__(self, source: TaskSource, renderer: Renderer) -> None:
        self._name = source.name
        self._task: Any = source.task
        self._renderer = renderer

    def __call__(self, rollout: Rollout) -> Sequence[int]:
        """Render the teacher's prompt for a rollout.

        Raises:
            DataError: `teacher_messages` failed, or returned no messages.
        """
        with calling(f"teacher_messages of rollout {rollout.rollout_id!r}", self._name):
            messages: Any = self._task.teacher_messages(rollout)
            if not is_messages(messages):
                text = f"it returned {messages!r}; it must return a list of at least one message with a role"
                raise wrong_result(self._task, "teacher_messages", text)
            return prompt_ids(self._renderer, messages)


def is_messages(given: Any) -> bool:
    """Whether a value is a nonempty list of messages."""
    return (
        isinstance(given, list | tuple)
        and len(cast("Sequence[Any]", given)) > 0
        and all(isinstance(each, Mapping) and "role" in each for each in cast("Sequence[Any]", given))
    )


async def _open(
    name: str, config: RunConfig, folder: Path, resources: AsyncExitStack, console: Console
) -> HttpGenerateFn:
    if is_url(name):
        served, model = server_of(name)
    else:
        log, model = new_log(folder / "logs", f"teacher-{Path(name).name}-{os.getpid()}"), None
        console.message(f"the teacher {name} is being served; log: {log}")
        starting = serving(
            name,
            log,
            max_context=config.model.max_context,
            settings={"generation.num_generators": "1"},
            start_s=START_S,
            timeout_s=SCORE_S,
            run=folder,
            console=console,
        )
        served = await resources.enter_async_context(starting)
        await check_tokens(name, served, model, TokenCheck.of_policy(config.model.path))
    generate = HttpGenerateFn(served.url, model=model, api_key=served.api_key or None, timeout_s=SCORE_S)
    return await resources.enter_async_context(generate)


def server_of(name: str) -> tuple[Served, str | None]:
    """Parse the URL of a teacher: its server, and the name of its model there, if the URL has one.

    Example: `"http://127.0.0.1:8000#MODEL"`
    """
    url, model = urldefrag(name)
    return Served(url, os.environ.get(KEY, "")), model or None


PROBE = "The quick brown fox, 1234567890 + 0.5 = ?\n\tnaïve Größe 世界 \N{GRINNING FACE} def f(x): return x\n"
NUM_PIECES = 512


class TokenCheck:
    """Comparison of the tokenizers of teachers and of the policy, by a text with pieces from all over the policy's
    vocabulary.

    The policy's tokens are sent to a teacher unchanged, so with another tokenizer it would score other texts. Tokens
    are not aligned between tokenizers.
    """

    @classmethod
    def of_policy(cls, folder: str) -> TokenCheck:
        """Build the check with the tokenizer of the policy's folder.

        Raises:
            MissingExtraError: The package that reads tokenizers is not installed.
        """
        return cls(load_tokenizer(folder))

    def __init__(self, tokenizer: Any) -> None:
        ids = sorted(tokenizer.get_vocab().values())
        pieces = tokenizer.decode(ids[:: max(1, len(ids) // NUM_PIECES)], skip_special_tokens=True)
        self.text = f"{PROBE}{pieces}"
        self._own = list(tokenizer.encode(self.text, add_special_tokens=False))

    def compare_folder(self, name: str, folder: str) -> None:
        """Compare the tokenizer of a teacher's model folder with the policy's; see `compare`."""
        self.compare(name, load_tokenizer(folder).encode(self.text, add_special_tokens=False))

    def compare(self, name: str, tokens: Sequence[int]) -> None:
        """Compare a teacher's tokens of `text` with the policy's.

        Raises:
            ConfigError: The tokens differ. The message has the first difference.
        """
        own, tokens = self._own, list(tokens)
        if tokens == own:
            return
        at = next((i for i, (a, b) in enumerate(zip(own, tokens, strict=False)) if a != b), min(len(own), len(tokens)))
        raise ConfigError(
            f"the teacher {name} has another tokenizer than the policy: of the same text, token {at} is "
            f"{tokens[at : at + 1] or 'missing'} there and {own[at : at + 1] or 'missing'} here. A teacher scores the "
            "policy's own tokens, so both must tokenize a text in the same way; use a teacher of the same model family"
        )


async def check_tokens(
    name: str,
    served: Served,
    model: str | None,
    check: TokenCheck,
    *,
    limit_s: float = ASK_S,
    transport: httpx.AsyncBaseTransport | None = None,
) -> None:
    """Check that a teacher's server tokenizes a text as the policy's tokenizer does; see `TokenCheck`.

    Args:
        limit_s: Longest time until the server answers, in seconds.
        transport: Transport of httpx, for tests.

    Raises:
        ConfigError: The tokens differ, or the server does not answer how it tokenizes.
        GenerationError: The server cannot be reached.
    """
    endpoint = f"{server_root(served.url)}/tokenize"
    headers = {"authorization": f"Bearer {served.api_key}"} if served.api_key else {}
    body = {"prompt": check.text, "add_special_tokens": False, **({"model": model} if model else {})}
    try:
        async with httpx.AsyncClient(timeout=limit_s, transport=transport, trust_env=False) as client:
            answer = await client.post(endpoint, json=body, headers=headers)
        if answer.status_code != 200:
            raise ConfigError(
                f"the teacher {name} cannot be checked: {endpoint} answered {answer.status_code}: {answer.text[:200]}; "
                "a teacher's server has to tokenize, as titan-rl serve and vLLM do"
            )
        tokens = [int(token) for token in answer.json()["tokens"]]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise GenerationError(f"the teacher {name} cannot be reached at {endpoint}: {error!r}") from error
    except (LookupError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the teacher {name} cannot be checked: {endpoint} sent no list of tokens") from error
    check.compare(name, tokens)
