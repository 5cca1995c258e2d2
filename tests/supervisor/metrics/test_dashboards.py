"""The dashboards of Grafana: they are whole, and what they ask can be asked."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.supervisor.metrics.test_figures import NEEDS_PROMTOOL

from headgate.store.db.engine import open_engine
from headgate.supervisor.metrics import catalogue, dashboards
from headgate.supervisor.metrics.dashboards import ALL, Dashboard, as_json


def targets(*chosen: Dashboard) -> list[dict[str, Any]]:
    return [
        target
        for dashboard in chosen
        for panel in json.loads(as_json(dashboard))["panels"]
        for target in panel["targets"]
    ]


@pytest.mark.parametrize("dashboard", ALL, ids=lambda dashboard: dashboard.name)
def test_panels_have_a_place_of_their_own_and_a_source(dashboard: Dashboard) -> None:
    made = json.loads(as_json(dashboard))
    taken = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in made["panels"]]
    assert len(set(taken)) == len(taken) == len(dashboard.panels)
    assert max(panel["gridPos"]["x"] + panel["gridPos"]["w"] for panel in made["panels"]) <= 24
    assert {variable["name"] for variable in made["templating"]["list"]} >= {"source"}
    for target in targets(dashboard):
        assert target["datasource"] == {"type": dashboard.source, "uid": "${source}"}


def test_every_metric_is_on_a_dashboard() -> None:
    asked = " ".join(target["expr"] for target in targets(dashboards.OVERVIEW, dashboards.TRIGGERS, dashboards.TASKS))
    named = {re.sub("_bucket$", "", name) for name in re.findall(r"\bheadgate_\w+", asked)}
    internal = {catalogue.LEASE_LASTS, catalogue.DATABASE_ERRORS}  # seen in the checks, and in how long it is away
    assert named == {metric.full_name for metric in catalogue.ALL if metric not in internal}


@NEEDS_PROMTOOL
def test_prometheus_understands_what_it_is_asked(tmp_path: Path) -> None:
    asked = [target["expr"] for target in targets(dashboards.OVERVIEW, dashboards.TRIGGERS, dashboards.TASKS)]
    rules = [
        {"record": f"asked:{number}", "expr": query.replace("$__rate_interval", "5m").replace("$job", ".+")}
        for number, query in enumerate(asked)
    ]
    (tmp_path / "asked.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    checked = subprocess.run(
        ["promtool", "check", "rules", str(tmp_path / "asked.yml")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(asked)} rules found" in checked.stdout


def test_the_database_understands_what_it_is_asked(postgres_url: str) -> None:
    engine = open_engine(postgres_url)
    try:
        with engine.connect() as connection:
            for target in targets(dashboards.DATABASE):
                filtered = re.sub(r"\$__timeFilter\((\w+)\)", r"\1 > now() - interval '6 hours'", target["rawSql"])
                names = list(connection.exec_driver_sql(filtered).keys())
                assert (names[0] == "time") == (target["format"] == "time_series")
    finally:
        engine.dispose()


def test_they_are_written_into_a_folder(tmp_path: Path) -> None:
    from headgate.cli.main import main

    assert main(["metrics", "dashboards", str(tmp_path / "new")]) == 0
    written = {path.name: json.loads(path.read_text())["title"] for path in (tmp_path / "new").iterdir()}
    assert written == {f"{dashboard.name}.json": dashboard.title for dashboard in ALL}
