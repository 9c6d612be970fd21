"""Reinforcement learning of language models on a mesh of actors.

`train` runs a config, and `evaluate` evaluates a policy. The other names are the parts of a custom loop. Everything
exported here is light: importing `titan_rl` needs neither torch, vLLM, torchtitan nor Monarch. The classes that need
them are in their own modules: `titan_rl.training.trainer.TrainerCore` and
`titan_rl.generation.vllm_engine.VLLMEngine`.
"""

from __future__ import annotations

from importlib import import_module

from titan_rl.core.errors import (
    ActorDiedError,
    AdaptersFailedError,
    BusyError,
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    DataError,
    EngineDeadError,
    EngineStalledError,
    EpisodeEndedError,
    GenerationError,
    MissingExtraError,
    ModelError,
    NoHostError,
    NoReplicaError,
    NoSpaceError,
    PromptTooLongError,
    ProviderError,
    RequestError,
    RewardError,
    StateDictError,
    StrayCancellationError,
    TitanRLError,
    TrainingError,
    UnavailableWeightsError,
    UnsupportedSamplingError,
    UntrainableError,
    VerificationError,
)

TYPE_CHECKING = False  # not imported from `typing`, which would take most of the time of importing this package
if TYPE_CHECKING:
    from typing import Any

    from titan_rl.api import evaluate, evaluate_async, train
    from titan_rl.config.load import load_config
    from titan_rl.config.run import RunConfig
    from titan_rl.core.calls.watchdog import LoopWatchdog
    from titan_rl.evaluation.results import Evaluation, read_evaluation
    from titan_rl.evaluation.table import table
    from titan_rl.generation.continuation import resume_on_abort
    from titan_rl.generation.engine import Engine, TokenDelta
    from titan_rl.generation.loop.engine_loop import EngineLoop, LocalReplica
    from titan_rl.generation.request import EngineRequest
    from titan_rl.generation.router import (
        GeneratorRouter,
        LeastLoaded,
        Limits,
        PauseMode,
        Replica,
        RoundRobin,
        StickySession,
    )
    from titan_rl.generation.scripted_engine import ScriptedEngine
    from titan_rl.rollout.environment.messages import MessageGame, MessageTokenEnv
    from titan_rl.rollout.environment.threaded import ThreadedEnv
    from titan_rl.rollout.environment.types import (
        MessageEnv,
        MessageObservation,
        MessagePlayer,
        MessageSeat,
        MessageStep,
        Player,
        SeatedEnv,
        SeatedMessageEnv,
        SeatOutError,
        TokenEnv,
        TokenObservation,
        TokenPlayer,
        TokenSeat,
        TokenStep,
    )
    from titan_rl.rollout.group.rollouter import Rollouter
    from titan_rl.rollout.policy_text import PolicyText, answer_of, text_of, thought_of
    from titan_rl.rollout.renderer import ChatTemplateRenderer, Renderer
    from titan_rl.rollout.rewards.reward import FailurePolicy, GroupReward, Reward, WeightedReward, env_reward
    from titan_rl.rollout.rewards.rubric import Rubric, TextRubric
    from titan_rl.rollout.settings import RolloutConfig
    from titan_rl.rollout.task import DemonstratingTask, Demonstration, Task
    from titan_rl.rollout.types import Message, Rollout, RolloutGroup, RolloutStatus, Turn
    from titan_rl.scheduling.backlog import Backlog
    from titan_rl.scheduling.batches import GroupBatch
    from titan_rl.scheduling.curriculum import Curriculum
    from titan_rl.scheduling.lease import Lease, RunGroup
    from titan_rl.scheduling.scheduler import GroupScheduler
    from titan_rl.scheduling.settings import SchedulingConfig
    from titan_rl.tasks import (
        ArgumentsError,
        MessageTask,
        PromptTask,
        Rows,
        Tool,
        ToolEnv,
        answer_rubric,
        call_of,
        read_rows,
        tools_of,
    )
    from titan_rl.tasks.players import SeatedTask
    from titan_rl.training.data.sample import TrainingSample
    from titan_rl.training.data.sample_builder import build_samples
    from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams, VersionSpan
    from titan_rl.weights.types import StateDictTransport

