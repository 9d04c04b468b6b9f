"""The scenes behind the real package `spaces`: only its first touch of the GPU is left out."""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.remove(str(HERE))  # where the stand-in lies

import spaces.zero.torch  # noqa: E402

for name in ("init", "move"):  # would look for a GPU
    setattr(spaces.zero.torch, name, lambda *_, **__: None)
runpy.run_path(str(HERE / "scenes.py"), run_name="__main__")
