"""Engine loop: one thread drives one engine, which any number of asyncio callers share."""
