"""Certificates for servers of the tests."""

import subprocess
from pathlib import Path


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a self-signed certificate of the loopback, and its key; return both paths."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", str(key), "-out", str(cert), "-subj", "/CN=local", "-addext", "subjectAltName=IP:127.0.0.1,IP:::1"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return cert, key
