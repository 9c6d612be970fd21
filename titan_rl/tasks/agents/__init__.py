"""Training agents that are programs of their own: `AgentTask` plays each rollout with one."""

from titan_rl.tasks.agents.task import AgentTask

__all__ = ["AgentTask"]
