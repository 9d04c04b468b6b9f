"""Set before torch is loaded: threads that wait give their core away, as in app.py."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
