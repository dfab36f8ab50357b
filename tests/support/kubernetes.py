"""The manifests of `deploy/kubernetes`, as files and built by `kubectl kustomize`."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tandem.protocol.curve import make_client, make_curve
from tests.support.serving import GUARD_SECONDS

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in FOLDER.glob("overlays/*/kustomization.yaml"))
KUBECTL = shutil.which("kubectl")

Manifest = dict[str, Any]


def sources() -> list[tuple[str, Manifest]]:
    """Return every manifest of the files with its place."""
    found = []
    for path in sorted(FOLDER.rglob("*.yaml")):
        if path.name != "kustomization.yaml":
            for manifest in yaml.safe_load_all(path.read_text()):
                found.append((f"{path.relative_to(FOLDER)}:{manifest['kind']}", manifest))
    return found


def write_secrets(folder: Path) -> None:
    """Write into a copy of the folder the files that the Secrets are made of."""
    secrets = folder / "secrets"
    make_curve(secrets / "keys")
    make_client(secrets / "keys", "frontend")
    (secrets / "api-keys.toml").write_text("")


def build(folder: Path, overlay: str) -> list[Manifest]:
    """Build an overlay of a copy of the folder."""
    assert KUBECTL is not None
    command = [KUBECTL, "kustomize", str(folder / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def workloads(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest, Manifest]]:
    """Yield each workload with its pod's spec and its only container."""
    for manifest in of_kind(manifests, "Deployment", "StatefulSet"):
        pod = manifest["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        yield manifest, pod, container


def pod_labels(manifests: list[Manifest]) -> list[dict[str, str]]:
    return [manifest["spec"]["template"]["metadata"]["labels"] for manifest, _, _ in workloads(manifests)]


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()
