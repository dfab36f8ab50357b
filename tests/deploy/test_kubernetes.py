"""The Kubernetes manifests: valid, complete, and in agreement with each other, the image and the flags."""

import base64
import re
import shutil
from pathlib import Path

import kubernetes_validate
import pytest

from tandem.frontend.cli.main import build_parser
from tandem.protocol.curve import load_curve
from tests.support.kubernetes import (
    FOLDER,
    KUBECTL,
    OVERLAYS,
    Manifest,
    build,
    matches,
    of_kind,
    pod_labels,
    sources,
    workloads,
    write_secrets,
)
from tests.support.plain_image import stages

VERSION = "1.33"
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="kubectl, which builds the overlays, is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("kubernetes") / "copy"
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("keys", "api-keys.toml"))
    write_secrets(copy)
    return copy


@pytest.fixture(scope="module", params=OVERLAYS)
def manifests(request: pytest.FixtureRequest, folder: Path) -> list[Manifest]:
    return build(folder, request.param)


def test_there_are_overlays_of_one_engine_and_of_several() -> None:
    assert OVERLAYS == ["one-engine", "several-engines"]


@pytest.mark.parametrize("manifest", [pytest.param(manifest, id=place) for place, manifest in sources()])
def test_a_manifest_fits_the_schema_of_its_kind(manifest: Manifest) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


