"""Certificates that the terminal commands trust."""

import ssl
from dataclasses import dataclass


@dataclass(frozen=True)
class Trust:
    """Choice of trusted certificates.

    Unlike a TLS context it can be pickled.
    """

    ca_file: str | None = None
    """Path of a PEM file to use instead of the default certificates; None for the defaults."""
    is_any: bool = False
    """True to disable verification."""

    def context(self) -> ssl.SSLContext:
        """Build the TLS context of a client.

        Raises OSError for a file that is unreadable or has no certificates.
        """
        if self.ca_file is not None:
            return ssl.create_default_context(cafile=self.ca_file)
        import httpx  # Imported here, because every command has these flags, and `tandem --help` needs no HTTP client.

        return httpx.create_ssl_context(verify=not self.is_any)
