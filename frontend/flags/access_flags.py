"""Flags of who may ask: keys, web origins and TLS.

Those of keys without names are in `key_sources`.
"""

import argparse
from pathlib import Path
from typing import get_args

from tandem.frontend.config import FrontendConfig, PrefixCacheScope
from tandem.frontend.flags.flag import Flag

ACCESS = "access control"
"""Title of the group."""


def _prefix(text: str) -> str:
    if text and (not text.startswith("/") or text.startswith("//")):
        raise argparse.ArgumentTypeError(f"{text!r} must begin with a slash, such as /tandem")
    return text.rstrip("/")


# fmt: off
ACCESS_FLAGS = (
    Flag("api_keys", ACCESS, "API keys with names, rights and limits, in TOML; followed while the server runs. `tandem "
         "api-key NAME` prints a key and its table", Path, metavar="FILE", is_everyday=True, struct=FrontendConfig,
         field="api_keys_file"),
    Flag("prefix_cache_scope", ACCESS, "who shares cached prefixes: key, requests with the same API key; server, all "
         "requests, so that a user can find out by time or usage whether others sent a prefix. A cache_salt counts "
         "within its key", choices=get_args(PrefixCacheScope), struct=FrontendConfig),
    Flag("no_special_tokens_in_text", ACCESS, "encode special tokens that clients write in messages, tools and prompts "
         "as plain text, and refuse them in prompts of ids; those of the chat template stay", is_everyday=True,
         is_switch=True, struct=FrontendConfig),
    Flag("cors_origin", ACCESS, "web origin whose pages may send requests, * for all; may be given several times",
         metavar="ORIGIN", is_everyday=True, is_repeated=True, default=[], default_text="none", struct=FrontendConfig,
         field="cors_origins", to_field=tuple),
    Flag("allowed_hosts", ACCESS, "names that the Host header of a request may have, separated by commas, *.DOMAIN for "
         "all below one, * for all; may be given several times", metavar="NAMES", is_everyday=True, is_repeated=True,
         default=[], default_text="localhost and loopback addresses if all hosts are such addresses, otherwise *",
         struct=FrontendConfig, to_field=tuple),
    Flag("forwarded_allow_ips", ACCESS, "addresses and networks, separated by commas, of proxies whose X-Forwarded-For "
         "and X-Forwarded-Proto are believed; unix stands for the peers of a Unix socket, * for all",
         metavar="ADDRESSES", struct=FrontendConfig, to_field=lambda text: tuple(text.replace(" ", "").split(",")),
         default="127.0.0.1,::1,unix"),
    Flag("root_path", ACCESS, "prefix of the paths in a proxy that passes it on or removes it, such as /tandem",
         _prefix, metavar="PATH", default="", default_text="none", struct=FrontendConfig),
    Flag("tls_cert", ACCESS, "certificate chain in PEM format; enables https", Path, metavar="FILE", is_everyday=True,
         struct=FrontendConfig),
    Flag("tls_key", ACCESS, "unencrypted private key of the certificate in PEM format", Path, metavar="FILE",
         is_everyday=True, struct=FrontendConfig),
)
# fmt: on
