"""What a policy acts in: environments of tokens, of chat messages, and of code that blocks."""
