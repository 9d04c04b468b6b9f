"""Stands in for the package `spaces`: every call in a forked process, killed when its lease ends.

The names and the errors are the real package's (0.51): `GPU` with `duration` as a number or a
function of the arguments, rows pickled one by one, `gr.Error` with a title that starts with
"ZeroGPU". The real one keeps idle workers and asks Hugging Face for the GPU; this one does neither.
"""

import contextlib
import functools
import multiprocessing
import threading
import traceback
from collections.abc import Callable

import gradio as gr

_FORK = multiprocessing.get_context("fork")


def gradio_auto_wrap(task):
    """Called by gradio for every listener; off unless a variable says so."""
    return task


def GPU(task: Callable | None = None, *, duration=None, size=None):  # noqa: N802
    if not callable(task):
        return functools.partial(_wrapped, duration=task or duration)
    return _wrapped(task, duration=duration)


def _wrapped(task: Callable, duration) -> Callable:
    @functools.wraps(task)
    def call(*args, **kwargs):
        seconds = duration(*args, **kwargs) if callable(duration) else duration or 60
        arguments, results, stop = _FORK.SimpleQueue(), _FORK.SimpleQueue(), _FORK.Event()
        worker = _FORK.Process(target=_work, args=(task, arguments, results, stop), daemon=True)
        worker.start()

        def tell_of_the_end() -> None:
            worker.join()
            with contextlib.suppress(ValueError):  # it may have been killed while it wrote
                results._wlock.release()
            results.put(None)

        threading.Thread(target=tell_of_the_end, daemon=True).start()
        lease = threading.Timer(seconds, worker.kill)
        lease.daemon = True
        lease.start()
        arguments.put((args, kwargs))
        try:
            while (row := results.get()) is not None:
                kind, value = row
                if kind == "end":
                    return
                if kind == "error":
                    raise gr.Error(value, title="ZeroGPU worker error", print_exception=False)
                try:
                    yield value
                except GeneratorExit:
                    stop.set()
                    while (row := results.get()) is not None and row[0] == "row":
                        pass
                    raise
            raise gr.Error("GPU task aborted", title="ZeroGPU worker error", print_exception=False)
        finally:
            lease.cancel()

    return call


def _work(task, arguments, results, stop) -> None:
    args, kwargs = arguments.get()

    def iterate() -> None:
        rows = task(*args, **kwargs)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as exc:
                traceback.print_exc()
                results.put(("error", type(exc).__name__))
                return
            if stop.is_set():
                rows.close()
                return
            results.put(("row", row))

    thread = threading.Thread(target=iterate)  # as there: not the main thread
    thread.start()
    thread.join()
    results.put(("end", None))
