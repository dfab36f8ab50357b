"""Find or download the folder of a model from the hub, or preview the download."""

import logging
import threading
from pathlib import Path

from msgspec import Struct

from tandem.frontend.hub.client import HubModel
from tandem.frontend.hub.download import Download, weight_bytes
from tandem.frontend.hub.errors import HubError, UnreachableError
from tandem.frontend.hub.options import BeforeWeights
from tandem.frontend.hub.progress import size_text
from tandem.frontend.hub.selection import missing

logger = logging.getLogger(__name__)


class Snapshot(Struct, frozen=True):
    """Local folder of a model from the hub."""

    folder: Path
    commit: str


def find_snapshot(
    model: HubModel, with_weights: bool, stop: threading.Event, before_weights: BeforeWeights | None = None
) -> Snapshot:
    """Return the folder of a model, after downloading missing files.

    The hub is not asked about a cached commit. If the hub does not list the files, for whatever reason, the last
    complete download is used, with a warning unless HF_HUB_OFFLINE is set. Raises HubError if there is none, or if the
    download fails, and what `before_weights` raises.
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
    """Describe what is missing from the cache."""
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


class Preview(Struct, frozen=True):
    """Preview of a download, for `tandem doctor` and `--check`."""

    rows: dict[str, str]
    """Rows of a report."""
    folder: Path
    """Folder with at least the configuration and the tokenizer."""
    weight_bytes: int | None
    """Bytes of the weights on the hub; None if the folder has them."""


def preview(model: HubModel) -> Preview:
    """Query the hub for a model and download its small files.

    Raises HubError if the model is available neither from the hub nor from the cache.
    """
    rows = {"hub": model.requested.endpoint, "cache": str(model.cache.root)}
    cached = cached_snapshot(model, with_weights=True)
    try:
        listing = model.list_files()
    except UnreachableError as error:
        if cached is None:
            raise HubError(f"{error}, and {model.name} is not in the cache {model.cache.root}") from None
        return Preview(
            rows | {"commit": cached.commit, "download": f"complete in the cache; {error}"}, cached.folder, None
        )
    rows["commit"] = listing.commit
    folder = model.cache.snapshot(listing.commit)
    with Download(model, listing, True, threading.Event()) as download:
        wanted = download.wanted()
        absent = [file for file in wanted if not (folder / file.name).exists()]
        if not absent:
            return Preview(rows | {"download": "complete in the cache"}, folder, None)
        size, free = sum(file.size for file in absent), model.cache.free_bytes()
        rows["download"] = f"{len(absent)} files, {size_text(size)}, of {size_text(free)} free"
        download.check_space(absent)
    with Download(model, listing, False, threading.Event()) as download:
        download.run()
    return Preview(rows, folder, weight_bytes(wanted))