@needs_kubectl
def test_an_overlay_fits_the_schemas(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        kubernetes_validate.validate(manifest, VERSION, strict=True)


@needs_kubectl
def test_every_name_that_is_referred_to_exists(manifests: list[Manifest]) -> None:
    names = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    for manifest in manifests:
        assert manifest["kind"] == "Namespace" or manifest["metadata"]["namespace"] == "tandem"
    for workload, pod, container in workloads(manifests):
        secrets = {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        assert {("Secret", secret) for secret in secrets} <= names
        assert {("ConfigMap", source["configMapRef"]["name"]) for source in container["envFrom"]} <= names
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        if workload["kind"] == "StatefulSet":
            assert ("Service", workload["spec"]["serviceName"]) in names
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in names
    (ingress,) = of_kind(manifests, "Ingress")
    (rule,) = ingress["spec"]["rules"]
    for path in rule["http"]["paths"]:
        assert ("Service", path["backend"]["service"]["name"]) in names
        assert path["path"] == "/v1", "nothing is passed on that belongs to operators"


@needs_kubectl
def test_selectors_and_ports_are_those_of_pods(manifests: list[Manifest]) -> None:
    labels = pod_labels(manifests)
    ports = {port["name"] for _, _, container in workloads(manifests) for port in container["ports"]}
    for workload, _, _ in workloads(manifests):
        selected = [one for one in labels if matches(workload["spec"]["selector"]["matchLabels"], one)]
        assert len(selected) == 1, "workloads share no pods"
    for service in of_kind(manifests, "Service"):
        assert any(matches(service["spec"]["selector"], one) for one in labels)
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for policy in of_kind(manifests, "NetworkPolicy", "PodDisruptionBudget"):
        selector = policy["spec"].get("podSelector") or policy["spec"]["selector"]
        assert any(matches(selector["matchLabels"], one) for one in labels)
    covered = [
        sum(matches(budget["spec"]["selector"]["matchLabels"], one) for one in labels)
        for budget in of_kind(manifests, "PodDisruptionBudget")
    ]
    assert all(covered)


@needs_kubectl
def test_frontends_reach_the_engine_of_their_own(manifests: list[Manifest]) -> None:
    maps = {found["metadata"]["name"]: found["data"] for found in of_kind(manifests, "ConfigMap")}
    services = {found["metadata"]["name"]: found["spec"] for found in of_kind(manifests, "Service")}
    reached = []
    for workload, _, container in workloads(manifests):
        if workload["kind"] == "Deployment":
            endpoint = maps[container["envFrom"][0]["configMapRef"]["name"]]["ENDPOINT"]
            name, port = re.fullmatch(r"tcp://([a-z-]+):(\d+)", endpoint).groups()  # type: ignore[union-attr]
            served = {each["port"]: each["targetPort"] for each in services[name]["ports"]}
            assert served == {int(port): "engine", int(port) + 1: "beat"}
            instance = workload["spec"]["selector"]["matchLabels"].get("app.kubernetes.io/instance")
            assert services[name]["selector"].get("app.kubernetes.io/instance") == instance
            reached.append(name)
    engines = [one for one in workloads(manifests) if one[0]["kind"] == "StatefulSet"]
    assert len(set(reached)) == len(reached) == len(engines)


@needs_kubectl
def test_network_policies_let_frontends_reach_engines_and_nobody_else(manifests: list[Manifest]) -> None:
    labels = pod_labels(manifests)
    for policy in of_kind(manifests, "NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        if "engine" in policy["metadata"]["name"]:
            inner, ops = policy["spec"]["ingress"]
            allowed = [one for one in labels if matches(inner["from"][0]["podSelector"]["matchLabels"], one)]
            assert [one["app.kubernetes.io/component"] for one in allowed] == ["frontend"]
            assert [port["port"] for port in inner["ports"] + ops["ports"]] == ["engine", "beat", "ops"]


def test_commands_are_accepted_and_agree_with_ports_probes_and_times() -> None:
    parser = build_parser()
    for workload, pod, container in workloads([manifest for _, manifest in sources()]):
        arguments = parser.parse_args(container["args"])
        assert "--ops-port=8100" in container["args"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["ops"] == arguments.ops_port
        probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
        assert {probe["port"] for probe in probes.values()} == {"ops"}
        assert [probes[name]["path"] for name in ("startup", "liveness", "readiness")] == [
            "/health/live", "/health/live", "/health/ready",
        ]  # fmt: skip
        assert pod["terminationGracePeriodSeconds"] == 45
        if workload["kind"] == "Deployment":
            assert ports["http"] == arguments.port
            assert (arguments.shutdown_delay, arguments.drain_timeout) == (5, 25)
            readiness = container["readinessProbe"]
            assert readiness["periodSeconds"] * readiness["failureThreshold"] < arguments.shutdown_delay
        else:
            assert (ports["engine"], ports["beat"]) == (7000, 7001)
            assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_pods_run_as_the_user_of_the_image_on_a_root_that_they_cannot_write() -> None:
    for _, pod, container in workloads([manifest for _, manifest in sources()]):
        user, group = map(int, stages()[container["name"]].last("USER").split(":"))
        security = pod["securityContext"]
        assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (user, group, group)
        assert security["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        environment = dict(
            pair.split("=") for pair in stages()[container["name"]].last("ENV").split() if "$" not in pair
        )
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert writable == {environment["HOME"], "/tmp"}


@needs_kubectl
def test_keys_load_from_a_secret_as_the_kubelet_lays_it_out(manifests: list[Manifest], tmp_path: Path) -> None:
    """It writes into a folder of its own, to which links lead, so that all files change at once."""
    secrets = {found["metadata"]["name"]: found["data"] for found in of_kind(manifests, "Secret")}
    for workload, pod, _ in workloads(manifests):
        (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "keys")
        data = secrets[volume["secret"]["secretName"]]
        items = volume["secret"].get("items") or [{"key": key, "path": key} for key in data]
        mount = tmp_path / workload["metadata"]["name"]
        for item in items:
            file = mount / "..2026_01_01" / item["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(base64.b64decode(data[item["key"]]))
        (mount / "..data").symlink_to("..2026_01_01")
        for name in {item["path"].partition("/")[0] for item in items}:
            (mount / name).symlink_to(Path("..data") / name)
        curve = load_curve(mount)
        if workload["kind"] == "StatefulSet":
            assert curve.secret is not None
            assert curve.clients is not None
            assert [path.name for path in curve.clients.glob("*.key")] == ["frontend.key"]
        else:
            assert (curve.secret, curve.client is not None) == (None, True)
