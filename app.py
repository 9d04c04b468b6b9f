"""Start the page: `python app.py`, then open http://127.0.0.1:7860."""

import os
import signal
import sys

# Before torch is loaded: threads that wait give their core to the page and to other programs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from gpt2demo.board import Board, board_folder
from gpt2demo.config import InputError, Settings
from gpt2demo.hub import Hub
from gpt2demo.ui.page import build_demo, launch_options


def main() -> None:
    """Serve until SIGINT or SIGTERM, then end the run and the process."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        settings = Settings.from_env()
        board = Board(board_folder(), limit=settings.max_board)
        hub = Hub(settings, board=board)
    except InputError as exc:
        print(f"gpt2demo: {exc}", file=sys.stderr)
        sys.exit(2)
    if board.note:
        print(f"gpt2demo: {board.note}", file=sys.stderr)
    build_demo(hub).launch(**launch_options(hub))
    hub.close()
    board.close()
    os._exit(0)  # a step may take longer than anybody waits


if __name__ == "__main__":
    main()
