"""Reinforcement learning of language models on a mesh of actors.

Everything exported here is light: importing `titan_rl` needs neither torch, vLLM, torchtitan nor Monarch.
"""

from titan_rl.environment.message_token_env import MessageTokenEnv
from titan_rl.environment.types import (
    MessageEnv,
    MessageObservation,
    MessageStep,
    TokenEnv,
    TokenObservation,
    TokenStep,
)
from titan_rl.generation.resume import resume_on_abort
from titan_rl.rollout.rollouter import Rollouter
from titan_rl.rollout.types import Message, Rollout, RolloutGroup, RolloutStatus, Turn
from titan_rl.routing.router import GeneratorRouter
from titan_rl.rubric import GroupReward, Reward, Rubric
from titan_rl.training.sample import TrainingSample
from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams, VersionSpan

__all__ = [
    "Completion",
    "FinishReason",
    "GenerateFn",
    "GeneratorRouter",
    "GroupReward",
    "Message",
    "MessageEnv",
    "MessageObservation",
    "MessageStep",
    "MessageTokenEnv",
    "Reward",
    "Rollout",
    "RolloutGroup",
    "RolloutStatus",
    "Rollouter",
    "Rubric",
    "SamplingParams",
    "TokenEnv",
    "TokenObservation",
    "TokenStep",
    "TrainingSample",
    "Turn",
    "VersionSpan",
    "resume_on_abort",
]
