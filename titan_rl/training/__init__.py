"""Training: optimizer steps on scored groups, and the state that a checkpoint keeps."""
