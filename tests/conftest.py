"""What holds for all tests, set before torch is loaded."""

import os

# threads that wait give their core away, as in app.py
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from hypothesis import settings

settings.register_profile("gpt2demo", deadline=None)  # a busy machine is no fault of the code's
settings.load_profile("gpt2demo")
