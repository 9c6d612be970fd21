"""Agent written with openai-agents, independent of titan_rl, that learns to use its tools."""
