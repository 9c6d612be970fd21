"""Reinforcement learning of language models on a mesh of actors.

`train` runs a config, and `evaluate` says how good a policy is. The other names are what a loop of one's own is made
of. Everything exported here is light: importing `titan_rl` needs neither torch, vLLM, torchtitan nor Monarch. What
needs them is in modules of its own: `titan_rl.training.trainer.TrainerCore` and
`titan_rl.generation.vllm_engine.VLLMEngine`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from titan_rl.calls.watchdog import LoopWatchdog
from titan_rl.config.load import load_config
from titan_rl.config.run import RunConfig
from titan_rl.errors import (
    ActorDiedError,
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
    VerificationError,
)
from titan_rl.generation.engine import Engine, TokenDelta
from titan_rl.generation.loop.engine_loop import EngineLoop
from titan_rl.generation.loop.local_replica import LocalReplica
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.resume import resume_on_abort
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
from titan_rl.players.task import SeatedTask
from titan_rl.rollout.environment.message_game import MessageGame
from titan_rl.rollout.environment.message_token_env import MessageTokenEnv
from titan_rl.rollout.environment.seats import (
    MessagePlayer,
    MessageSeat,
    Player,
    SeatedEnv,
    SeatedMessageEnv,
    SeatOutError,
    TokenPlayer,
    TokenSeat,
)
from titan_rl.rollout.environment.threaded import ThreadedEnv
from titan_rl.rollout.environment.types import (
    MessageEnv,
    MessageObservation,
    MessageStep,
    TokenEnv,
    TokenObservation,
    TokenStep,
)
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.renderer import ChatTemplateRenderer, Renderer
from titan_rl.rollout.rewards.reward import GroupReward, Reward, WeightedReward, env_reward
from titan_rl.rollout.rewards.reward_calls import FailurePolicy
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.rollout.task import DemonstratingTask, Demonstration, Task
from titan_rl.rollout.types import Message, Rollout, RolloutGroup, RolloutStatus, Turn
from titan_rl.scheduling.backlog import Backlog
from titan_rl.scheduling.batches.batch import GroupBatch
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.mix.curriculum import Curriculum
from titan_rl.scheduling.run_group import RunGroup
from titan_rl.scheduling.scheduler import GroupScheduler
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.tasks import (
    ArgumentsError,
    MessageTask,
    PromptTask,
    Rows,
    Tool,
    ToolEnv,
    answer_of,
    answer_rubric,
    call_of,
    read_rows,
    tools_of,
)
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.sample_builder import build_samples
from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams, VersionSpan
from titan_rl.weights.types import StateDictTransport

if TYPE_CHECKING:
    from titan_rl.evaluation.evaluation import Evaluation, read_evaluation
    from titan_rl.evaluation.table import table
    from titan_rl.run.python import evaluate, evaluate_async, train

_WHEN_ASKED_FOR = {
    "Evaluation": "titan_rl.evaluation.evaluation",
    "evaluate": "titan_rl.run.python",
    "evaluate_async": "titan_rl.run.python",
    "read_evaluation": "titan_rl.evaluation.evaluation",
    "table": "titan_rl.evaluation.table",
    "train": "titan_rl.run.python",
}
"""Modules of names that are imported when they are first asked for: a program that runs nothing needs them not."""


def __getattr__(name: str) -> Any:
    if name in _WHEN_ASKED_FOR:
        return getattr(import_module(_WHEN_ASKED_FOR[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ActorDiedError",
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
    "NoReplicaError",
    "NoSpaceError",
    "PauseMode",
    "Player",
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
    "tools_of",
    "train",
]
