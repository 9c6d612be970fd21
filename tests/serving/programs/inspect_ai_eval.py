"""Evaluation with `inspect-ai`, over chat completions and over responses."""

import json
import os
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def look():
    async def execute(at: str) -> str:
        """Look at something.

        Args:
            at: what.
        """
        return f"a {at} sky"

    return execute


def main() -> None:
    scores = {}
    for responses_api in (False, True):
        model = get_model(
            "openai/policy", base_url=os.environ["OPENAI_BASE_URL"], api_key="none", responses_api=responses_api
        )
        tasks = {
            "plain": Task(dataset=[Sample(input="sky", target="blue")], solver=generate(), scorer=includes()),
            "tools": Task(
                dataset=[Sample(input="look", target="sky")], solver=[use_tools(look()), generate()], scorer=includes()
            ),
        }
        for name, task in tasks.items():
            (log,) = eval(task, model=model, display="none", log_dir=sys.argv[1])
            found = log.results.scores[0].metrics["accuracy"].value if log.results else str(log.error)
            scores[f"{name} {'responses' if responses_api else 'chat'}"] = found
    print(json.dumps(scores))


main()
