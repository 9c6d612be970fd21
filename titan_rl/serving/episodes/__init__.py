"""What one agent does from its start to its end, as a rollout that can be trained on."""
