"""`titan-rl play`: samples of a task, played by a person or by a watched policy."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from titan_rl.config.build import make_renderer, make_rollouter
from titan_rl.config.evaluation import EvalConfig
from titan_rl.config.model_folder import find_model_folder
from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.calls.watchdog import LoopWatchdog
from titan_rl.core.console import Console
from titan_rl.core.errors import ConfigError
from titan_rl.core.plain_data import printable
from titan_rl.evaluation.play.screen import Screen, ShownGame, ShownMessageEnv, ShownTokenEnv, WriteLine
from titan_rl.evaluation.policies.inference import OpenedPolicy, open_policy, refuse_tokens
from titan_rl.evaluation.suites import play_by_chat, sampling_of
from titan_rl.rollout.chat_env import ChatReply, NoTokens
from titan_rl.rollout.environment.types import AgentEnv, SeatedEnv
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.renderer import Renderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.rollout.task import RunContext, calling, held_out_samples, opened
from titan_rl.rollout.types import Message
from titan_rl.run.process.environment import process_scratch
from titan_rl.run.session import SessionFiles
from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams, VersionSpan

PATIENCE_S = 1e6
"""Time limit for a person, in seconds."""


@dataclass(frozen=True, slots=True)
class SampleSelection:
    """Selection of the samples to play.

    Args:
        task: Name of the task; None for the first one.
        first: Place of the first sample.
        count: Number of samples.
        held_out: Whether the samples are those of validation instead of training.
    """

    task: str | None = None
    first: int = 0
    count: int = 1
    held_out: bool = False


async def play(
    config: RunConfig,
    selection: SampleSelection,
    settings: EvalConfig,
    policy: str | None,
    *,
    write_line: WriteLine,
    console: Console,
    lines: TextIO,
    is_terminal: bool,
) -> None:
    """Play samples of a task.

    Args:
        policy: Policy to watch: a folder or a URL, as for `titan-rl eval`. None if a person plays.
        write_line: Function that shows text.
        console: Console for messages about the command.
        lines: Input of the person.
        is_terminal: Whether to show prompts for the input.

    Raises:
        ConfigError: The task, the sample or the policy does not exist.
    """
    source = _source(config, selection.task)
    async with contextlib.AsyncExitStack() as resources:
        if policy is None:
            game = _played_by_person(config, source, write_line, console, lines, is_terminal=is_terminal)
        else:
            logs = Path(resources.enter_context(tempfile.TemporaryDirectory(dir=process_scratch())))
            opening = open_policy(policy, config, settings, SessionFiles(logs.name, logs), console)
            game = _played_by_policy(config, source, write_line, await resources.enter_async_context(opening))
        resources.enter_context(LoopWatchdog(console))
        folder = resources.enter_context(tempfile.TemporaryDirectory(dir=process_scratch()))
        run = RunContext(config.model.path, game.renderer, config.model.max_context, Path(folder), console)
        await resources.enter_async_context(opened(source.task, run))
        resources.push_async_callback(game.rollouter.rubric.close)
        sampling = sampling_of(config, settings, source, game.renderer, config.sampling_of(source).temperature)
        for index in range(selection.first, selection.first + selection.count):
            write_line(f"--- {'held-out' if selection.held_out else 'training'} sample {index} of {source.name}")
            group = await game.rollouter.run_group(
                game.generate,
                _sample(config, source, index, held_out=selection.held_out),
                group_id=f"play-{index}",
                group_size=1,
                sampling=sampling,
            )
            game.screen.group(group)
            if game.player is not None and game.player.has_quit:
                return


@dataclass(frozen=True, slots=True)
class PlaySetup:
    """A task, its player, and the screen on which it is shown."""

    rollouter: Rollouter
    generate: GenerateFn
    renderer: Renderer
    screen: Screen
    player: Person | None = None


def _played_by_person(
    config: RunConfig,
    source: TaskSource,
    write_line: WriteLine,
    console: Console,
    lines: TextIO,
    *,
    is_terminal: bool,
) -> PlaySetup:
    """Have a person play a task: in tokens if the model's tokenizer is there, otherwise in messages."""
    has_model = find_model_folder(config.model.path, [Path()]) is not None
    tokenizer = load_tokenizer(config.model.path) if has_model else None
    renderer = make_renderer(config.model) if has_model else NoTokens()
    screen = Screen(write_line, None if tokenizer is None else tokenizer.decode)
    rollouter = make_rollouter(config, source, renderer)
    patience = {"rollout_timeout_s": PATIENCE_S, "generate_timeout_s": PATIENCE_S}
    rollouter.limits = rollouter.limits.model_copy(update=patience)
    console.message(HELP)
    player = Person(screen, lines, renderer, tokenizer, console, is_terminal=is_terminal)
    if has_model:
        _show(rollouter, screen, player)
        return PlaySetup(rollouter, player.generate, renderer, screen, player)
    console.message(f"model.path = {config.model.path!r} does not exist, so this is played in messages, without tokens")
    play_by_chat(rollouter, player.chat, lambda env: ShownMessageEnv(env, screen))
    return PlaySetup(rollouter, refuse_tokens, renderer, screen, player)


