"""Debian's nginx with the files of `deploy/`, on free ports of the loopback."""

import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.support.certificate import write_certificate
from tests.support.serving import GUARD_SECONDS, free_port, until

ROOT = Path(__file__).parents[2]
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


HAS_IPV6 = _has_ipv6()
"""True if the machine has an IPv6 loopback; without one, nginx could not listen there."""
MAIN = """
pid nginx.pid;
daemon off;
worker_processes 1;
error_log stderr warn;
{user}
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    include conf.d/*.conf;
}}
"""
"""The configuration around a package's files in conf.d, as Debian's nginx.conf has it."""


class Nginx:
    """An nginx that passes requests on to frontends; it listens on entry and leaves no process behind."""

    def __init__(
        self, folder: Path, upstreams: Sequence[int], files: Sequence[str] = ("upstream.conf", "server.conf")
    ) -> None:
        """Write files of `deploy/nginx` into a folder.

        upstreams: ports of the frontends.
        """
        self.folder = folder
        self.port, self.tls_port = free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None
        (folder / "conf.d").mkdir(parents=True)
        write_certificate(folder)
        changes = [
            ("listen 80", f"listen 127.0.0.1:{self.port}"),
            ("listen 443", f"listen 127.0.0.1:{self.tls_port}"),
            ("listen [::]:80", f"listen [::1]:{self.port}"),
            ("listen [::]:443", f"listen [::1]:{self.tls_port}"),
            ("/etc/nginx/tandem", str(folder)),
        ]
        for name in (*files, "locations.conf"):
            text = (ROOT / "deploy" / "nginx" / name).read_text()
            for old, new in changes:
                text = text.replace(old, new)
            if not HAS_IPV6:
                text = re.sub(r"^ *listen \[::1\].*\n", "", text, flags=re.MULTILINE)
            for line in re.findall(r"^ *server \S+:8000 .*$", text, re.MULTILINE):
                lines = [re.sub(r"\S+:8000", f"127.0.0.1:{port}", line) for port in upstreams]
                text = text.replace(line, "\n".join(lines))
            (folder / ("" if name == "locations.conf" else "conf.d") / name).write_text(text)
        (folder / "nginx.conf").write_text(MAIN.format(user="user root;" if os.getuid() == 0 else ""))

    def command(self, *more: str) -> list[str]:
        assert NGINX is not None
        return [NGINX, "-e", "stderr", "-p", str(self.folder), "-c", "nginx.conf", *more]

    @property
    def trust(self) -> ssl.SSLContext:
        """Return a new context that trusts the certificate."""
        return ssl.create_default_context(cafile=str(self.folder / "cert.pem"))

    def check(self) -> str:
        """Return what `nginx -t` says beyond that all is well."""
        done = subprocess.run(self.command("-t"), capture_output=True, text=True, timeout=GUARD_SECONDS, check=True)
        lines = done.stderr.splitlines()
        return "\n".join(line for line in lines if not line.endswith(("syntax is ok", "test is successful")))

    def __enter__(self) -> "Nginx":
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=subprocess.STDOUT)
        until(self.listens, f"nginx; it says {self.said}")
        return self

    def listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.said
        return (self.folder / "nginx.pid").exists()

    @property
    def said(self) -> str:
        return (self.folder / "log").read_text()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(GUARD_SECONDS)
        if error is not None:
            print(self.said)
