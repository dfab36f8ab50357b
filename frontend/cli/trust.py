"""Certificates that the terminal commands trust."""

import ssl
from dataclasses import dataclass


@dataclass(frozen=True)
class Trust:
    """Choice of the certificates that a server's has to be signed by.

    Unlike a TLS context it can be sent to other processes.
    """

    ca_file: str | None = None
    """Path of a PEM file whose certificates are trusted instead of the usual ones; None for those."""
    is_any: bool = False
    """True if every certificate is accepted, and with it anyone in between."""

    def context(self) -> ssl.SSLContext:
        """Build the TLS context of a client.

        Raises OSError for a file that cannot be read or holds no certificates.
        """
        if self.ca_file is not None:
            return ssl.create_default_context(cafile=self.ca_file)
        import httpx  # Here, because every command has these flags, and `tandem --help` needs no HTTP client.

        return httpx.create_ssl_context(verify=not self.is_any)
