"""One run at a time, first come first served: who owns it, who watches, what has finished.

A run belongs to the hub and not to the page that started it. Pages only look; the sole writer of a
run's steps is its thread.
"""

import contextlib
import functools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from gpt2demo.board import Board
from gpt2demo.config import InputError, RunConfig, Settings
from gpt2demo.data import load_tokens
from gpt2demo.device import DeviceInfo, memory_free_bytes, probe_device, resolve_device
from gpt2demo.ending import MUST_RESTART, interrupted
from gpt2demo.fit import Capacity, capacity_for
from gpt2demo.inside import MAX_SECONDS, Inspection, inspect_step
from gpt2demo.lender import Lender
from gpt2demo.limit import LimitSearch
from gpt2demo.malloc import share_main_arena
from gpt2demo.pace import paces, seconds_to_go
from gpt2demo.probe import ProbeResult, probe_rates
from gpt2demo.race import Race
from gpt2demo.records import RunRecord, RunSummary
from gpt2demo.roofline import Rates
from gpt2demo.run import Run
from gpt2demo.runner import capacity_now, check_device, execute, free_bytes_now
from gpt2demo.series import Series
from gpt2demo.staircase import Staircase
from gpt2demo.tracking import check_project, tracked

log = logging.getLogger(__name__)

Execute = Callable[..., RunSummary]  # runner.execute's form


