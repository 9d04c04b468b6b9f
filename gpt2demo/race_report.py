"""A race with its expectations and verdicts, for JSON."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gpt2demo.compare import explain
from gpt2demo.expectation import expect
from gpt2demo.race import Race
from gpt2demo.records import jsonable
from gpt2demo.roofline import Rates

if TYPE_CHECKING:  # device.py imports torch, which this module does without
    from gpt2demo.device import DeviceInfo


def race_report(device: "DeviceInfo", race: Race, rates: Rates | None = None) -> dict[str, Any]:
    """`config`, `device`, `rounds`, `message`, and by precision `results` (`PrecisionResult`),
    `expected` (`Expectation`) and `verdicts` (`Verdict`), as strict JSON takes them.

    Args:
        device: where the race ran.
        race: going on or over.
        rates: a probe's (see `expect`).
    """
    results = race.results()
    expected = expect(device, race.config, rates)
    verdicts = explain(device, race.config, results, rates)
    config = race.config.to_dict()
    del config["precision"]
    return jsonable(
        {
            "config": config,
            "device": device.to_dict(),
            "rounds": race.rounds,
            "message": race.message,
            "results": {result.precision: asdict(result) for result in results},
            "expected": {p: asdict(expected[p]) for p in race.precisions},
            "verdicts": {p: asdict(verdict) for p, verdict in verdicts.items()},
        }
    )
