"""The cache of models on this machine, in the layout of huggingface_hub.

Other programs share it.
https://huggingface.co/docs/huggingface_hub/guides/manage-cache describes it: `blobs` holds files by their hash,
`snapshots/COMMIT` links to them by name, `refs/REVISION` holds the commit of a branch or tag.
"""

import os
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

COMMIT = re.compile(r"[0-9a-f]{40}")


class ModelCache:
    """The part of the cache that belongs to one model."""

    def __init__(self, root: Path, name: str) -> None:
        """Name the places; nothing is created.

        root: folder of the whole cache. name: that of the model on the hub.
        """
        repository = "--".join(("models", *name.split("/")))
        self.root = root
        self.folder = root / repository
        self.locks = root / ".locks" / repository

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def blob(self, digest: str) -> Path:
        return self.folder / "blobs" / digest

    def partial(self, digest: str) -> Path:
        """Return the file that holds the part of a blob that has arrived."""
        return self.folder / "blobs" / f"{digest}.incomplete"

    def commit_of(self, revision: str) -> str | None:
        """Return the commit of a revision at its last complete download, or None."""
        if COMMIT.fullmatch(revision):
            return revision
        path = self.folder / "refs" / revision
        if ".." in Path(revision).parts or not path.is_file():
            return None
        commit = path.read_text().strip()
        return commit if COMMIT.fullmatch(commit) else None

    def record(self, revision: str, commit: str) -> None:
        """Note that a revision is this commit, whose snapshot is complete.

        A cache that cannot be written is left as it is.
        """
        if revision == commit or self.commit_of(revision) == commit:
            return
        path = self.folder / "refs" / revision
        unnamed = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            unnamed.write_text(commit)
            os.replace(unnamed, path)

    def free_bytes(self) -> int:
        """Return the free space of the disk that holds the cache."""
        place = next(place for place in (self.root, *self.root.parents) if place.exists())
        return shutil.disk_usage(place).free