def _played_by_policy(config: RunConfig, source: TaskSource, write_line: WriteLine, policy: OpenedPolicy) -> PlaySetup:
    screen, renderer = Screen(write_line), policy.renderer or NoTokens()
    rollouter = make_rollouter(config, source, renderer)
    rollouter.finish_session = policy.finish_session
    if policy.chat is None:
        _show(rollouter, screen, None)
    else:
        play_by_chat(rollouter, policy.chat, lambda env: ShownMessageEnv(env, screen))
    return PlaySetup(rollouter, policy.generate, renderer, screen)


def _show(rollouter: Rollouter, screen: Screen, player: Person | None) -> None:
    """Make each environment of tokens, and each seat of a game, show its turns. Agents play by themselves, so a person
    is shown only their requests."""
    make_env = rollouter.make_env

    def make_shown_env(sample: Any) -> Any:
        env = make_env(sample)
        if isinstance(env, AgentEnv):
            return env
        if isinstance(env, SeatedEnv):
            return ShownGame(env, screen)
        shown = ShownTokenEnv(env, screen)
        if player is not None:
            player.tools = lambda: shown.tools
        return shown

    rollouter.make_env = make_shown_env


def _source(config: RunConfig, name: str | None) -> TaskSource:
    if name is None:
        return config.tasks[0]
    for source in config.tasks:
        if source.name == name:
            return source
    raise ConfigError(f"--task {name}: the config has {', '.join(source.name for source in config.tasks)}")


def _sample(config: RunConfig, source: TaskSource, index: int, *, held_out: bool) -> Any:
    if not held_out:
        with calling(f"train_sample({config.seed}, {index})"):
            return source.task.train_sample(config.seed, index)
    samples = held_out_samples(source.task, index + 1)
    if index >= len(samples):
        raise ConfigError(f"--sample {index}: {source.name} has {len(samples)} held-out samples")
    return samples[index]


HELP = '''what may be typed:
    a line is a reply; a line of """ begins one of several lines, and another ends it
    /call NAME {"argument": 1}   call a tool
    /tokens                      the tokens of the prompt, and of the last reply
    /help                        this
    /quit                        end; so does the end of the input'''

