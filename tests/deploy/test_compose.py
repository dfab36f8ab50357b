"""The compose file: valid, and in agreement with the files that it mounts, the image and the flags."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tandem.frontend.cli.main import build_parser
from tests.support.nginx import NGINX, Nginx
from tests.support.plain_image import stages
from tests.support.serving import GUARD_SECONDS, free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
SCHEMA = Path(__file__).parent / "vendor" / "compose-spec" / "compose-spec.json"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKER_COMPOSE = shutil.which("docker-compose")


def test_the_file_fits_the_schema_of_the_specification() -> None:
    jsonschema.Draft7Validator(json.loads(SCHEMA.read_text())).validate(COMPOSE)


@pytest.mark.skipif(DOCKER_COMPOSE is None, reason="docker-compose is not installed")
def test_docker_compose_accepts_the_file(tmp_path: Path) -> None:
    assert DOCKER_COMPOSE is not None
    copy = shutil.copy(DEPLOY / "compose.yml", tmp_path)
    (tmp_path / "secrets").mkdir()
    for secret in COMPOSE["secrets"].values():
        (tmp_path / secret["file"]).touch()
    command = [DOCKER_COMPOSE, "-f", copy, "config", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_there_is_everything_that_belongs_to_a_service() -> None:
    assert set(SERVICES) == {"engine", "frontend", "nginx", "prometheus", "grafana"}
    for name, service in SERVICES.items():
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"]), name
        assert set(service.get("depends_on", ())) <= set(SERVICES), name
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), "images are pinned"


@pytest.mark.parametrize("name", ["engine", "frontend"])
def test_tandem_accepts_its_command_and_has_time_to_drain(name: str) -> None:
    service = SERVICES[name]
    arguments = build_parser().parse_args(service["command"])
    assert (arguments.command, arguments.ops_port) == (name, 8100)
    assert "--ops-port=8100" in service["command"]
    assert service["build"]["target"] == name in stages()
    assert service["stop_grace_period"] == "45s"
    if name == "frontend":
        assert (arguments.shutdown_delay, arguments.drain_timeout) == (5, 25)
    # What is not a volume cannot be written.
    assert service["read_only"]
    environment = dict(pair.split("=") for pair in stages()[name].last("ENV").split() if "$" not in pair)
    mounted = {volume.split(":")[1] for volume in service["volumes"]}
    assert mounted == {environment["HOME"], "/run/tandem"}
    assert arguments.endpoint.startswith("ipc:///run/tandem/")


def test_the_engine_has_the_gpu_alone() -> None:
    (device,) = SERVICES["engine"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert "resources" not in SERVICES["frontend"]["deploy"]


def test_only_the_loopback_of_the_host_has_open_ports() -> None:
    ports = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(ports) == {"nginx", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for each in ports.values() for port in each)


def test_prometheus_asks_the_services_by_their_names() -> None:
    (job,) = yaml.safe_load((DEPLOY / "monitoring" / "prometheus-compose.yml").read_text())["scrape_configs"]
    asked = {name: found["port"] for found in job["dns_sd_configs"] for name in found["names"]}
    assert asked == {"engine": 8100, "frontend": 8100}


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_nginx_accepts_its_configuration(tmp_path: Path) -> None:
    nginx = Nginx(tmp_path / "nginx", [free_port()], files=("compose.conf",))
    assert nginx.check() == ""
