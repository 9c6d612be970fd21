"""Rollout of `verifiers` over several turns: with its evaluation client, which forwards messages, and with its training
client, which renders them to tokens."""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from openai import AsyncOpenAI
from renderers.configs import Qwen3RendererConfig

__all__ = ["Talker"]

SAID = ("sky", "count", "sky")


class Talker(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ) -> vf.ProgramResult:
        messages = [{"role": "system", "content": "be brief"}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for said in SAID:
                messages.append({"role": "user", "content": said})
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return vf.ProgramResult(0, "", "")


def trace_of(client) -> vf.Trace:
    config = vf.AgentConfig(
        model="policy",
        client=client,
        harness=vf.HarnessConfig(id="verifiers_rollout"),
        runtime=vf.SubprocessConfig(),
        sampling=vf.SamplingConfig(temperature=1.0, max_tokens=64),
    )

    async def play() -> vf.Trace:
        async with vf.Agent(config) as agent:
            return await agent.run(vf.Task(vf.TaskData(idx=0, prompt="begin")))

    return asyncio.run(play())


def main() -> None:
    url = os.environ["OPENAI_BASE_URL"]
    clients = {
        "eval": vf.EvalClientConfig(base_url=url, api_key_var="OPENAI_API_KEY"),
        "train": vf.TrainClientConfig(
            base_url=url,
            api_key_var="OPENAI_API_KEY",
            renderer=Qwen3RendererConfig(),
            renderer_model_name=sys.argv[1],
        ),
    }
    results = {}
    for name, client in clients.items():
        trace = trace_of(client)
        results[name] = {
            "errors": [str(error) for error in trace.errors],
            "said": [message.content for message in trace.assistant_messages],
            "sampled": sum(sum(node.mask) for node in trace.nodes),
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
