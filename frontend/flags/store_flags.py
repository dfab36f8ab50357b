"""Flags of stored responses."""

from pathlib import Path

from tandem.frontend.config import MEBIBYTE, FrontendConfig
from tandem.frontend.flags.flag import Flag
from tandem.frontend.store.store import StoreLimits

_STORE = "stored responses"

# fmt: off
STORE_FLAGS = (
    Flag("store", _STORE, "on: store the responses of /v1/responses unless a request says otherwise; off: store none",
         choices=("on", "off"), default="on", struct=FrontendConfig, to_field=lambda word: word == "on"),
    Flag("state_dir", _STORE, "directory of the store, which survives a restart; all frontends of a service on one "
         "machine share it", Path, metavar="DIR", struct=FrontendConfig, is_forwarded=False,
         default_text="a private directory that is removed at the end"),
    Flag("store_size", _STORE, "maximum size of the store in MiB; the API key that has stored most makes room", int,
         (1, 2**20), default=StoreLimits().max_bytes // MEBIBYTE, struct=StoreLimits, field="max_bytes",
         to_field=lambda size: size * MEBIBYTE),
    Flag("store_size_per_key", _STORE, "maximum size in MiB of what one API key stores; its own conversations make "
         "room", int, (1, 2**20), default_text="no limit but --store-size", struct=StoreLimits, field="max_owner_bytes",
         to_field=lambda size: size and size * MEBIBYTE),
    Flag("store_ttl", _STORE, "seconds that a conversation is stored after its last response", float,
         (1, 1e10), struct=StoreLimits, field="ttl"),
)
# fmt: on
