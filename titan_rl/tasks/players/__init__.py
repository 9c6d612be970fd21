"""Players of the seats of an environment, from the settings of a task: the policy, scripts, endpoints, checkpoints."""

from titan_rl.tasks.players.task import SeatedTask

__all__ = ["SeatedTask"]
