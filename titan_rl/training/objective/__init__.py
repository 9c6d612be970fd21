"""What a step minimizes, and what its tokens say about the policy."""