_NAMES = {
    "core.calls.watchdog": "LoopWatchdog",
    "config.load": "load_config",
    "config.run": "RunConfig",
    "evaluation.results": "Evaluation read_evaluation",
    "evaluation.table": "table",
    "generation.engine": "Engine TokenDelta",
    "generation.loop.engine_loop": "EngineLoop LocalReplica",
    "generation.request": "EngineRequest",
    "generation.continuation": "resume_on_abort",
    "generation.router": "GeneratorRouter LeastLoaded Limits PauseMode Replica RoundRobin StickySession",
    "generation.scripted_engine": "ScriptedEngine",
    "tasks.players": "SeatedTask",
    "rollout.environment.messages": "MessageGame MessageTokenEnv",
    "rollout.environment.threaded": "ThreadedEnv",
    "rollout.environment.types": "MessageEnv MessageObservation MessagePlayer MessageSeat MessageStep Player "
    "SeatOutError SeatedEnv SeatedMessageEnv TokenEnv TokenObservation TokenPlayer TokenSeat TokenStep",
    "rollout.group.rollouter": "Rollouter",
    "rollout.policy_text": "PolicyText answer_of text_of thought_of",
    "rollout.renderer": "ChatTemplateRenderer Renderer",
    "rollout.rewards.reward": "FailurePolicy GroupReward Reward WeightedReward env_reward",
    "rollout.rewards.rubric": "Rubric TextRubric",
    "rollout.settings": "RolloutConfig",
    "rollout.task": "DemonstratingTask Demonstration Task",
    "rollout.types": "Message Rollout RolloutGroup RolloutStatus Turn",
    "api": "evaluate evaluate_async train",
    "scheduling.backlog": "Backlog",
    "scheduling.batches": "GroupBatch",
    "scheduling.curriculum": "Curriculum",
    "scheduling.lease": "Lease RunGroup",
    "scheduling.scheduler": "GroupScheduler",
    "scheduling.settings": "SchedulingConfig",
    "tasks": "ArgumentsError MessageTask PromptTask Rows Tool ToolEnv answer_rubric call_of read_rows tools_of",
    "training.data.sample": "TrainingSample",
    "training.data.sample_builder": "build_samples",
    "types": "Completion FinishReason GenerateFn SamplingParams VersionSpan",
    "weights.types": "StateDictTransport",
}
"""Public names by the modules of `titan_rl` that define them. Each is imported on first access: every process and
command imports this package, and few need all of it."""

_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found


__all__ = [
    "ActorDiedError",
    "AdaptersFailedError",
    "ArgumentsError",
    "Backlog",
    "BusyError",
    "ChatTemplateRenderer",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Curriculum",
    "DamagedCheckpointError",
    "DataError",
    "DemonstratingTask",
    "Demonstration",
    "Engine",
    "EngineDeadError",
    "EngineLoop",
    "EngineRequest",
    "EngineStalledError",
    "EpisodeEndedError",
    "Evaluation",
    "FailurePolicy",
    "FinishReason",
    "GenerateFn",
    "GenerationError",
    "GeneratorRouter",
    "GroupBatch",
    "GroupReward",
    "GroupScheduler",
    "Lease",
    "LeastLoaded",
    "Limits",
    "LocalReplica",
    "LoopWatchdog",
    "Message",
    "MessageEnv",
    "MessageGame",
    "MessageObservation",
    "MessagePlayer",
    "MessageSeat",
    "MessageStep",
    "MessageTask",
    "MessageTokenEnv",
    "MissingExtraError",
    "ModelError",
    "NoHostError",
    "NoReplicaError",
    "NoSpaceError",
    "PauseMode",
    "Player",
    "PolicyText",
    "PromptTask",
    "PromptTooLongError",
    "ProviderError",
    "Renderer",
    "Replica",
    "RequestError",
    "Reward",
    "RewardError",
    "Rollout",
    "RolloutConfig",
    "RolloutGroup",
    "RolloutStatus",
    "Rollouter",
    "RoundRobin",
    "Rows",
    "Rubric",
    "RunConfig",
    "RunGroup",
    "SamplingParams",
    "SchedulingConfig",
    "ScriptedEngine",
    "SeatOutError",
    "SeatedEnv",
    "SeatedMessageEnv",
    "SeatedTask",
    "StateDictError",
    "StateDictTransport",
    "StickySession",
    "StrayCancellationError",
    "Task",
    "TextRubric",
    "ThreadedEnv",
    "TitanRLError",
    "TokenDelta",
    "TokenEnv",
    "TokenObservation",
    "TokenPlayer",
    "TokenSeat",
    "TokenStep",
    "Tool",
    "ToolEnv",
    "TrainingError",
    "TrainingSample",
    "Turn",
    "UnavailableWeightsError",
    "UnsupportedSamplingError",
    "UntrainableError",
    "VerificationError",
    "VersionSpan",
    "WeightedReward",
    "answer_of",
    "answer_rubric",
    "build_samples",
    "call_of",
    "env_reward",
    "evaluate",
    "evaluate_async",
    "load_config",
    "read_evaluation",
    "read_rows",
    "resume_on_abort",
    "table",
    "text_of",
    "thought_of",
    "tools_of",
    "train",
]
