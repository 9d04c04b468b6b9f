"""What holds for all tests, set before torch is loaded."""

import gc
import os
import warnings

# threads that wait give their core away, as in app.py
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import settings

settings.register_profile("gpt2demo", deadline=None)  # a busy machine is no fault of the code's
settings.load_profile("gpt2demo")


@pytest.fixture(scope="module", autouse=True)
def _settled() -> None:
    """Leave all that lives before a file's tests out of the collections that its runs make.

    Every run collects garbage at its end, which among the half million objects that the tests
    import, and what earlier files have left, takes as long as a small run itself.
    """
    gc.unfreeze()
    with warnings.catch_warnings():  # of what another file has dropped
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium for the tests of one file."""
    from browser import chromium  # with gradio, which most files do without

    with chromium() as found:
        yield found
