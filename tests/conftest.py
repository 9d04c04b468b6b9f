"""What holds for all tests, set before torch is loaded."""

import gc
import os

# threads that wait give their core away, as in app.py
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import settings

settings.register_profile("gpt2demo", deadline=None)  # a busy machine is no fault of the code's
settings.load_profile("gpt2demo")


def pytest_collection_finish() -> None:
    """Leave all that the test modules have imported out of later collections.

    Every run collects garbage at its end, which among half a million objects takes as long as a
    small run itself.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium for the tests of one file."""
    from browser import chromium  # with gradio, which most files do without

    with chromium() as found:
        yield found
