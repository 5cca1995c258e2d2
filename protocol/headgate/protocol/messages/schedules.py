"""When runs of a DAG are created, as a part of its spec: by a cron expression, by events of assets, or by signals."""

from __future__ import annotations

import typing
from typing import Literal, TypeAlias

from headgate.protocol.messages import WireStruct
from headgate.protocol.messages.rules import RULES_MAX, SignalRule, rule_name, signal_rule_problem

# Limits (I11). What exceeds one is refused when its file is parsed, where its author sees the error.
NAME_CHARS_MAX = 250  # queues, pools, tags, operators, cron expressions: as ids, so that two fit an index row
DURATION_S_MAX = 10 * 365 * 86_400.0  # any delay or timeout: ten years, which every clock and column can hold
ASSETS_MAX = 100  # of one schedule
ASSET_CHARS_MAX = 1500  # the URI of an asset: an index row holds 2,704 bytes, and URIs are ASCII
EVENTS_PER_RUN_MAX = 1000  # events of assets, or signals, of one run; they are sent with each of its steps

RunContract: TypeAlias = Literal["all", "each", "batch", "latest"]


class CronSchedule(WireStruct, frozen=True, tag="cron"):
    """Runs at the times of a cron expression in the IANA time zone ``timezone``; part of `DagSpec`."""

    cron: str
    timezone: str = "UTC"


class AssetSchedule(WireStruct, frozen=True, tag="assets"):
    """Runs on events of ``assets`` (their URIs); part of `DagSpec`. ``contract`` says which events create a run.

    ``all``: a run as soon as every asset has a waiting event; it gets all waiting events. ``each``: one run per event.
    ``batch``: a run as soon as ``batch_count`` events wait, or ``batch_seconds`` after the first of them unless that is
    None. ``latest``: a run for the newest event, which supersedes all others that wait.
    """

    assets: tuple[str, ...]
    contract: RunContract = "all"
    batch_count: int = 0
    batch_seconds: float | None = None

    @property
    def sources(self) -> int:
        """The number of assets."""
        return len(self.assets)


class SignalSchedule(WireStruct, frozen=True, tag="signals"):
    """Runs on signals that meet ``rules``; part of `DagSpec`. ``contract`` says which create a run, as of assets.

    Of a rule the key, the predicate and ``since`` count: with "run" the signals that are sent after the DAG was parsed
    with it for the first time, with "latest" the newest one before as well.
    """

    rules: tuple[SignalRule, ...]
    contract: RunContract = "each"
    batch_count: int = 0
    batch_seconds: float | None = None

    @property
    def sources(self) -> int:
        """The number of rules."""
        return len(self.rules)


EventSchedule: TypeAlias = AssetSchedule | SignalSchedule
Schedule: TypeAlias = CronSchedule | EventSchedule


# --- the check -----------------------------------------------------------------------------------


def name_problem(name: str) -> str | None:
    """Return the problem with a short text that is shown and indexed, or None."""
    if not 0 < len(name) <= NAME_CHARS_MAX:
        return f"{name[:60]!a} must have 1..{NAME_CHARS_MAX} characters, not {len(name)}"
    if not name.isprintable():
        return f"{name!a} must be printable"
    return None


def schedule_problem(schedule: Schedule) -> str | None:
    """Return the problem with a schedule, or None.

    Cron expressions and time zones are checked elsewhere, because that needs a library and the machine's tz database.
    """
    match schedule:
        case CronSchedule(cron, timezone):
            for name, text in (("cron expression", cron), ("time zone", timezone)):
                if (problem := name_problem(text)) is not None:
                    return f"the {name} {problem}"
            return None
        case AssetSchedule(assets=assets):
            if not 0 < len(assets) <= ASSETS_MAX:
                return f"is scheduled by {len(assets)} assets, not 1..{ASSETS_MAX}"
            for asset in assets:
                if (problem := asset_problem(asset)) is not None:
                    return f"the asset {problem}"
            if len(set(assets)) != len(assets):
                return "names an asset twice in its schedule"
            return _contract_problem(schedule)
        case SignalSchedule():
            return _signals_problem(schedule) or _contract_problem(schedule)
        case _:
            typing.assert_never(schedule)


def _signals_problem(schedule: SignalSchedule) -> str | None:
    if not 0 < len(schedule.rules) <= RULES_MAX:
        return f"is scheduled by {len(schedule.rules)} rules about signals, not 1..{RULES_MAX}"
    if len(set(map(rule_name, schedule.rules))) != len(schedule.rules):
        return "has the same rule about a signal twice in its schedule"
    for rule in schedule.rules:
        if (rule.action, rule.condition) != ("START", "sufficient") or rule.since == "last_run":
            return f"the rule about {rule.key!a:.60} in its schedule starts a run, by the signals since it was parsed"
        if (problem := signal_rule_problem(rule)) is not None:
            return f"the schedule: {problem}"
    return None


def _contract_problem(schedule: EventSchedule) -> str | None:
    count, seconds = schedule.batch_count, schedule.batch_seconds
    if schedule.contract != "batch":
        return None if (count, seconds) == (0, None) else f"only a batch has limits, not {schedule.contract!r}"
    if not 1 <= count <= EVENTS_PER_RUN_MAX:
        return f"the count of a batch must be in 1..{EVENTS_PER_RUN_MAX}, not {count}"
    if seconds is not None and not 0 < seconds <= DURATION_S_MAX:
        return f"the seconds of a batch must be more than 0 and at most {DURATION_S_MAX:.0f}, not {seconds}"
    return None


def asset_problem(uri: str) -> str | None:
    """Return the problem with the URI of an asset, or None."""
    if not 0 < len(uri) <= ASSET_CHARS_MAX:
        return f"{uri[:60]!a} must have 1..{ASSET_CHARS_MAX} characters, not {len(uri)}"
    if not uri.isascii() or not uri.isprintable() or " " in uri:
        return f"{uri[:60]!a} must be printable ASCII without spaces"
    return None
