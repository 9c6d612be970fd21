"""From a request to a completion: engines, the loop that drives one, and the router over many."""
