"""Conversion between chat messages and tokens.

A `Renderer` turns messages into a prompt and a completion into a message, and extends a conversation by appending
tokens. Sampled tokens are never rendered or tokenized again.

A renderer of the `renderers` package, made by `renderers.create_renderer(tokenizer)`, can be used unchanged.
`ChatTemplateRenderer` supports all other Hugging Face tokenizers with a chat template.
"""

from titan_rl.rollout.renderer.chat_template import ChatTemplateRenderer
from titan_rl.rollout.renderer.types import ParsedResponse, ParsedToolCall, RenderedTokens, Renderer

__all__ = ["ChatTemplateRenderer", "ParsedResponse", "ParsedToolCall", "RenderedTokens", "Renderer"]
