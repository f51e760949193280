"""For all tests: no deadlines, which only tell how busy the machine is."""

from hypothesis import settings

settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")
