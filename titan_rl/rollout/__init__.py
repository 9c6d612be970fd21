"""From a sample to a scored group of rollouts. `GenerateFn` is the only interface to generation."""
