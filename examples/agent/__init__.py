"""An agent written with openai-agents learns to use its tools. It knows nothing of titan_rl."""
