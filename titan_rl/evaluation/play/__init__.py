"""`titan-rl play`: a person is the policy, or watches one."""
