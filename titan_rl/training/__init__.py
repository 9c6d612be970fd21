"""From scored groups to an optimizer step, and to the state that a checkpoint keeps."""
