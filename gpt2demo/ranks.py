"""Which of torchrun's processes this one is, read from the environment; no torch needed."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpt2demo.config import InputError, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among those of one run, with torchrun's names and numbers."""

    rank: int = 0  # among all processes
    local_rank: int = 0  # among those of this machine
    world_size: int = 1  # processes in all
    local_world_size: int = 1  # on this machine

    @property
    def ddp(self) -> bool:
        """Whether there are others: the run is distributed."""
        return self.world_size > 1

    @property
    def master_process(self) -> bool:
        """The process that logs and writes."""
        return self.rank == 0


ALONE: Final = Ranks()
_VARIABLES: Final = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "local_world_size": "LOCAL_WORLD_SIZE",
}


def ranks_from_env(environ: Mapping[str, str] = os.environ) -> Ranks:
    """What torchrun set for this process; `ALONE` where it did not start it.

    Raises:
        InputError: a variable of torchrun's is missing or is no number.
    """
    if "RANK" not in environ:
        return ALONE
    found = {}
    for name, variable in _VARIABLES.items():
        text = environ.get(variable, "")
        if not (text.isascii() and text.isdigit()):
            raise InputError(
                variable,
                f"{variable} must be a whole number where RANK is set, not {shown(text)}: start "
                "with torchrun, or unset RANK.",
            )
        found[name] = int(text)
    return Ranks(**found)


def first_to_speak() -> bool:
    """Whether this process says what all of torchrun's would say."""
    try:
        return ranks_from_env().master_process
    except InputError:  # nobody knows who is first
        return True


def check_alone(verb: str) -> None:
    """Refuse a verb that torchrun's processes would each do on their own.

    Raises:
        InputError: this process has others beside it.
    """
    if ranks_from_env().ddp:
        raise InputError(
            "WORLD_SIZE", f"{verb} is one process's work: under torchrun only `run` is of use."
        )