QUOTES = '"""'


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call that a person has typed."""

    name: str
    arguments: Any

    @property
    def message(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"type": "function", "id": "call_0", "function": function}


@dataclass(eq=False, slots=True)
class Person:
    """Person who types what a policy would generate.

    `generate` is a `GenerateFn`: the typed text is treated like a model's completion, that is, converted to tokens and
    parsed. Its logprobs are 0. `chat` is a `ChatFn`, for a task whose model does not exist yet.

    Args:
        tokenizer: Tokenizer of the model; None if the model does not exist, so that only messages can be typed.
        console: Console for messages about the input.
        is_terminal: Whether to show prompts for the input.

    Attributes:
        tools: Function that returns the tools of the environment that is being played.
        has_quit: Whether the person has quit. The rollout being played then ends as aborted.
    """

    screen: Screen
    lines: TextIO
    renderer: Renderer
    tokenizer: Any
    console: Console
    is_terminal: bool
    tools: Callable[[], Sequence[Mapping[str, object]] | None] = lambda: None
    has_quit: bool = False
    _last: Completion | None = None

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        by_text = self.screen.has_shown
        if not self.screen.has_shown:
            self.screen.prompt(prompt_token_ids)
        self.screen.has_shown = False
        tokens: list[int] | None = None
        while tokens is None:
            typed = await self._type("reply> " if by_text else "tokens> ", prompt_token_ids)
            if typed is None:
                return Completion(request_id, (), (), FinishReason.ABORT, ())
            if isinstance(typed, ToolCall):
                tokens = self._call(typed)
            else:
                tokens = self._text_tokens(typed) if by_text else self._typed_tokens(typed)
        cut = tokens[: sampling.max_tokens]
        if len(tokens) > len(cut):
            self.console.message(
                f"the reply has {len(tokens)} tokens, and sampling.max_tokens is {sampling.max_tokens}"
            )
        ended = FinishReason.STOP if len(cut) == len(tokens) else FinishReason.LENGTH
        self._last = Completion(request_id, cut, [0.0] * len(cut), ended, (VersionSpan(0, len(cut)),))
        return self._last

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> ChatReply:
        typed = await self._type("reply> ", None)
        if typed is None:
            return ChatReply({"role": "assistant", "content": ""}, FinishReason.ABORT)
        if isinstance(typed, ToolCall):
            return ChatReply({"role": "assistant", "content": "", "tool_calls": [typed.message]})
        return ChatReply({"role": "assistant", "content": typed})

    async def _type(self, question: str, prompt_token_ids: Sequence[int] | None) -> str | ToolCall | None:
        """Read input until it is a reply or a tool call, and carry out commands before it; None at the end."""
        while True:
            text = await self._read(question)
            command, _, rest = (text or "").partition(" ")
            if text is None or command == "/quit":
                self.has_quit = True
                return None
            if command == "/call":
                if (call := self._parsed_call(rest)) is not None:
                    return call
            elif command == "/help":
                self.console.message(HELP)
            elif command == "/tokens" and prompt_token_ids is not None:
                self.screen.tokens(prompt_token_ids, self._last)
            elif command == "/tokens":
                self.console.message("tokens need the model's tokenizer")
            elif command.startswith("/"):
                self.console.message(f"there is no command {command}; see /help")
            else:
                return text

    def _parsed_call(self, text: str) -> ToolCall | None:
        name, _, given = text.strip().partition(" ")
        try:
            arguments: Any = parse_json(given or "{}")
        except ValueError as error:
            self.console.message(f"{given!r} is not valid JSON: {error}")
            return None
        return ToolCall(name, arguments)

    def _text_tokens(self, text: str) -> list[int]:
        stop = self.renderer.get_stop_token_ids()[:1]
        return [*self.tokenizer.encode(text, add_special_tokens=False), *stop]

    def _typed_tokens(self, text: str) -> list[int] | None:
        try:
            return [int(piece) for piece in text.replace(",", " ").split()]
        except ValueError:
            self.console.message("type token ids, such as: 5 9 2")
            return None

    def _call(self, call: ToolCall) -> list[int] | None:
        """Tokens of a tool call as the renderer writes them for a model; None if it cannot."""
        tools, question = self.tools(), {"role": "user", "content": "1"}
        answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call.message]}
        offered = None if tools is None else list(tools)
        before = list(self.renderer.render_ids([question], tools=offered, add_generation_prompt=True))
        token_ids = list(self.renderer.render_ids([question, answer], tools=offered))
        stops = set(self.renderer.get_stop_token_ids())
        written = token_ids[len(before) :]
        end = next((index for index, token in enumerate(written) if token in stops), None)
        if token_ids[: len(before)] != before or end is None:
            self.console.message("this renderer does not render calls; type the call as the model would write it")
            return None
        return written[: end + 1]

    async def _read(self, prompt: str) -> str | None:
        """Read a reply or a command; None at the end of the input."""
        line = await self._line(prompt)
        if line is None or line.strip() != QUOTES:
            return line
        lines: list[str] = []
        while (line := await self._line("... ")) is not None and line.strip() != QUOTES:
            lines.append(line)
        if line is None:
            self.console.message(f"the input ends within {QUOTES}, so there is no reply")
            return None
        return "\n".join(lines)

    async def _line(self, prompt: str) -> str | None:
        if self.is_terminal:
            self.screen.write_line(prompt)
        line = await in_thread(self.lines.readline)
        return printable(line).rstrip("\r\n") if line else None
