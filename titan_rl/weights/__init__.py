"""How a version of the weights travels from the trainer to the generators, and how a reader knows that it is right."""
