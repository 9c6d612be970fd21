"""Between chat messages and tokens.

A `Renderer` turns messages into a prompt, a completion into a message, and, most of all, extends a conversation
by appending tokens to it. Nothing that was sampled is ever rendered or tokenized again.

`renderers.create_renderer(tokenizer)` of the `renderers` package can be used as it is. `ChatTemplateRenderer` is for
everything else that has a Hugging Face tokenizer with a chat template.
"""

from titan_rl.rollout.renderer.chat_template import ChatTemplateRenderer
from titan_rl.rollout.renderer.types import ParsedResponse, ParsedToolCall, RenderedTokens, Renderer

__all__ = ["ChatTemplateRenderer", "ParsedResponse", "ParsedToolCall", "RenderedTokens", "Renderer"]
