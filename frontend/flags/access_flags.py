"""Flags of who may ask: keys, web origins and TLS.

Those of keys without names are in `key_sources`.
"""

from pathlib import Path

from tandem.frontend.config import FrontendConfig
from tandem.frontend.flags.flag import Flag

ACCESS = "access control"
"""Title of the group."""

# fmt: off
ACCESS_FLAGS = (
    Flag("api_keys", ACCESS, "API keys with names, rights and limits, in TOML; followed while the server runs. `tandem "
         "api-key NAME` prints a key and its table", Path, metavar="FILE", is_everyday=True, struct=FrontendConfig,
         field="api_keys_file"),
    Flag("cors_origin", ACCESS, "web origin whose pages may send requests, * for all; may be given several times",
         metavar="ORIGIN", is_everyday=True, is_repeated=True, default=[], default_text="none", struct=FrontendConfig,
         field="cors_origins", to_field=tuple),
    Flag("tls_cert", ACCESS, "certificate chain in PEM format; enables https", Path, metavar="FILE", is_everyday=True,
         struct=FrontendConfig),
    Flag("tls_key", ACCESS, "unencrypted private key of the certificate in PEM format", Path, metavar="FILE",
         is_everyday=True, struct=FrontendConfig),
)
# fmt: on
