"""Preview of a download from the hub, for `tandem doctor` and `--check`."""

import threading
from pathlib import Path

from msgspec import Struct

from tandem.frontend.hub.client import HubModel
from tandem.frontend.hub.download import Download, weight_bytes
from tandem.frontend.hub.errors import HubError, UnreachableError
from tandem.frontend.hub.progress import size_text
from tandem.frontend.hub.snapshot import cached_snapshot


class Preview(Struct, frozen=True):
    """Facts about a model of the hub."""

    rows: dict[str, str]
    """Names and texts for a report."""
    folder: Path
    """Folder with at least the configuration and the tokenizer."""
    weight_bytes: int | None
    """Bytes of the weights on the hub; None if they are in the folder."""


def preview(model: HubModel) -> Preview:
    """Ask the hub for a model and download its small files.

    Raises HubError if the model cannot be had, with or without the hub.
    """
    rows = {"hub": model.asked.endpoint, "cache": str(model.cache.root)}
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
