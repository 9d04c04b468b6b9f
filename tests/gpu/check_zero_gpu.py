"""ZeroGPU's own package in place of its stand-in: `python -m tests.gpu.check_zero_gpu`.

It needs torch's CUDA build and `pip install spaces`, and no GPU: tests/test_zero.py is run with the
real package, which asks a device API on this machine for its leases.

Exit status: pytest's; 2 something that it needs is missing.
"""

import importlib.util
import os
import subprocess
import sys

import torch


def main() -> int:
    """Run the tests; the exit status."""
    if torch.version.cuda is None or importlib.util.find_spec("spaces") is None:
        print("This needs torch's CUDA build and the package spaces.", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_zero.py"]
    return subprocess.run(
        command, env=os.environ | {"GPT2DEMO_ZERO_GPU": "real"}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
