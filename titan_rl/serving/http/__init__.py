"""HTTP layer shared by all protocols: checks of requests, limits, answers and streams, errors."""
