"""The folder of a model on the hub: from the cache, or downloaded into it."""

import logging
import threading
from pathlib import Path

from msgspec import Struct

from tandem.frontend.hub.client import HubModel
from tandem.frontend.hub.download import Download
from tandem.frontend.hub.errors import HubError, UnreachableError
from tandem.frontend.hub.options import BeforeWeights
from tandem.frontend.hub.selection import missing

logger = logging.getLogger(__name__)


class Snapshot(Struct, frozen=True):
    """A model of the hub in a folder of this machine."""

    folder: Path
    commit: str


def find_snapshot(
    model: HubModel, with_weights: bool, stop: threading.Event, before_weights: BeforeWeights | None = None
) -> Snapshot:
    """Return the folder of a model, after a download if something is missing.

    A commit that is here is not asked for. If the hub does not list the files, for whatever reason, the last complete
    download is used, with a warning unless HF_HUB_OFFLINE is set. Raises HubError if there is none, or if the download
    fails, and what `before_weights` raises.
    """
    cached = cached_snapshot(model, with_weights)
    if cached is not None and (model.offline or cached.commit == model.revision):
        return cached
    try:
        listing = model.list_files()
    except HubError as error:
        if cached is None:
            if not isinstance(error, UnreachableError):
                raise
            raise HubError(f"{error}, and {_absent(model, with_weights)}: {_remedy(model)}") from None
        logger.warning("%s; serving %s from the cache, commit %s", error, model.name, cached.commit)
        return cached
    with Download(model, listing, with_weights, stop) as download:
        download.run(before_weights)
    return Snapshot(model.cache.snapshot(listing.commit), listing.commit)


def cached_snapshot(model: HubModel, with_weights: bool) -> Snapshot | None:
    """Return the last complete download of the revision, or None."""
    commit = model.cache.commit_of(model.revision)
    if commit is None or missing(model.cache.snapshot(commit), with_weights):
        return None
    return Snapshot(model.cache.snapshot(commit), commit)


def _absent(model: HubModel, with_weights: bool) -> str:
    """Say what the cache lacks."""
    commit = model.cache.commit_of(model.revision)
    if commit is None:
        revision = "" if model.revision == "main" else f" at {model.revision}"
        return f"{model.name}{revision} is not in the cache {model.cache.root}"
    return f"its download to {model.cache.snapshot(commit)} lacks {missing(model.cache.snapshot(commit), with_weights)}"


def _remedy(model: HubModel) -> str:
    folder = "or copy the model's folder to this machine and give its path"
    if model.offline:
        return f"unset it once for the download, {folder}"
    return f"check the network, set HTTPS_PROXY, or HF_ENDPOINT for a mirror, {folder}"
