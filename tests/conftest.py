"""Settings of all tests."""

from hypothesis import settings

# An example takes as long as the machine is busy.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
