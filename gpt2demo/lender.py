"""What the hub asks of a device that it is lent."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from gpt2demo.config import RunConfig
from gpt2demo.device import DeviceInfo
from gpt2demo.inspection import Inspection
from gpt2demo.probe import ProbeResult
from gpt2demo.records import RunSummary
from gpt2demo.run import StopFlag


class Lender(Protocol):
    """A device that this process has only while a run lasts, in a process of the run's own."""

    device: torch.device
    info: DeviceInfo  # None = not known before the first run

    def execute(
        self, config: RunConfig, info: DeviceInfo, *, on_device: Callable[..., None], **_: Any
    ) -> RunSummary:
        """`runner.execute`, and `on_device` called with the device's facts."""
        ...

    def probe(self, tokens: int) -> tuple[DeviceInfo, ProbeResult]:
        """The device's facts and rates."""
        ...

    def inspect(self, config: RunConfig) -> tuple[DeviceInfo, Inspection]:
        """The device's facts and one step from inside."""
        ...

    def new_stop(self) -> StopFlag:
        """What stops the next run."""
        ...