class Hub:
    """The server's runs: the one that goes on, the line behind it, and those that ended."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        device: str = "auto",
        execute: Execute = execute,
        lender: Lender | None = None,
        clock: Callable[[], float] = time.monotonic,
        board: Board | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self.board = board or Board(None, limit=self.settings.max_board)
        self.lender = lender
        self.device = lender.device if lender else resolve_device(device)
        self.device_info = lender.info if lender else probe_device(device)
        self.current: Run | None = None
        self.waiting: deque[Run] = deque()
        self.finished: deque[Run] = deque(maxlen=self.settings.max_finished)
        if lender:
            execute = functools.partial(lender.execute, on_device=self._met)
        self._execute = execute
        self._clock = clock
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._seen = clock()  # when anybody last looked
        self._closing = False
        self._broken: str | None = None  # why no run can start in this process any more
        # the last ones, going on or ended
        self.search: LimitSearch | None = None
        self.race: Race | None = None
        self.staircase: Staircase | None = None
        self.probed: ProbeResult | None = None
        self.probes = 0  # that found something
        self.inspection: Inspection | None = None
        self.measuring = ""  # what goes on in a caller's thread, in words: no run may start
        share_main_arena()

    # --- what visitors ask for

    def submit(self, config: RunConfig, owner: str, track: str | None = None) -> Run:
        """Take a run into the line; it starts at once when nothing else goes on.

        Args:
            config: the run.
            owner: the token of whoever asks.
            track: the project of trackio that the run is logged to; None = none.

        Raises:
            InputError: a limit of this server, a precision the device lacks, an unfit own text, a
                full line, or trackio is asked for and not to be had.
        """
        self._check_steps(config)
        if track is not None:
            check_project(track)
        return self._submit(config, owner, track=track)

    def find_limit(self, config: RunConfig, axis: str, owner: str) -> Run:
        """Find the largest B or T that runs, all else as in `config`, by runs of two steps.

        The tries follow each other without a place in the line between them; `stop` ends them.

        Raises:
            InputError: as `submit`; or a search goes on already.
        """
        # tensors are as large with any text, and an own one is not kept
        config = replace(config, device=str(self.device), text="builtin")
        search = LimitSearch(config=config, axis=axis, capacity=self.capacity(config))
        run = self._begin(search, owner)
        self.search = search
        return run

    def compare(
        self, config: RunConfig, precisions: Sequence[str], rounds: int, owner: str
    ) -> Race:
        """Race several precisions at otherwise equal settings, as runs that follow each other.

        Raises:
            InputError: as `submit`; or precisions or rounds are refused, or none of them is here.
        """
        config = replace(config, device=str(self.device))
        self._check_steps(config)
        race = Race(config, precisions, rounds)
        race.leave_out_missing(self.device_info.support)
        self._begin(race, owner)
        self.race = race
        return race

    def climb(self, config: RunConfig, owner: str) -> Staircase:
        """Run the lesson's staircase with this model, B, T, steps and seed, rung after rung.

        Raises:
            InputError: as `submit`.
        """
        config = replace(config, device=str(self.device))
        self._check_steps(config)
        staircase = Staircase(config, self.device_info.support)
        self._begin(staircase, owner)
        self.staircase = staircase
        return staircase

    def probe(self, tokens: int) -> ProbeResult:
        """Measure the device for a step of `tokens` tokens; takes about 8 seconds, in the caller's
        thread. Runs that are asked for meanwhile wait for its end.

        Raises:
            InputError: a run goes on, or another probe.
        """
        with self._alone("probe", "Probing this device."):
            if self.lender:
                info, self.probed = self.lender.probe(tokens)
                self._met(info)
            else:
                self.probed = probe_rates(
                    self.device_info, tokens, should_stop=lambda: self._closing
                )
            self.probes += 1
        return self.probed

    def inspect(self, config: RunConfig) -> Inspection:
        """Look into one step of `config` on the built-in text, in the caller's thread (see
        `inside.inspect_step`). Runs that are asked for meanwhile wait for its end.

        Raises:
            InputError: a run goes on, or a probe or another inspection; or the device lacks the
                precision.
        """
        if self._broken:
            raise InputError("device", self._broken)
        config = replace(config, device=str(self.device), text="builtin")
        check_device(config, self.device_info)
        with self._alone("inspect a step", "Inspecting one step."):
            if self.lender:
                info, found = self.lender.inspect(config)
                self._met(info)
            else:
                found = inspect_step(
                    config,
                    self.device_info,
                    stop_reason=lambda: "the server is closing" if self._closing else None,
                    max_seconds=min(MAX_SECONDS, self.settings.max_seconds),
                )
            if found.must_restart:
                self._broken = MUST_RESTART
            self.inspection = found
        return found

    def rates(self) -> Rates | None:
        """The last probe's rates; None = nothing was probed."""
        return self.probed.rates if self.probed else None

    def run_smaller(self, run_id: str, axis: str, owner: str) -> Run:
        """After an out-of-memory: the same run with the B or T that should fit.

        Raises:
            InputError: as `submit`; or that run is gone, or no smaller size fits.
        """
        run = self.find(run_id)
        failed = run.summary.out_of_memory if run and run.summary else None
        size = getattr(failed, f"smaller_{axis}") if failed and axis in ("B", "T") else None
        if not run or not size:
            raise InputError("run", "That run is not kept any more; set B and T by hand.")
        if run.config.text_name == "own":
            raise InputError(
                "text", f"Your own text is not kept after a run: set {axis} to {size}, press Run."
            )
        return self._submit(replace(run.config, **{axis: size}), owner)

    def _begin(self, series: Series, owner: str) -> Run:
        """Take a series' first run into the line; the others follow it.

        Raises:
            InputError: as `submit`; or the owner has one already, or none of its runs is possible.
        """
        if any(run.series for run in self.mine(owner)):
            raise InputError("line", "Runs of yours that belong together go on already.")
        first = series.next_run()
        if first is None:
            raise InputError("precisions", "None of these precisions is available here.")
        run = self._submit(first, owner, series)
        series.config = replace(series.config, text=run.config.text)  # an own text is not kept
        return run

    def _submit(
        self,
        config: RunConfig,
        owner: str,
        series: Series | None = None,
        track: str | None = None,
    ) -> Run:
        if self._broken:
            raise InputError("device", self._broken)
        config = replace(config, device=str(self.device))
        check_device(config, self.device_info)
        self._check_line(owner)
        tokens = None
        if config.text_name == "own":
            tokens, _ = load_tokens(config, self.settings.max_text_mib * 2**20)
            config = replace(config, text="own")  # the words themselves are not kept
        run = self._new_run(config, owner, tokens, series)
        run.track = track
        with self._lock:
            self._check_line(owner)
            self.waiting.append(run)
            self.seen()
            self._start_next()
        return run

    def stop(self, owner: str) -> str:
        """Stop the owner's run after its running step, or take their waiting runs out of the line.

        Returns:
            what happens now, in one sentence.
        """
        with self._lock:
            run = self.current
            if run and run.owner == owner:
                self._end(run, "its owner pressed Stop")
                return "Stopping after this step."
            mine = [waiting for waiting in self.waiting if waiting.owner == owner]
            for waiting in mine:
                self.waiting.remove(waiting)
            if mine:
                return "Taken out of the line."
            if run:
                return "This run belongs to somebody else; only its owner stops it."
            return "Nothing is running."

    def seen(self) -> None:
        """Somebody looks: called by every open page while it watches."""
        self._seen = self._clock()

    # --- what pages show

    def capacity(self, config: RunConfig) -> Capacity:
        """The memory that `config` may use on this device once nothing else runs here."""
        run = self.current
        # what the running run takes now, it gives back
        free = run.free_bytes if run else None
        if free is None and self.lender:
            free = self.memory_free_bytes()
        if free is not None or self.lender:
            return capacity_for(config, self.device.type, free, self.device_info.compute_capability)
        return capacity_now(config, self.device_info, self.device)

    def memory_free_bytes(self) -> int | None:
        """Free memory of the device now; of one that is lent, what a run found last."""
        if self.lender:
            return self.device_info.memory_free_bytes
        return memory_free_bytes(self.device)

    def failure(self) -> Run | None:
        """The last run where it ran out of memory, on its own, and nothing runs after it: what
        pages explain.
        """
        last = self.finished[-1] if self.finished and not self.current else None
        failed = last and not last.series and last.summary and last.summary.out_of_memory
        return last if failed else None

    def place(self, run: Run) -> int | None:
        """The run's place in the line, the running one being 1; None when it waits no more."""
        with self._lock:
            return self._not_ended().index(run) + 1 if run in self.waiting else None

    def wait_seconds(self, run: Run) -> float | None:
        """How long until a waiting run starts; None while that is not known."""
        with self._lock:
            if run not in self.waiting or self.measuring:
                return None
            runs = self._not_ended()
            known, most = paces(self.finished), self.settings.max_seconds
            seconds = [seconds_to_go(ahead, known, most) for ahead in runs[: runs.index(run)]]
        return None if None in seconds else sum(seconds)

    def mine(self, owner: str) -> list[Run]:
        """The owner's runs that have not ended, in order."""
        return [run for run in self._not_ended() if run.owner == owner]

    def run_of(self, series: Series) -> Run | None:
        """The run of the series that runs or waits; None when the series has ended."""
        return next((run for run in self._not_ended() if run.series is series), None)

    def find(self, run_id: str) -> Run | None:
        """The run of this id, ended or not."""
        with self._lock:
            runs = [*self.finished, *self._not_ended()]
        return next((run for run in runs if run.id == run_id), None)

    def close(self, timeout: float = 5.0) -> None:
        """End the running run and forget the line; waits `timeout` seconds for its last step.

        A run whose step takes longer goes onto the board as interrupted, with the steps it has.
        """
        with self._lock:
            self._closing = True
            self.waiting.clear()
            run, thread = self.current, self._thread
            if run:
                self._end(run, "the server is closing")
        if thread:
            thread.join(timeout)
        if run and not run.summary:
            steps, seconds = list(run.steps), self._clock() - run.started
            summary = interrupted(run.config, run.device, run.progress, steps, seconds)
            self._keep(run, replace(run.record(summary), steps=tuple(steps)))
        if thread and run and run.summary:  # it ended, and is being written
            thread.join(_WRITING_SECONDS)

    # --- inside

    def _not_ended(self) -> list[Run]:
        """The run that goes on, and the line behind it."""
        with self._lock:
            return [*([self.current] if self.current else []), *self.waiting]

    @contextlib.contextmanager
    def _alone(self, wanted: str, doing: str) -> Iterator[None]:
        """Nothing else runs on the device meanwhile, and pages are told what does.

        Raises:
            InputError: something runs or waits already.
        """
        with self._lock:
            if self.current or self.waiting or self.measuring:
                raise InputError("line", f"Something runs here now; {wanted} when it has ended.")
            self.measuring = doing
        try:
            yield
        finally:
            with self._lock:
                self.measuring = ""
                if self._broken:
                    self.waiting.clear()
                self._start_next()

    def _new_run(
        self,
        config: RunConfig,
        owner: str,
        tokens: torch.Tensor | None,
        series: Series | None,
    ) -> Run:
        return Run(
            id=secrets.token_hex(4),
            owner=owner,
            config=config,
            device=self.device_info,
            tokens=tokens,
            series=series,
            stop=threading.Event(),
        )

    def _check_steps(self, config: RunConfig) -> None:
        limit = self.settings.max_steps
        if config.steps > limit:
            raise InputError(
                "steps",
                f"steps must be a whole number from 1 to {limit:,} on this page, "
                f"not {config.steps:,}.",
            )

    def _check_line(self, owner: str) -> None:
        if self._closing:
            raise InputError("line", "The server is closing and takes no more runs.")
        if len(self.waiting) >= self.settings.max_line:
            raise InputError(
                "line", f"The line is full: {len(self.waiting)} runs wait. Try again in a while."
            )
        own = sum(run.owner == owner for run in self.waiting)
        if own >= self.settings.max_line_per_visitor:
            raise InputError(
                "line", f"You have {own} runs in the line already. Let one of them finish first."
            )

    def _end(self, run: Run, reason: str) -> None:
        if not run.stop.is_set():
            run.stop_reason = reason
            run.stop.set()

    def _start_next(self) -> None:
        with self._lock:
            if self.current or not self.waiting or self._closing or self.measuring:
                return
            run = self.current = self.waiting.popleft()
            run.started = self._clock()
            if self.lender:
                run.stop = self.lender.new_stop()
            else:
                run.free_bytes = free_bytes_now(self.device_info, self.device)
            self._thread = threading.Thread(
                target=run.context.run, args=(self._work, run), name=f"run-{run.id}", daemon=True
            )
            run.context = None  # with it the request, which may hold a text
            self._thread.start()

    def _work(self, run: Run) -> None:
        """The background thread: one run, whatever happens in it."""
        try:
            if torch.get_num_threads() > 3:
                torch.set_num_threads(torch.get_num_threads() - 1)  # a core for the page
            execute = tracked(self._execute, run.track) if run.track else self._execute
            run.summary = execute(
                run.config,
                run.device,
                on_step=run.steps.append,
                stop_reason=lambda: self._why_stop(run),
                progress=run.progress,
                tokens=run.tokens,
                max_text_bytes=self.settings.max_text_mib * 2**20,
            )
        except BaseException as exc:  # the room goes on
            message = str(exc) if isinstance(exc, InputError) else _UNEXPECTED
            if not isinstance(exc, InputError):
                log.exception("a run's thread ended with an error")
            run.summary = RunSummary(
                state="error",
                message=message,
                steps_done=len(run.steps),
                steps_measured=0,
                seconds=self._clock() - run.started,
            )
        finally:
            tokens, run.tokens = run.tokens, None
            self._keep(run, run.record())
            with self._lock:
                if run.progress.poisoned:
                    self._broken = MUST_RESTART
                    self.waiting.clear()
                self.finished.append(run)
                self.current = None
                self._go_on(run, tokens)
                self._start_next()

    def _keep(self, run: Run, record: RunRecord) -> None:
        """Put a run onto the board, once: its thread does, or whoever closes the server."""
        with self._lock:
            if run.kept:
                return
            run.kept = True
        try:
            self.board.add(record, run.owner)
        except Exception:  # the room goes on
            log.exception("a finished run was not kept")

    def _met(self, info: DeviceInfo) -> None:
        """The lent device is here: what it is, for the running run and for everybody."""
        self.device_info = info
        self.device = torch.device(info.type, info.index)
        if run := self.current:
            run.device, run.free_bytes = info, info.memory_free_bytes

    def _go_on(self, run: Run, tokens: torch.Tensor | None) -> None:
        """The next run of a series takes the head of the line."""
        series = run.series
        if series is None:
            return
        series.ended(run.record(), out_of_time=run.out_of_time)
        config = series.next_run()
        if config and not self._closing and not self._broken:
            self.waiting.appendleft(self._new_run(config, run.owner, tokens, series))

    def _why_stop(self, run: Run) -> str | None:
        """Asked between two steps."""
        now = self._clock()
        if now - run.started > self.settings.max_seconds:
            run.out_of_time = not run.stop.is_set()
            self._end(run, f"a run may take {self.settings.max_seconds:,} seconds on this page")
        if now - self._seen > self.settings.orphan_seconds:
            self._end(run, f"nobody watched for {self.settings.orphan_seconds} seconds")
        return run.stop_reason


_WRITING_SECONDS = 2.0  # more than the board needs for one run
_UNEXPECTED = "The run ended with an unexpected error. The log has the details."
