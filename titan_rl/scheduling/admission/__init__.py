"""What bounds how many groups and rollouts are admitted, and how many may be lost."""
