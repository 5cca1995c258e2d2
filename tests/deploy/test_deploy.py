"""The files of `deploy/` name only commands, settings, paths and ports that there are; no engine runs them here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from tests.documents import ROOT

from headgate.cli.main import main
from headgate.supervisor.config import Settings
from headgate.supervisor.leaving import DRAIN_MARGIN_S, HANG_MARGIN_S
from headgate.supervisor.setting_sources import resolve_settings

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
LEAVES_WITHIN_S = Settings().drain_s + DRAIN_MARGIN_S + HANG_MARGIN_S
SETTINGS = {f"HEADGATE_{field.name.upper()}" for field in msgspec.structs.fields(Settings)}


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Dockerfile, with its lines joined."""
    joined = re.sub(r"\\\n", " ", "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#")))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def image_environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for word, rest in instructions() if word == "ENV" for pair in rest.split())


def kubernetes(folder: str = "kubernetes") -> list[dict[str, Any]]:
    """The objects that `kubectl apply` would get, or those of the files if it is not installed."""
    if shutil.which("kubectl") is None:
        names = yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text())["resources"]
        texts = [(DEPLOY / folder / name).read_text() for name in names]
    else:
        made = subprocess.run(
            ["kubectl", "kustomize", str(DEPLOY / folder)], capture_output=True, text=True, check=True
        )
        texts = [made.stdout]
    return [found for text in texts for found in yaml.safe_load_all(text)]


def assert_is_a_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == 0, words
    assert f"Usage: headgate {words[0]}" in capsys.readouterr().out


def test_the_image_runs_commands_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    last = dict(instructions())
    assert json.loads(last["ENTRYPOINT"])[-1] == "headgate"
    assert_is_a_command(json.loads(last["CMD"]), capsys)
    program, *words = json.loads(last["HEALTHCHECK"].rpartition(" CMD ")[2])
    assert program == "headgate"
    assert_is_a_command(words, capsys)
    assert last["USER"].isdigit()
    assert last["USER"] != "0"


def test_its_settings_are_settings() -> None:
    given = {name: value for name, value in image_environment().items() if name != "PATH"}
    settings = resolve_settings(environ=given, cwd=Path("/")).settings
    assert settings.dags_folder == Path("/srv/headgate/dags")
    assert settings.metrics_address is not None
    assert str(settings.metrics_address.port) == dict(instructions())["EXPOSE"]
    assert dict(instructions())["VOLUME"] == str(settings.home)


def test_the_image_gets_all_that_is_packaged() -> None:
    packaged = re.search(r"^packages = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert packaged is not None
    roots = {path.strip(' "').partition("/")[0] for path in packaged.group(1).split(",")}
    copied = {rest.split()[0] for word, rest in instructions() if word == "COPY"}
    let_through = set(re.findall(r"^!(\S+)", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE))
    assert roots <= copied & let_through
    assert {"pyproject.toml", "README.md", "LICENSE"} <= let_through


def test_compose_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    ours = {name: service for name, service in services.items() if service["image"] == "headgate"}
    assert "supervisor" in ours
    for service in ours.values():
        assert_is_a_command(service["command"], capsys)
        assert set(service["environment"]) <= SETTINGS
    assert float(ours["supervisor"]["stop_grace_period"].removesuffix("s")) > LEAVES_WITHIN_S
    assert (DEPLOY / ours["supervisor"]["build"]["context"]).resolve() == ROOT
    assert (ROOT / ours["supervisor"]["build"]["dockerfile"]).is_file()


def test_kubernetes_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    objects = {found["kind"]: found for found in kubernetes()}
    assert set(objects) == {"StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    pod = objects["StatefulSet"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > LEAVES_WITHIN_S
    assert str(pod["securityContext"]["runAsUser"]) == dict(instructions())["USER"]
    (container,) = pod["containers"]
    assert_is_a_command(container["args"], capsys)
    assert {variable["name"] for variable in container["env"]} <= SETTINGS
    (port,) = container["ports"]
    assert str(port["containerPort"]) == dict(instructions())["EXPOSE"]
    probes = {kind: container[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert [probe["path"] for probe in probes.values()] == ["/livez", "/livez", "/readyz"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted["home"] == image_environment()["HEADGATE_HOME"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_what_selects_pods_selects_those_of_the_supervisors() -> None:
    objects = {found["kind"]: found["spec"] for found in kubernetes() + kubernetes("kubernetes/monitoring")}
    labels = objects["StatefulSet"]["template"]["metadata"]["labels"].items()
    selectors = [
        objects["StatefulSet"]["selector"]["matchLabels"],
        objects["Service"]["selector"],
        objects["PodDisruptionBudget"]["selector"]["matchLabels"],
        objects["NetworkPolicy"]["podSelector"]["matchLabels"],
        objects["PodMonitor"]["selector"]["matchLabels"],
    ]
    assert all(selector and selector.items() <= labels for selector in selectors)
