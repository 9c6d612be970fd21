"""From a sample to a scored group of rollouts. Of generation it knows one thing: `GenerateFn`."""
