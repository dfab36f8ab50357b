"""Flags of who may ask: web origins and TLS. Those of keys are in `api_keys`."""

from pathlib import Path

from tandem.frontend.config import FrontendConfig
from tandem.frontend.flags.flag import Flag

ACCESS = "access control"
"""Title of the group."""

# fmt: off
ACCESS_FLAGS = (
    Flag("cors_origin", ACCESS, "web origin whose pages may send requests, * for all; may be given several times",
         metavar="ORIGIN", is_everyday=True, is_repeated=True, default=[], default_text="none", struct=FrontendConfig,
         field="cors_origins", to_field=tuple),
    Flag("tls_cert", ACCESS, "certificate chain in PEM format; enables https", Path, metavar="FILE", is_everyday=True,
         struct=FrontendConfig),
    Flag("tls_key", ACCESS, "unencrypted private key of the certificate in PEM format", Path, metavar="FILE",
         is_everyday=True, struct=FrontendConfig),
)
# fmt: on
