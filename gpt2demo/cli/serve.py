"""`serve`: the page, as `python app.py` serves it."""

import argparse
import os
import runpy
import signal
import sys
from typing import Any

from gpt2demo.cli.options import add_verb, number
from gpt2demo.cli.output import Interruption, say
from gpt2demo.config import InputError, shown
from gpt2demo.shipped import app_file


def add(verbs: Any) -> None:
    """The verb's parser."""
    serve = add_verb(
        verbs,
        "serve",
        _serve,
        help="serve the page",
        description="Serve the page until Ctrl-C or SIGTERM.",
        epilog="0 ended by Ctrl-C or SIGTERM, 2 refused input, 1 anything else",
    )
    serve.add_argument(
        "--host",
        metavar="NAME",
        help="the address to listen on; 0.0.0.0 is every one (default GRADIO_SERVER_NAME or "
        "127.0.0.1)",
    )
    serve.add_argument(
        "--port",
        metavar="N",
        type=number,
        help="1 to 65,535 (default GRADIO_SERVER_PORT or the first free one from 7860 on)",
    )


def _serve(args: argparse.Namespace, interruption: Interruption) -> int:
    port = getattr(args, "port", None)
    if port is not None:
        if not isinstance(port, int) or not 1 <= port <= 65_535:
            raise InputError(
                "port", f"port must be a whole number from 1 to 65,535, not {shown(port)}."
            )
        os.environ["GRADIO_SERVER_PORT"] = str(port)
        os.environ["GRADIO_NUM_PORTS"] = "1"  # this one, and no other where it is taken
    if host := getattr(args, "host", None):
        os.environ["GRADIO_SERVER_NAME"] = host
    # the page ends in its own way: nobody counts its seconds, and Ctrl-C is Python's own
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        runpy.run_path(str(app_file()), run_name="__main__")
    except OSError as exc:  # the port is taken, or the address is not this machine's
        say(f"gpt2demo: The page could not be served: {exc}", sys.stderr)
        return 1
    return 0
