"""Rock, paper, scissors against frozen versions of the policy."""
