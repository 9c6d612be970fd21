"""Every metric that titan_rl writes: what it means, and what to do where it is not as it should be."""
