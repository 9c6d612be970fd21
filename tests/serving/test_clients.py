"""Published agents, evaluators and trainers, each as a separate program against a real server.

Run with `make test-clients`. Packages that conflict with this stack are installed from the package index into a virtual
environment, which pytest's cache keeps.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from byte_model import qwen3, script
from clients import ANSWERS, TOKENIZER, chat_server
from own_venv import asked_for, python_with

from titan_rl.serving.server import serve

PROGRAMS = Path(__file__).parent / "programs"
START = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
CHATTING = script(TOKENIZER, ANSWERS.__getitem__)
RUN_S = 300

pytestmark = asked_for


async def run_program(*command: str, url: str) -> Any:
    """Run a program and parse its last line of output as JSON."""
    environment = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "ANTHROPIC_BASE_URL": url}
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **environment, "PYTHONPATH": ""},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(RUN_S):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, errors.decode()[-3000:]
    return json.loads(output.decode().strip().splitlines()[-1])


async def test_openai_agents_calls_tools(request: pytest.FixtureRequest) -> None:
    is_here = importlib.util.find_spec("agents") is not None
    python = sys.executable if is_here else python_with(request.config.cache, "openai-agents", "openai-agents==0.24.0")
    answers = {"look": 'I look.<tool_call>\n{"name": "look", "arguments": {"at": "clear"}}\n</tool_call>'}
    async with chat_server(qwen3(TOKENIZER), answers=answers, any_model=True) as stage, serve(stage.app) as url:
        result = await run_program(python, str(PROGRAMS / "openai_agents.py"), url=url)
        assert stage.app.exchanges.num_completions_running == 0
    assert "a clear sky" in result["whole"]
    assert result["stream"] == result["whole"]
    assert result["requests"] == 2
    assert result["turns"] == ["MessageOutputItem", "ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]
    assert "raw_response_event" in result["events"]


async def test_inspect_ai_evaluation(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    python = python_with(request.config.cache, "inspect-ai", "inspect-ai==0.3.285", "openai==3.54.0")
    answers = {
        "sky": "blue",
        "look": '<tool_call>\n{"name": "look", "arguments": {"at": "clear"}}\n</tool_call>',
    }
    async with chat_server(qwen3(TOKENIZER), answers=answers, any_model=True) as stage, serve(stage.app) as url:
        scores = await run_program(python, str(PROGRAMS / "inspect_ai_eval.py"), str(tmp_path), url=url)
    assert scores == {f"{task} {api}": 1.0 for task in ("plain", "tools") for api in ("chat", "responses")}


def chat_or_continue(context: Sequence[int]) -> int:
    """Script that chats, and continues the plain text "sky"."""
    if START in context:
        return CHATTING(context)
    said = TOKENIZER.decode(context).removeprefix("sky")
    return TOKENIZER.encode("blue! And more.", add_special_tokens=False)[len(said)]


async def test_lm_eval_evaluation(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    python = python_with(request.config.cache, "lm-eval", "lm-eval[api]==0.4.13")
    async with chat_server(engine={"script": chat_or_continue}, any_model=True) as stage, serve(stage.app) as url:
        scores = await run_program(python, str(PROGRAMS / "lm_eval_run.py"), str(tmp_path), url=url)
    assert scores == {"local-chat-completions": 1.0, "local-completions": 1.0}


async def test_verifiers_evaluation_and_training(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    python = python_with(request.config.cache, "verifiers", "verifiers==0.4.0")
    TOKENIZER.save_pretrained(tmp_path)
    async with chat_server(qwen3(TOKENIZER)) as stage, serve(stage.app) as url:
        result = await run_program(python, str(PROGRAMS / "verifiers_rollout.py"), str(tmp_path), url=url)
    said = ["blue", "1, 2, 3, stop, 4", "blue"]
    num_sampled = sum(len(TOKENIZER.encode(text, add_special_tokens=False)) + 1 for text in said)
    assert result["eval"] == {"errors": [], "said": said, "sampled": 0}
    assert result["train"] == {"errors": [], "said": said, "sampled": num_sampled}


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_stream() -> None:
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "sky"}], "stream": True})
    async with chat_server() as stage, serve(stage.app) as url:
        process = await asyncio.create_subprocess_exec(
            "curl", "-sN", f"{url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, _ = await process.communicate()
    lines = [line.removeprefix("data: ") for line in output.decode().splitlines() if line]
    assert lines.pop() == "[DONE]"
    pieces = [json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines]
    assert "".join(pieces) == "blue"
