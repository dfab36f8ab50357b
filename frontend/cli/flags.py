"""Flags of the commands that connect to a server, and the request fields that they set."""

import argparse
import json
import os
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem.frontend.access.api_key import Right
from tandem.frontend.cli.server_address import server_url
from tandem.frontend.cli.trust import Trust
from tandem.frontend.errors import ApiError
from tandem.frontend.flags.flag import COUNT, MAX_SECONDS, Flag
from tandem.frontend.hub.options import HubOptions
from tandem.frontend.request.field_types import CheckedType
from tandem.frontend.request.fields import Field
from tandem.frontend.request.options import FLAG_FIELDS
from tandem.protocol.commands import MAX_PRIORITY, SWAP_MODES
from tandem.protocol.engine_options import flag_name

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "TANDEM_API_KEY"


def _right(text: str) -> str:
    if text not in list(Right):
        raise argparse.ArgumentTypeError(f"{text!r} is not a right; use {', '.join(Right)}")
    return text


def lora_module(text: str) -> tuple[str, str]:
    """Parse the name and the path of an adapter: NAME=PATH, or vLLM's JSON object."""
    if text.startswith("{"):
        try:
            fields = json.loads(text)
            name, path = fields["name"], fields["path"]
        except (ValueError, TypeError, KeyError):
            raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object with name and path") from None
    else:
        name, _, path = text.partition("=")
    if not (isinstance(name, str) and isinstance(path, str) and name.strip() and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, path


# fmt: off
CLIENT_FLAGS = (
    Flag("timeout", "server", "seconds without a byte after which the command gives up on an answer", float,
         (0.001, MAX_SECONDS), default=600.0),
)
BATCH_FLAGS = (
    Flag("concurrency", "", "number of requests in flight at a time", int, (1, 4096), default=32),
    Flag("retries", "", "number of retries of a request while the server is busy or unreachable", int, (0, 1000),
         default=8),
)
INSPECT_FLAGS = (
    Flag("watch", "", "refresh the output every SECONDS until Ctrl-C", float, (0.1, MAX_SECONDS), metavar="SECONDS"),
)
SWAP_FLAGS = (
    Flag("running", "", "what happens to running requests: wait lets them end before, while others queue; abort ends "
         "them in an error; restart computes their tokens again and continues with the new weights",
         choices=SWAP_MODES, default="wait"),
    Flag("grace", "", "seconds that running requests may take to end, with wait; then the swap is cancelled", float,
         (0, 86400), metavar="SECONDS", default=300.0),
    Flag("weight_version", "", "version that outputs report", metavar="NAME",
         default_text="the highest number so far plus 1"),
    Flag("stage_only", "", "only check and read the checkpoint; the same command without this activates it",
         is_switch=True),
)
API_KEY_FLAGS = (
    Flag("rights", "", f"rights of the key, of {', '.join(Right)}", _right, metavar="RIGHT", is_list=True,
         default=[], default_text=Right.GENERATE.value),
    Flag("max_concurrent", "", "most sequences in progress of all keys of this name", int, COUNT,
         default_text="no limit of the key"),
    Flag("tokens_per_minute", "", "most tokens of prompts and outputs a minute of all keys of this name", int, COUNT,
         default_text="no limit"),
    Flag("max_priority", "", "greatest priority of a request", int, (-MAX_PRIORITY, MAX_PRIORITY), default=0),
)
_HUB = "model hub"
HUB_FLAGS = (
    Flag("revision", _HUB, "branch, tag or commit of a model that is given by its name on the Hugging Face hub",
         metavar="REVISION", is_everyday=True, default_text="main"),
    Flag("hf_token", _HUB, "access token for gated and private models; other users can see it in the process list",
         metavar="TOKEN", is_everyday=True, default_text="$HF_TOKEN, or that of `hf auth login`"),
    Flag("download_dir", _HUB, "folder of the cache to download to, in the layout of huggingface_hub", Path,
         metavar="DIR", is_everyday=True, default_text="$HF_HUB_CACHE, or hub in $HF_HOME, which is "
         "~/.cache/huggingface"),
)
LORA_FLAGS = (
    Flag("lora_modules", "engine core", "adapters to load at the start, each as NAME=PATH with a folder in PEFT's "
         "format or a name on the Hugging Face hub; requests choose one by its name as their model", lora_module,
         metavar="NAME=PATH", is_everyday=True, is_list=True, default=[], default_text="none"),
)
# fmt: on


def hub_options(arguments: argparse.Namespace) -> HubOptions:
    """Build the hub options from the flags."""
    return HubOptions(arguments.revision, arguments.hf_token, arguments.download_dir)


def add_server_arguments(parser: argparse.ArgumentParser, aliases: Sequence[str] = ()) -> None:
    """Add the flags of the server's address and credentials.

    aliases: further names of --url.

    """
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        *aliases,
        default=DEFAULT_URL,
        type=_server_url,
        metavar="URL",
        help=f"address such as HOST:PORT or https://HOST, http+unix://PATH for a Unix socket (default: {DEFAULT_URL})",
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"API key to send; other users can see it in the process list (default: the first key in ${KEY_VARIABLE})",
    )
    certificates = group.add_mutually_exclusive_group()
    certificates.add_argument(
        "--ca-cert",
        type=_certificates,
        metavar="FILE",
        help="PEM file of the certificates to trust, instead of the usual",
    )
    certificates.add_argument(
        "--insecure", action="store_true", help="accept any certificate of the server, and with it anyone in between"
    )
    for flag in CLIENT_FLAGS:
        flag.add_to(group)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of generation.

    Fields without a flag are left to the server.
    """
    group = parser.add_argument_group("answer")
    group.add_argument("--model", metavar="NAME", help="name of the model (default: the first one of the server)")
    for field in FLAG_FIELDS:
        group.add_argument(flag_name(field.name), type=_value_of(field), metavar="N", help=field.help)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="text that ends the answer; may be given several times"
    )
    group.add_argument("--json-schema", type=_schema, metavar="FILE", help="file with the JSON schema of the answer")
    group.add_argument("--usage", action="store_true", help="print token counts and speeds on stderr")


def sampling_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Collect the request fields given as flags."""
    names = (*(field.name for field in FLAG_FIELDS), "stop")
    fields = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.json_schema is not None:
        form = {"name": "answer", "strict": True, "schema": arguments.json_schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    return fields


def trust(arguments: argparse.Namespace) -> Trust:
    """Return the trusted certificates."""
    return Trust(arguments.ca_cert, arguments.insecure)


def api_key(arguments: argparse.Namespace) -> str | None:
    """Return the API key to send, or None.

    It comes from the flag, or is the first one in the environment variable.
    """
    keys = os.environ.get(KEY_VARIABLE, "").replace(",", " ").split()
    return arguments.api_key or (keys[0] if keys else None)


def _server_url(text: str) -> str:
    try:
        return server_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _value_of(field: Field) -> Callable[[str], Any]:
    """Return a parser of flag values for a field.

    Values out of the field's bounds are usage errors.
    """

    field_type = field.type
    assert isinstance(field_type, CheckedType), f"{field.name} is not a field for a flag"

    def convert(text: str) -> Any:
        value = field_type.flag_type(text)
        try:
            return field_type.check(field.name, value)
        except ApiError as error:
            raise argparse.ArgumentTypeError(error.message.removeprefix(f"{field.name!r} ")) from None

    convert.__name__ = field_type.flag_type.__name__  # argparse uses this name in its message for an invalid number
    return convert


def _certificates(path: str) -> str:
    """Check that a file contains certificates, and return its path."""
    try:
        Trust(path).context()
    except ssl.SSLError:
        raise argparse.ArgumentTypeError(f"{path} does not hold certificates in PEM format") from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {error.strerror}") from None
    return path


def _schema(path: str) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{path} is not JSON: {error}") from None
