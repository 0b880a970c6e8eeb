"""Settings of all tests."""

from hypothesis import settings

# A slow machine is no fault of the code.
settings.register_profile("default", deadline=None)
settings.load_profile("default")
