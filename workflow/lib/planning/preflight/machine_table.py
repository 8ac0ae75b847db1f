"""A user's table of machines with their prices."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field, ValidationError

from workflow.lib.artifacts.preflight_record import Forecast
from workflow.lib.planning.preflight.decision import Decision
from workflow.lib.settings.errors_in_words import CHANGE, explain
from workflow.lib.settings.section_base import Section
from workflow.lib.settings.yaml_files import check_yaml
from workflow.lib.system.errors import UserError
from workflow.lib.system.gpu_models import parse_gpus
from workflow.lib.system.input_files import read_input

# `gpus: 4090` is a number in YAML
Number = BeforeValidator(lambda value: str(value) if type(value) is int else value)
Price = Annotated[float, Field(ge=0.0, le=1e9)]


class Offer(Section):
    """A machine, or several like it."""

    gpus: Annotated[str, Number] = Field(min_length=1, max_length=64)
    """Number and kind of GPUs of each node, like 2x4090."""
    nodes: int = Field(1, ge=1, le=512)
    """Machines that train one run together."""
    host_gib: float | None = Field(None, gt=0.0, le=1e6)
    """Host memory of each node, GiB; null = what is usual."""
    price_per_hour: Price = 0.0
    """Price of an hour of one node, in any currency."""
    watts: Price = 0.0
    """What one node draws while it trains."""

    @property
    def label(self) -> str:
        """The machine in a few words."""
        return self.gpus if self.nodes == 1 else f"{self.nodes} nodes of {self.gpus}"


class MachineTable(Section):
    """Machines that could train a run."""

    price_per_kwh: Price = 0.0
    """Price of electricity, in the same currency."""
    machines: tuple[Offer, ...] = Field(min_length=1, max_length=1000)
    """Each a row of the table."""

    def answer(self, offer: Offer, predicted: Callable[[], tuple[Decision, Forecast]]) -> "Answer":
        """Return a machine's answer for a run; an error of the settings there is its answer."""
        try:
            decision, forecast = predicted()
        except UserError as error:
            return Answer(offer, None, str(error).splitlines()[0])
        lack = None if decision.fits else decision.reason
        if (hours := forecast.time.total_h) is None:
            return Answer(offer, forecast, lack)
        an_hour = offer.price_per_hour + offer.watts / 1000 * self.price_per_kwh
        return Answer(offer, forecast, lack, hours, hours * offer.nodes * an_hour)

    def cheapest(self, answers: Sequence["Answer"], *, hours: float | None) -> "Answer":
        """Return the answer that costs least of those that are done in so many hours (None: any).
        Raises `UserError` if none is, or none has a price."""
        fitting = [(x.cost, x.hours, x) for x in answers if x.fits and not math.isnan(x.hours)]
        if not fitting:
            raise UserError(
                "--cheapest: the run fits none of the machines. Add machines with more memory, or "
                "lower what the run needs (data.seq_len, lora.r)."
            )
        if not any(cost for cost, _, _ in fitting):
            raise UserError(
                "--cheapest: no machine that fits has a price. Give price_per_hour, or watts and "
                "price_per_kwh; --compare needs none."
            )
        _, least, fastest = min(fitting, key=lambda x: x[1])
        if hours is not None and least > hours:
            raise UserError(
                f"--deadline: it is in {hours:.3g} h, and the fastest machine, "
                f"{fastest.offer.label}, takes {least:.3g} h. Give more time, or faster machines."
            )
        by_then = [x for x in fitting if hours is None or x[1] <= hours]
        return min(by_then, key=lambda x: x[:2])[2]


@dataclass(frozen=True)
class Answer:
    """A run's forecast on one machine of a table."""

    offer: Offer
    forecast: Forecast | None  # None if the settings cannot work there
    lack: str | None  # why the run does not fit; None if it does
    hours: float = math.nan  # of training; nan if unknown
    cost: float = math.nan

    @property
    def fits(self) -> bool:
        return self.lack is None


def machine_table(text: str, *, setting: str) -> MachineTable:
    """Return the table of a YAML file, or of a list like `2x4090,8xH100`. Raises `UserError` with
    all errors in one message."""
    path = Path(text)
    of_file = path.suffix in (".yaml", ".yml") or "/" in text or path.is_file()
    origin = text if of_file else f"{setting} = {text!r}"
    document = _document(path) if of_file else {"machines": [{"gpus": x} for x in text.split(",")]}
    table = _validated(document, origin=origin)
    for number, offer in enumerate(table.machines, start=1):
        parse_gpus(offer.gpus, setting=f"{origin}: machines.{number}.gpus")
    return table


def _document(path: Path) -> dict[str, Any]:
    check_yaml(path)
    found: Any = yaml.safe_load(read_input(path))
    if not isinstance(found, dict) or not isinstance(found.get("machines"), list):
        raise UserError(f"{path}: there is no list of machines. Write it below `machines:`.")
    return found


def _validated(document: dict[str, Any], *, origin: str) -> MachineTable:
    lines, offers = list[str](), list[Offer]()
    for number, row in enumerate(document["machines"], start=1):
        if not isinstance(row, dict):
            lines.append(
                f"machines.{number} = {row!r}: must have keys below it, like gpus: 2x4090."
            )
            continue
        try:
            offers.append(Offer.model_validate(row))
        except ValidationError as error:
            lines += (f"machines.{number}.{line}" for line in explain(Offer, row, error))
    try:
        table = MachineTable.model_validate(document | {"machines": offers})
    except ValidationError as error:
        lines += [] if lines else explain(MachineTable, document, error)
    if lines:
        said = " ".join(line.replace(CHANGE, "").strip() for line in lines)
        raise UserError(f"{origin}: {said} Correct it there.")
    return table
