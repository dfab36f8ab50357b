"""Model cache in the layout of huggingface_hub.

It is shared with other programs, and described at https://huggingface.co/docs/huggingface_hub/guides/manage-cache:
`blobs` holds files by hash, `snapshots/COMMIT` links to them by name, `refs/REVISION` holds the commit of a branch or
tag.
"""

import errno
import os
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

COMMIT = re.compile(r"[0-9a-f]{40}")
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)


class ModelCache:
    """Cache of one model."""

    def __init__(self, root: Path, name: str) -> None:
        """Initialize the paths, without creating anything.

        root: folder of the whole cache. name: name of the model on the hub.
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
        """Return the path of a partial download of a blob."""
        return self.folder / "blobs" / f"{digest}.incomplete"

    def commit_of(self, revision: str) -> str | None:
        """Return the commit of a revision at its last complete download, or None."""
        if COMMIT.fullmatch(revision):
            return revision
        try:
            commit = self._ref(revision).read_text().strip()
        except (OSError, ValueError):  # no such file, or not text
            return None
        return commit if COMMIT.fullmatch(commit) else None

    def record(self, revision: str, commit: str) -> None:
        """Record the commit of a revision, whose snapshot is complete.

        Does nothing if the cache is not writable.
        """
        if revision == commit or self.commit_of(revision) == commit:
            return
        with suppress(OSError, ValueError):
            path = self._ref(revision)
            unnamed = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
            path.parent.mkdir(parents=True, exist_ok=True)
            unnamed.write_text(commit)
            os.replace(unnamed, path)

    def _ref(self, revision: str) -> Path:
        """Return the path of the file of a revision.

        Raises ValueError if it would be outside the cache.
        """
        if Path(revision).is_absolute() or ".." in Path(revision).parts:
            raise ValueError(f"the revision {revision!r} leads out of the cache")
        return self.folder / "refs" / revision

    def link(self, name: str, digest: str, commit: str) -> None:
        """Link a blob into a snapshot.

        Where the file system has no links, the blob is moved. name: path relative to the snapshot. Raises OSError on
        failure.
        """
        blob, link = self.blob(digest), self.snapshot(commit) / name
        link.parent.mkdir(parents=True, exist_ok=True)
        unnamed = link.with_name(f".{link.name}.{uuid.uuid4().hex[:8]}")
        try:
            unnamed.symlink_to(os.path.relpath(blob, link.parent))
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.replace(blob, link)
            return
        os.replace(unnamed, link)

    def free_bytes(self) -> int:
        """Return the free bytes of the disk that holds the cache."""
        existing = next(path for path in (self.root, *self.root.parents) if path.exists())
        return shutil.disk_usage(existing).free
