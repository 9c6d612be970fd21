"""`titan-rl play`: a person acts as the policy, or watches a policy."""
