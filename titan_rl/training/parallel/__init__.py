"""The ranks that train one policy together, and what each of them holds."""
