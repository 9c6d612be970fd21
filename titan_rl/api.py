"""`titan_rl.train` and `titan_rl.evaluate`: runs and evaluations from Python, with every part replaceable.

Both block until they are done. In a notebook, the event loop that is already running waits meanwhile. To evaluate an
object that belongs to your own event loop, such as an engine loop that you started, call `await evaluate_async(...)`
there.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_rl.config.build import is_single_turn, make_renderer
from titan_rl.config.evaluation import EvalConfig, make_eval_config
from titan_rl.config.load import ConfigLike, TaskLike, given_config
from titan_rl.config.run import RunConfig
from titan_rl.core.errors import ConfigError
from titan_rl.evaluation.evaluate import EvaluationRun, check_out_folder, folder_name
from titan_rl.evaluation.policies.inference import OpenedPolicy, open_policy, refuse_tokens
from titan_rl.evaluation.results import Evaluation
from titan_rl.generation.function_replica import FunctionReplica, within_vocabulary
from titan_rl.generation.router.replica import Replica
from titan_rl.generation.router.strategies import Strategy
from titan_rl.metrics.sinks.types import MetricSink
from titan_rl.rollout.chat_env import ChatFn
from titan_rl.rollout.renderer import Renderer
from titan_rl.run.components import Components
from titan_rl.run.observability.progress import Progress
from titan_rl.run.observability.summary import RunSummary, show_summary
from titan_rl.run.process.signals import run_to_its_end
from titan_rl.run.session import SessionFiles
from titan_rl.run.terminal.standard_streams import StderrConsole
from titan_rl.scheduling.filters import GroupFilter
from titan_rl.training.trainer_protocol import Trainer
from titan_rl.types import GenerateFn
from titan_rl.weights.types import PublishedWeights

Function = Callable[..., Any] | str
"""A function of a module, or its name as in settings: "grpo", "my_losses:mine"."""


def train(
    config: ConfigLike,
    *,
    overrides: Mapping[str, object] | None = None,
    task: TaskLike | None = None,
    loss: Function | None = None,
    advantage: Function | None = None,
    optimizer: Function | None = None,
    engine: Function | None = None,
    transport: Function | None = None,
    renderer: Renderer | None = None,
    strategy: Strategy | None = None,
    filters: Sequence[GroupFilter] | None = None,
    trainer: Trainer | None = None,
    generate: GenerateFn | None = None,
    replicas: Sequence[Replica] | None = None,
    published: PublishedWeights | None = None,
    sinks: Mapping[str, MetricSink] | None = None,
    name: str | None = None,
    resume: str | Path | None = None,
) -> RunSummary:
    """Run a config to its end, as `titan-rl train` does. Each given argument replaces what the settings name.

    Example:

        summary = titan_rl.train("sums.toml", overrides={"training.steps": 20}, loss=my_losses.clipped)
        summary.reward_before, summary.reward_after, summary.rewards, summary.run_dir

    Args:
        config: TOML file, several TOML files, or a `RunConfig`.
        overrides: Settings by their dotted names, including those of tasks: "task.largest", "tasks.sums.weight".
        task: Task object, or several as `TaskSource`s with their shares.
        loss, advantage, optimizer, engine, transport: Function of a module, or its name as in settings.
        renderer: Renderer of the environments. They run in this process, so `rollout.num_workers` must be 0.
        strategy: Routing strategy, which chooses the replica of each request. It must not be shared between runs.
        filters: Group filters, which select the groups that are not trained on.
        trainer: Trainer to use instead of the trainer's processes. It is not closed.
        generate: Function to use instead of the generators. It does not load published weights.
        replicas: Replicas to use instead of the generators. They load the published weights themselves, and are closed
            at the end of the run.
        published: Receives the manifests of the versions that the trainer publishes, for `replicas`.
        sinks: Additional sinks for the metrics of every step, by the names that messages use.
        name: Name of the run's folder, appended to the start time.
        resume: Folder of an earlier run with this config, which is continued.

    With `[[adapters]]`, the summary contains a summary for each adapter: `summary.adapters["sort"].reward_after`. Such
    a run accepts no `renderer`, `strategy`, `filters`, `trainer`, `generate`, `replicas` or `sinks`.

    If `trainer` and either `generate` or `replicas` are given, nothing runs in other processes, and neither torch nor
    Monarch has to be installed.

    Raises:
        ConfigError: a setting is wrong, or the given parts do not fit together.
        KeyboardInterrupt: Ctrl-C stopped the run in order; its progress is saved.
        AdaptersFailedError: some of the `[[adapters]]` failed; its `finished` has the summaries of the others.
        TitanRLError: the run failed.
    """
    from titan_rl.run.train import run_training

    if generate is not None:
        if replicas is not None:
            raise ConfigError("give generate or replicas, not both")
        if not callable(generate):
            raise ConfigError(f"generate = {generate!r} must be an async function, a GenerateFn")
        replicas = []
    components = Components(
        trainer=trainer,
        replicas=replicas,
        published=published or PublishedWeights(),
        strategy=strategy,
        renderer=renderer,
        filters=filters,
        sinks=dict(sinks or {}),
    )
    functions = {
        "training.loss": loss,
        "training.advantage": advantage,
        "training.optimizer": optimizer,
        "generation.engine": engine,
        "statedict.transport": transport,
    }
    made = given_config(
        config, task=task, functions=functions, overrides=overrides, check_files=components.needs_processes
    )
    if generate is not None:
        components = replace(components, replicas=[FunctionReplica(within_vocabulary(generate, made.model.path))])
    folder = None if resume is None else Path(resume).resolve()
    end = run_training(made, folder, components=components, name=name, started_by="titan_rl.train(...)")
    if end.summary is None:
        raise KeyboardInterrupt(f"the run is stopped; titan_rl.train(config, resume={str(end.run_dir)!r}) continues it")
    show_summary(end.summary, sys.stderr)
    return end.summary


def evaluate(
    config: ConfigLike,
    policy: str | Path | GenerateFn | ChatFn,
    *,
    task: TaskLike | None = None,
    renderer: Renderer | None = None,
    overrides: Mapping[str, object] | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> Evaluation:
    """Evaluate a policy on the held-out prompts of a config's tasks, as `titan-rl eval` does.

    Example:

        before = titan_rl.evaluate("sums.toml", "base", num_prompts=64, samples=4)
        after = titan_rl.evaluate("sums.toml", "runs/latest", num_prompts=64, samples=4)
        print(titan_rl.table([before, after]))

    Args:
        config: TOML file, several TOML files, or a `RunConfig`.
        policy: Folder of a run, a checkpoint or a model, the URL of an endpoint, or a function. A function with a
            parameter `messages` is a `ChatFn`, any other a `GenerateFn`.
        task: Task that replaces those of the config.
        renderer: Renderer for a `GenerateFn`; by default that of the config's model.
        overrides: Settings by their dotted names, including those of tasks.
        out: Folder for transcripts and results, which must not be that of a run. An evaluation that was stopped
            continues in the same folder.
        options: Fields of `EvalConfig`: num_prompts, samples, temperature, max_tokens, top_p, tasks, success,
            in_flight, and for endpoints model, api, key_env, body.

    Raises:
        ConfigError: a setting or an option is wrong, or there is no such policy.
        TitanRLError: the evaluation failed.
    """
    return run_to_its_end(
        evaluate_async(config, policy, task=task, renderer=renderer, overrides=overrides, out=out, **options)
    )


async def evaluate_async(
    config: ConfigLike,
    policy: str | Path | GenerateFn | ChatFn,
    *,
    task: TaskLike | None = None,
    renderer: Renderer | None = None,
    overrides: Mapping[str, object] | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> Evaluation:
    """Evaluate a policy in the running event loop; see `evaluate`."""
    if not isinstance(policy, str | Path) and not callable(policy):
        raise ConfigError(
            f"policy = {policy!r} must be the folder of a run, a checkpoint or a model, the URL of an endpoint, or an "
            "async function: a GenerateFn, or a ChatFn"
        )
    if out is not None:
        check_out_folder(Path(out))
    settings = make_eval_config(options)
    made = given_config(config, task=task, functions={}, overrides=overrides, check_files=False)
    if not isinstance(policy, str | Path):
        opened = _of_function(policy, made, renderer)
        return await _evaluate(made, settings, opened, None if out is None else Path(out))
    async with contextlib.AsyncExitStack() as resources:
        logs = Path(out) / "logs" if out else Path(resources.enter_context(tempfile.TemporaryDirectory())) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        files = SessionFiles(f"eval-{time.time_ns():x}", logs.absolute())
        opened = await resources.enter_async_context(open_policy(str(policy), made, settings, files, StderrConsole()))
        return await _evaluate(made, settings, opened, Path(out) / folder_name(opened.name, set()) if out else None)


async def _evaluate(config: RunConfig, settings: EvalConfig, policy: OpenedPolicy, out: Path | None) -> Evaluation:
    with Progress(0, sys.stderr, unit="sample", vanish=True) as progress:
        return await EvaluationRun(config, settings, policy, out, progress).run()


def _of_function(policy: Any, config: RunConfig, renderer: Renderer | None) -> OpenedPolicy:
    name = getattr(policy, "__qualname__", type(policy).__name__)
    if "messages" in inspect.signature(policy).parameters:
        return OpenedPolicy(name, refuse_tokens, chat=policy)
    generate = within_vocabulary(policy, config.model.path)
    return OpenedPolicy(name, generate, renderer or make_renderer(config.model, single_turn=is_single_turn(config)))
