"""Settings of all tests."""

import os

from hypothesis import settings

# A slow machine is no fault of the code. A commit must not pass on one day and fail on the next: examples are
# the same in every run, until somebody looks for new ones with HYPOTHESIS_PROFILE=random.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
