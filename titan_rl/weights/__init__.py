"""State-dict sync: transports that carry weights from the trainer to the generators, and verification by the
readers."""
