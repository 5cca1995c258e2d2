"""Dashboards for Grafana, made from the catalogue of metrics, so that they show nothing that is not measured.

Three ask Prometheus; the fourth asks the database of headgate itself, if it is PostgreSQL, and needs no metrics. Each
chooses its source when it is imported. Written for Grafana 10 and newer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from headgate.supervisor.metrics import catalogue as c
from headgate.supervisor.metrics.catalogue import Metric

Kind = Literal["timeseries", "stat", "table"]
_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3  # in units of Grafana, whose pages are 24 wide
_NEWEST = 20_000  # events, which have no index by time
_SCHEMA = 38  # of Grafana 10; newer ones bring it up to date


class Panel(msgspec.Struct, frozen=True):
    """One panel. ``queries``: PromQL or SQL, by legend; ``unit`` as Grafana names it."""

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    kind: Kind = "timeseries"
    says: str = ""


class Dashboard(msgspec.Struct, frozen=True):
    """One dashboard. ``source`` is a plugin of Grafana."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    source: Literal["prometheus", "grafana-postgresql-datasource"] = "prometheus"


def _of(metric: Metric, suffix: str = "") -> str:
    return f'{metric.full_name}{suffix}{{job=~"$job"}}'


def _rate(metric: Metric, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({_of(metric)}[$__rate_interval]))"


def _quantile(metric: Metric, share: float) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({_of(metric, '_bucket')}[$__rate_interval])))"


def _quantiles(metric: Metric) -> dict[str, str]:
    return {f"p{share:.0%}".rstrip("%"): _quantile(metric, share) for share in (0.5, 0.9, 0.99)}


OVERVIEW = Dashboard(
    "headgate-overview",
    "headgate: overview",
    (
        Panel("Supervisors that are ready", {"": f"sum({_of(c.READY)})"}, kind="stat"),
        Panel(
            "Problems",
            {"{{severity}}": f"max by (severity) ({_of(c.PROBLEMS)})"},
            kind="stat",
            says="Lines of `headgate status`, which names them and says what to do first.",
        ),
        Panel("The database is away", {"{{instance}}": _of(c.DATABASE_AWAY)}, "s", kind="stat"),
        Panel(
            "Events",
            {
                "stored": _rate(c.EVENTS_STORED),
                "redelivered": _rate(c.EVENTS_REDELIVERED),
                "refused by {{by}}": _rate(c.EVENTS_REFUSED, "by"),
                "passed over": _rate(c.MESSAGES_PASSED_OVER),
            },
            "ops",
        ),
        Panel("Steps of tasks", {"{{outcome}}": _rate(c.STEPS_ENDED, "outcome")}, "ops"),
        Panel("Runs of DAGs", {"{{state}}": _rate(c.RUNS_ENDED, "state"), "made": _rate(c.RUNS_MADE)}, "ops"),
        Panel("Checks that fail", {"{{instance}} {{check}}": f"{_of(c.CHECK)} == 0"}),
        Panel("CPU", {"{{instance}} {{process}}": f"rate({_of(c.CPU)}[$__rate_interval])"}, "percentunit"),
        Panel("Memory", {"{{instance}} {{process}}": _of(c.MEMORY)}, "bytes"),
    ),
)

TRIGGERS = Dashboard(
    "headgate-triggers",
    "headgate: triggers and events",
    (
        Panel("Triggers", {"{{state}}": f"sum by (state) ({_of(c.TRIGGERS)})"}),
        Panel(
            "Share of the capacity in use",
            {"{{instance}}": f"sum by (instance) ({_of(c.TRIGGERS)}) / sum by (instance) ({_of(c.TRIGGER_CAPACITY)})"},
            "percentunit",
        ),
        Panel("Runs of triggers that ended", {"{{outcome}}": _rate(c.TRIGGER_RUNS, "outcome")}, "ops"),
        Panel("Runners that are up", {"": f"sum({_of(c.RUNNER_UP)})"}, kind="stat"),
        Panel("Runners that ended unasked", {"{{instance}}": f"increase({_of(c.RUNNER_ENDS)}[$__rate_interval])"}),
        Panel("Events that wait to be stored", {"{{instance}}": _of(c.INTAKE_WAITING)}),
        Panel("A transaction that stores events", _quantiles(c.SLICE_SECONDS), "s"),
        Panel("Events of one such transaction", _quantiles(c.SLICE_EVENTS)),
        Panel("A turn of the loop", _quantiles(c.LOOP_TURN), "s"),
        Panel("Streams: lag", {"{{stream}} ({{unit}})": _of(c.STREAM_LAG)}),
        Panel("Streams: held for", {"{{stream}}": _of(c.STREAM_HELD)}, "s"),
        Panel("Streams: messages in flight", {"{{stream}}": _of(c.STREAM_IN_FLIGHT)}),
        Panel("Streams: messages that wait for subscribers", {"{{stream}}": _of(c.STREAM_QUEUED)}),
        Panel("Streams: age of the oldest message in flight", {"{{stream}}": _of(c.STREAM_OLDEST)}, "s"),
        Panel("Streams: messages advanced", {"{{outcome}}": _rate(c.STREAM_ADVANCED, "outcome")}, "ops"),
        Panel("Streams: subscribers", {"{{state}}": f"sum by (state) ({_of(c.STREAM_SUBSCRIBERS)})"}),
        Panel(
            "Streams whose broker is elsewhere: 2 went back, 3 may have lost messages",
            {"{{stream}}": _of(c.STREAM_DRIFT)},
        ),
        Panel("Streams that end by errors", {"{{stream}}": f"increase({_of(c.STREAM_ENDS)}[$__rate_interval])"}),
        Panel(
            "Consumers: age of the oldest event that they have yet to get",
            {"{{consumer}}": f"max by (consumer) ({_of(c.CONSUMER_OLDEST)})"},
            "s",
        ),
    ),
)

