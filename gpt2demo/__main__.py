"""`python -m gpt2demo`: the process around the command line, its signals and its end."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from gpt2demo.cli import Interruption

GRACE_SECONDS = 7.0  # from a signal to the process's end without the main thread's help
_WRITING_SECONDS = 2.0  # more, where the main thread is writing its result

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main() -> int:
    """Run the command line in `sys.argv` with SIGINT and SIGTERM minded; its exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, also while importing
    # Before torch is loaded: threads that wait give their core to other programs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        from gpt2demo import cli

        if sys.stdout is not None:
            sys.stdout.reconfigure(errors="backslashreplace")  # LC_ALL=C cannot write every name
        interruption = cli.Interruption()
        mind_signals(interruption)
        status = cli.main(interruption=interruption)
        if interruption.leave_at_once:
            _drop_unread()
            os._exit(status)
        return status
    except KeyboardInterrupt:
        return 130
    finally:
        for signum in _SIGNALS:  # all is written; the interpreter ends at once
            signal.signal(signum, signal.SIG_IGN)
        _drop_unread()


def mind_signals(interruption: "Interruption") -> None:
    """Turn the first SIGINT or SIGTERM into a KeyboardInterrupt, and end within ten seconds of it.

    Python runs its handlers between two bytecodes of the main thread, but a backward pass is one
    call that may take a minute. So the signal also wakes a thread through a socket, and where the
    main thread is not done in time, that thread writes what was measured and ends the process.
    Later signals do nothing: the file is being written.
    """

    def on_signal(signum: int, frame: FrameType | None) -> None:
        first, interruption.received = not interruption.received, True
        if first and not interruption.held:
            raise KeyboardInterrupt

    waiting, waking = socket.socketpair()
    waking.setblocking(False)

    def watch() -> None:
        while not set(waiting.recv(1)) & set(_SIGNALS):  # the byte is the signal's number
            pass
        time.sleep(GRACE_SECONDS)
        if interruption.held:
            time.sleep(_WRITING_SECONDS)
        else:
            with contextlib.suppress(Exception):
                interruption.last_words()
            if sys.stderr is not None:
                with contextlib.suppress(OSError):
                    print(
                        "gpt2demo: Interrupted; the step in progress was given up.", file=sys.stderr
                    )
        os._exit(130)

    threading.Thread(target=watch, name="interrupt", daemon=True).start()
    signal.set_wakeup_fd(waking.detach(), warn_on_full_buffer=False)
    for signum in _SIGNALS:
        signal.signal(signum, on_signal)


def _drop_unread() -> None:
    """Drop what a reader who has left will not read, so that the interpreter does not complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def command() -> NoReturn:
    """The process: `main`, and its exit status. Installed, this is the command `gpt2demo`."""
    status = main()
    if status == 130:
        # Python may end itself by SIGINT instead: it keeps a note of an interrupt inside an exec()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    command()
