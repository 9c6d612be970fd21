"""Reinforcement learning of language models on a mesh of actors.

`train` runs a config, and `evaluate` evaluates a policy. The other names are the parts of a custom loop. Everything
exported here is light: importing `titan_rl` needs neither torch, vLLM, torchtitan nor Monarch. The classes that need
them are in their own modules: `titan_rl.training.trainer.TrainerCore` and
`titan_rl.generation.vllm_engine.VLLMEngine`.
"""

from __future__ import annotations

from importlib import import_module

_NAMES = {
    "api": "evaluate evaluate_async train",
    "config.load": "load_config",
    "config.run": "RunConfig",
    "core.calls.watchdog": "LoopWatchdog",
    "core.errors": "ActorDiedError AdaptersFailedError BusyError CheckpointError ConfigError DamagedCheckpointError "
    "DataError EngineDeadError EngineStalledError EpisodeEndedError GenerationError MissingExtraError "
    "ModelError NoHostError NoReplicaError NoSpaceError PromptTooLongError ProviderError RequestError "
    "RewardError StateDictError StrayCancellationError TitanRLError TrainingError UnavailableWeightsError "
    "UnsupportedSamplingError UntrainableError VerificationError",
    "evaluation.results": "Evaluation read_evaluation",
    "evaluation.table": "table",
    "generation.continuation": "resume_on_abort",
    "generation.engine": "Engine TokenDelta",
    "generation.loop.engine_loop": "EngineLoop LocalReplica",
    "generation.request": "EngineRequest",
    "generation.router": "GeneratorRouter LeastLoaded Limits PauseMode Replica RoundRobin StickySession",
    "generation.scripted_engine": "ScriptedEngine",
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
    "scheduling.backlog": "Backlog",
    "scheduling.batches": "GroupBatch",
    "scheduling.curriculum": "Curriculum",
    "scheduling.lease": "Lease RunGroup",
    "scheduling.scheduler": "GroupScheduler",
    "scheduling.settings": "SchedulingConfig",
    "tasks": "ArgumentsError MessageTask PromptTask Rows Tool ToolEnv answer_rubric call_of read_rows tools_of",
    "tasks.players": "SeatedTask",
    "training.data.sample": "TrainingSample",
    "training.data.sample_builder": "build_samples",
    "types": "Completion FinishReason GenerateFn SamplingParams VersionSpan",
    "weights.types": "StateDictTransport",
}
"""Public names by the modules of `titan_rl` that define them. Each is imported on first access: every process and
command imports this package, and few need all of it. Type checkers read the stub file beside this file."""

_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = tuple(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found
