"""Agent written with `openai-agents` that calls a tool, once without and once with streaming."""

import asyncio
import json

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def look(at: str) -> str:
    """Look at something."""
    return f"a {at} sky"


async def main() -> None:
    set_tracing_disabled(True)
    agent = Agent(name="looker", instructions="Look, then say.", tools=[look], model="gpt-5")
    whole = await Runner.run(agent, "look")
    stream = Runner.run_streamed(agent, "look")
    kinds = [event.type async for event in stream.stream_events()]
    print(
        json.dumps(
            {
                "whole": whole.final_output,
                "stream": stream.final_output,
                "events": sorted(set(kinds)),
                "turns": [type(item).__name__ for item in whole.new_items],
                "requests": whole.context_wrapper.usage.requests,
            }
        )
    )


asyncio.run(main())
