"""How good a policy is: held-out prompts played, counted and compared."""