TASKS = Dashboard(
    "headgate-tasks",
    "headgate: tasks",
    (
        Panel("Steps that workers have", {"{{instance}}": _of(c.STEPS_RUNNING)}),
        Panel("Workers", {"": f"sum({_of(c.WORKERS)})"}, kind="stat"),
        Panel("How long steps ran", _quantiles(c.STEP_SECONDS), "s"),
        Panel("Steps whose end is stored", {"{{outcome}}": _rate(c.STEPS_ENDED, "outcome")}, "ops"),
        Panel("Tasks taken over from dead supervisors", {"": _rate(c.TASKS_ADOPTED)}, "ops"),
        Panel("Runs that ended", {"{{state}}": _rate(c.RUNS_ENDED, "state")}, "ops"),
    ),
)

DATABASE = Dashboard(
    "headgate-database",
    "headgate: from its database",
    (
        Panel(
            "Supervisors",
            {
                "": "SELECT id AS epoch, hostname, pid, queues, workers, started_at, latest_heartbeat FROM triggerer "
                "WHERE stopped_at IS NULL AND fenced_at IS NULL ORDER BY id"
            },
            kind="table",
        ),
        Panel(
            "Runs that have not ended",
            {"": "SELECT state, count(*) FROM dag_run WHERE ended_at IS NULL GROUP BY state ORDER BY state"},
            kind="table",
        ),
        Panel(
            "Triggers that fail",
            {
                "": "SELECT id, classpath, failure_count, last_failed_at, left(last_error, 200) AS error FROM trigger "
                "WHERE failure_count > 0 AND finished_at IS NULL AND removed_at IS NULL "
                "ORDER BY failure_count DESC LIMIT 50"
            },
            kind="table",
        ),
        Panel(
            f"Events stored, of the newest {_NEWEST:,}",
            {
                "": "SELECT date_trunc('minute', stored_at) AS time, count(*) AS events "
                f"FROM (SELECT stored_at FROM trigger_event ORDER BY id DESC LIMIT {_NEWEST}) AS newest "
                "WHERE $__timeFilter(stored_at) GROUP BY 1 ORDER BY 1"
            },
        ),
        Panel(
            "Dead letters that nobody has resolved",
            {
                "": "SELECT trigger_id, content, count(*) AS letters FROM dead_letter WHERE resolved_at IS NULL "
                "GROUP BY trigger_id, content ORDER BY letters DESC LIMIT 50"
            },
            kind="table",
        ),
        Panel(
            "Runs that failed",
            {
                "": "SELECT dag.name AS dag, run_id, ended_at FROM dag_run JOIN dag ON dag.id = dag_run.dag_id "
                "WHERE state = 'failed' AND $__timeFilter(ended_at) ORDER BY ended_at DESC LIMIT 50"
            },
            kind="table",
        ),
    ),
    "grafana-postgresql-datasource",
)

ALL = (OVERVIEW, TRIGGERS, TASKS, DATABASE)


def as_json(dashboard: Dashboard) -> str:
    """Return a dashboard in the form that Grafana imports."""
    source = {"type": dashboard.source, "uid": "${source}"}
    chosen_source = {"name": "source", "label": "Source", "type": "datasource", "query": dashboard.source}
    chosen_job = {
        "name": "job",
        "label": "Job",
        "type": "query",
        "datasource": source,
        "query": f"label_values({c.READY.full_name}, job)",
        "includeAll": True,
        "allValue": ".+",
        "refresh": 2,
    }
    of_prometheus = dashboard.source == "prometheus"
    made = {
        "uid": dashboard.name,
        "title": dashboard.title,
        "tags": ["headgate"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [chosen_source, chosen_job] if of_prometheus else [chosen_source]},
        "panels": [_panel(number, panel, source) for number, panel in enumerate(dashboard.panels)],
    }
    return msgspec.json.format(msgspec.json.encode(made), indent=2).decode() + "\n"


def _panel(number: int, panel: Panel, source: Mapping[str, str]) -> dict[str, Any]:
    row, column = divmod(number, _PER_ROW)
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.says,
        "datasource": source,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            _target(chr(ord("A") + place), legend, query, panel, source)
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _target(ref: str, legend: str, query: str, panel: Panel, source: Mapping[str, str]) -> dict[str, Any]:
    if source["type"] == "prometheus":
        asked = {"expr": query, "legendFormat": legend or "__auto", "instant": panel.kind == "table"}
    else:
        shape = "time_series" if panel.kind == "timeseries" else "table"
        asked = {"rawSql": query, "rawQuery": True, "format": shape, "editorMode": "code"}
    return {"refId": ref, "datasource": source, **asked}
