"""Start the page: `python app.py`, then open http://127.0.0.1:7860."""

import os
import signal
import sys
import time

# Before torch is loaded: threads that wait give their core to the page and to other programs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from gpt2demo.config import InputError, Settings, on_zero_gpu

if on_zero_gpu():
    try:
        import spaces  # before torch, which it changes
    except ImportError:
        spaces = None
else:
    spaces = None

from gpt2demo.board import Board
from gpt2demo.board_file import board_folder
from gpt2demo.hub import Hub
from gpt2demo.lender import Lender
from gpt2demo.ui.page import build_demo, launch_options
from gpt2demo.ui.uploads import upload_folder


def lender(settings: Settings) -> Lender | None:
    """The GPU of a ZeroGPU Space; None everywhere else."""
    if spaces is None:
        if on_zero_gpu():
            print("gpt2demo: no GPU: the package spaces is not installed", file=sys.stderr)
        return None
    from gpt2demo.zero import ZeroGPU  # where processes can fork

    return ZeroGPU(spaces.GPU, max_seconds=settings.max_seconds)


def main() -> None:
    """Serve until SIGINT or SIGTERM, then write the run that goes on and end the process."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        settings = Settings.from_env()
        board = Board(board_folder(), limit=settings.max_board)
        hub = Hub(settings, board=board, lender=lender(settings))
    except InputError as exc:
        print(f"gpt2demo: {exc}", file=sys.stderr)
        sys.exit(2)
    if board.note:
        print(f"gpt2demo: {board.note}", file=sys.stderr)
    with upload_folder():
        try:
            build_demo(hub).launch(prevent_thread_lock=True, **launch_options(hub))
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            for signum in (signal.SIGINT, signal.SIGTERM):  # the run is being written
                signal.signal(signum, signal.SIG_IGN)
    hub.close()
    board.close()
    os._exit(0)  # a step may take longer than anybody waits


if __name__ == "__main__":
    main()
