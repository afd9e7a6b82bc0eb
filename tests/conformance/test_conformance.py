"""The conformance kit on our engines: see nnterp.core.testing.conformance for the tests."""

from nnterp.core.testing.conformance import *  # noqa: F403
