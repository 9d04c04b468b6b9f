"""Host memory between steps: keep glibc from handing large blocks back to the kernel.

Left alone, glibc maps every block of more than 32 MiB afresh and unmaps it when it is freed. A
training step on a CPU frees and asks again for the same gigabytes, so that about a third of its
time is the kernel clearing pages. Elsewhere than on Linux with glibc nothing here does anything.
"""

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from typing import Final

# the parameters' numbers in glibc's malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

# Where glibc's own adjusting ends once large blocks have been freed; a threshold that was set is
# adjusted no more, so these are what an ordinary process has after its first step.
_ORDINARY_MMAP: Final = 32 * 2**20
_ORDINARY_TRIM: Final = 2 * _ORDINARY_MMAP
_KEPT_BLOCK: Final = 2**30  # blocks up to here come from the heap and stay in the process
_NEVER: Final = -1


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt") else None


def share_main_arena() -> None:
    """Make threads that start from now on allocate from the main arena.

    Only the main arena can hold large blocks in the heap; a thread's own arena maps each of them,
    whatever the thresholds are. Call it before the server starts its threads.
    """
    if libc := _glibc():
        libc.mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Give freed blocks back to the kernel, those too that were freed after the scope below."""
    if libc := _glibc():
        libc.malloc_trim(0)


@contextlib.contextmanager
def keep_large_blocks() -> Iterator[None]:
    """Keep freed blocks in the process inside the scope; give them back to the kernel after it."""
    libc = _glibc()
    if libc is None:
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _ORDINARY_MMAP)
        libc.mallopt(_M_TRIM_THRESHOLD, _ORDINARY_TRIM)
        give_back()
