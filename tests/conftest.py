"""For all tests: how many examples hypothesis draws."""

from depth import examples
from hypothesis import settings

settings.register_profile("titan_rl", max_examples=examples(100), deadline=None)
settings.load_profile("titan_rl")
