"""Training of agents that are separate programs: `AgentTask` plays each rollout with such a program."""

from titan_rl.tasks.agents.task import AgentTask

__all__ = ["AgentTask"]
