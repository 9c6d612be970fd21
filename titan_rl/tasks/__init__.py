"""Base classes for short tasks of your own: one prompt and one answer, rows of a file, tools from plain functions."""

from titan_rl.rollout.policy_text import PolicyText, answer_of, text_of, thought_of
from titan_rl.tasks.judge import Judge
from titan_rl.tasks.message_task import MessageTask, PromptTask, answer_rubric
from titan_rl.tasks.reward_model import LocalClassifier, RewardModel, ServedClassifier
from titan_rl.tasks.row_files import Row, read_rows
from titan_rl.tasks.rows import Rows
from titan_rl.tasks.tools import ArgumentsError, Tool, ToolEnv, call_of, tools_of

__all__ = [
    "ArgumentsError",
    "Judge",
    "LocalClassifier",
    "MessageTask",
    "PolicyText",
    "PromptTask",
    "RewardModel",
    "Row",
    "Rows",
    "ServedClassifier",
    "Tool",
    "ToolEnv",
    "answer_of",
    "answer_rubric",
    "call_of",
    "read_rows",
    "text_of",
    "thought_of",
    "tools_of",
]
