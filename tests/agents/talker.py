"""Agent for tests: it plays some turns, begins a branch, and reports the reward that its sample names.

Uses the standard library only. It writes the tokens of its answers to `answers.json`, for the test to compare.
"""

import json
import os
import sys
import urllib.request


def post(url: str, body: object) -> bytes:
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return answer.read()


def ask(messages: list[dict[str, str]]) -> dict[str, object]:
    body = {"model": "gpt-4o", "messages": messages, "max_tokens": 8, "return_token_ids": True}
    answer = json.loads(post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body))
    ANSWERS.append(answer["choices"][0]["token_ids"])
    return answer["choices"][0]["message"]


ANSWERS: list[list[int]] = []
with open(os.environ["TITAN_RL_SAMPLE"]) as file:
    sample = json.load(file)
assert sys.argv[1] == sample["question"], sys.argv
messages = [{"role": "user", "content": sample["question"]}]
for _ in range(sample.get("turns", 2)):
    messages += [ask(messages), {"role": "user", "content": "more"}]
ask([*messages[:2], {"role": "user", "content": "or else?"}])
with open("answers.json", "w") as file:
    json.dump(ANSWERS, file)
if sample.get("crash"):
    sys.exit("out of luck")
if os.path.basename(os.getcwd()) in sample.get("silent", ()):
    sys.exit(0)
post(f"{os.environ['TITAN_RL_EPISODE_URL']}/reward", {"rewards": {"reward": sample.get("worth", 0.5)}})
