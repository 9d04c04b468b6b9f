"""`run` under torchrun: several processes, one log, and an end when one of them dies."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TextIO

from gpt2demo.cli.output import Interruption, say
from gpt2demo.config import RunConfig
from gpt2demo.ranks import Ranks
from gpt2demo.records import RunSummary

if TYPE_CHECKING:
    from gpt2demo.train import Progress

# the ends that all processes of a run come to together
_COMMON: Final = ("finished", "diverged")


class MeetingError(Exception):
    """The processes of a run did not come together."""


class Processes:
    """The processes of one run, as one of them sees them; nothing is done where it is alone."""

    def __init__(self, ranks: Ranks, interruption: Interruption) -> None:
        self.ranks = ranks
        self._interruption = interruption
        self._peers: list[tuple[str, int]] = []

    def log(self, stream: TextIO | None) -> TextIO | None:
        """Where this process logs: the stream in process 0, nowhere in the others."""
        return stream if self.ranks.master_process else None

    def device(self, asked: str) -> str:
        """The device that this process takes where `asked` is what the command line says.

        Raises:
            InputError: as `distributed.device_for`.
        """
        if not self.ranks.ddp:
            return asked
        from gpt2demo import distributed

        return distributed.device_for(asked, self.ranks)

    def meet(self, config: RunConfig, progress: "Progress", max_text_bytes: int) -> Any:
        """Wait for the others; the text's tokens, an (n,) int64 tensor that all get from process 0.

        None where there are no others: the run reads its text itself. `config` names the device of
        this process.

        Raises:
            InputError: the text cannot be trained on.
            MeetingError: another process ended before the run began, or could not be reached.
        """
        if not self.ranks.ddp:
            return None
        from gpt2demo import distributed
        from gpt2demo.data import load_tokens

        # a process that dies leaves the others in calls that return late or never
        self._interruption.leave_at_once = True
        world_size = self.ranks.world_size
        try:
            progress.phase = "waiting for the other processes"
            self._peers = distributed.start(config.device)
            progress.phase = "loading the text"
            tokens, notes = distributed.from_rank_0(
                lambda: load_tokens(config, max_text_bytes, world_size), self.ranks
            )
        except RuntimeError as exc:  # torch's distributed errors are such
            raise MeetingError(
                f"The {world_size} processes did not come together ({type(exc).__name__})."
            ) from exc
        progress.notes += notes
        return tokens

    def explained(self, summary: RunSummary) -> RunSummary:
        """The summary, which names the process that died where one did and ended the run."""
        gone = self._gone(summary)
        if not gone:
            return summary
        who = ", ".join(map(str, gone))
        message = (
            f"Process {who} of {self.ranks.world_size} (counted from 0) ended after "
            f"{summary.steps_done} steps; the others cannot go on without it."
        )
        return replace(summary, state="error", message=message)

    def leave(self, summary: RunSummary) -> None:
        """Part from the others; says why where process 0 cannot."""
        if not self.ranks.ddp:
            return
        if summary.state in _COMMON:
            from gpt2demo import distributed

            distributed.finish()
            self._interruption.leave_at_once = False
        elif self._speaks(summary):
            say(f"gpt2demo: process {self.ranks.rank}: {summary.message}", sys.stderr)

    def last_words(self, summary: RunSummary) -> None:
        """Say how the run ended where this process is being ended in the middle of a step."""
        if self.ranks.master_process and self.ranks.ddp:
            say(f"gpt2demo: {summary.message}", sys.stderr)
        elif self._speaks(summary):
            say(f"gpt2demo: process {self.ranks.rank}: {summary.message}", sys.stderr)

    def _speaks(self, summary: RunSummary) -> bool:
        """Whether this process, which is not process 0, has something of its own to say."""
        if self.ranks.master_process or summary.state == "interrupted":
            return False
        gone = self._gone(summary)
        return not gone or self.ranks.rank == min(set(range(self.ranks.world_size)) - set(gone))

    def _gone(self, summary: RunSummary) -> list[int]:
        if summary.state not in ("interrupted", "error") or not self._peers:
            return []
        from gpt2demo import distributed

        return distributed.ended(self._peers)
