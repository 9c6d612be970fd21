"""Base classes for short tasks of your own: one prompt and one answer, rows of a file, tools from plain functions."""

from titan_rl.rollout.policy_text import PolicyText as PolicyText
from titan_rl.rollout.policy_text import answer_of as answer_of
from titan_rl.rollout.policy_text import text_of as text_of
from titan_rl.rollout.policy_text import thought_of as thought_of
from titan_rl.tasks.judge import Judge as Judge
from titan_rl.tasks.message_task import MessageTask as MessageTask
from titan_rl.tasks.message_task import PromptTask as PromptTask
from titan_rl.tasks.message_task import answer_rubric as answer_rubric
from titan_rl.tasks.reward_model import LocalClassifier as LocalClassifier
from titan_rl.tasks.reward_model import RewardModel as RewardModel
from titan_rl.tasks.reward_model import ServedClassifier as ServedClassifier
from titan_rl.tasks.row_files import Row as Row
from titan_rl.tasks.row_files import read_rows as read_rows
from titan_rl.tasks.rows import Rows as Rows
from titan_rl.tasks.tools import ArgumentsError as ArgumentsError
from titan_rl.tasks.tools import Tool as Tool
from titan_rl.tasks.tools import ToolEnv as ToolEnv
from titan_rl.tasks.tools import call_of as call_of
from titan_rl.tasks.tools import tools_of as tools_of
