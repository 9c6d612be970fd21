"""The policy that is served: streams that no abort breaks off, completions of a request, the text of tokens."""
