"""What all tests share: hypothesis without chance, without a clock and without files of its own."""

from hypothesis import settings

settings.register_profile(
    "default", derandomize=True, deadline=None, max_examples=25, database=None
)
settings.load_profile("default")
