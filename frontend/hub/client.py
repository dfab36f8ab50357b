"""Model on a hub, accessed via huggingface_hub."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from huggingface_hub import HfApi, constants, get_token, hf_hub_download, hf_hub_url
from msgspec import Struct

from tandem.frontend.hub.cache import COMMIT, ModelCache
from tandem.frontend.hub.errors import HubError, RequestedModel
from tandem.frontend.hub.options import HubOptions

USER_AGENT = "tandem"
MAX_HTTP_BYTES = constants.MAX_HTTP_DOWNLOAD_SIZE
"""Largest file in bytes that the hub serves via plain HTTP."""
_LIST_SECONDS = 30.0
_TOKEN = re.compile(r"[!-~]+")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class RemoteFile(Struct, frozen=True):
    """File of a repository."""

    name: str
    size: int
    """Size in bytes."""
    digest: str
    """SHA-256 of a large file, otherwise its git object id; the name of the blob in the cache."""


class Listing(Struct, frozen=True):
    """Files of a commit."""

    commit: str
    files: Mapping[str, RemoteFile]
    """Files by name."""


class HubModel:
    """Revision of a model on a hub, and its cache."""

    def __init__(
        self, name: str, revision: str, endpoint: str, token: str | None, cache_root: Path, offline: bool
    ) -> None:
        self.name = name
        self.revision = revision
        self.cache = ModelCache(cache_root, name)
        self.requested = RequestedModel(name, revision, endpoint, token is not None)
        self.offline = offline
        """True if requests to the hub are disabled by HF_HUB_OFFLINE."""
        self._endpoint = endpoint
        self._token = token

    @classmethod
    def open(cls, name: str, options: HubOptions) -> "HubModel":
        """Resolve hub, token and cache from the environment and the options.

        Raises HubError for a token that is not a valid header value.
        """
        token = (options.token or get_token() or "").strip() or None
        if token is not None and _TOKEN.fullmatch(token) is None:
            raise HubError("the token of HF_TOKEN or --hf-token has spaces or characters that no token has; check it")
        return cls(
            name,
            options.revision or constants.DEFAULT_REVISION,
            constants.ENDPOINT,
            token,
            options.download_dir or Path(constants.HF_HUB_CACHE),
            constants.HF_HUB_OFFLINE,
        )

    def list_files(self) -> Listing:
        """Request the commit of the revision and its files.

        Raises HubError if the model or the revision does not exist, and UnreachableError without a response.
        """
        if self.offline:
            raise self.requested.offline()
        api = HfApi(endpoint=self._endpoint, token=self._token or False, library_name=USER_AGENT)
        try:
            info = api.model_info(self.name, revision=self.revision, files_metadata=True, timeout=_LIST_SECONDS)
        except Exception as error:  # errors of the library or of its HTTP client
            raise self.requested.explain(error) from None
        files = {}
        for sibling in info.siblings or ():
            digest = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
            if _is_size(sibling.size) and isinstance(digest, str) and _HASH.fullmatch(digest):
                files[sibling.rfilename] = RemoteFile(sibling.rfilename, sibling.size, digest)
        if info.sha is None or COMMIT.fullmatch(info.sha) is None:
            raise HubError(f"{self._endpoint} does not answer like a hub: it named no commit; check HF_ENDPOINT")
        return Listing(info.sha, files)

    def url(self, file: RemoteFile, commit: str) -> str:
        return hf_hub_url(self.name, file.name, revision=commit, endpoint=self._endpoint)

    def headers(self) -> dict[str, str]:
        """Return the request headers for the hub, with the token."""
        headers = {"user-agent": USER_AGENT}
        return headers if self._token is None else headers | {"authorization": f"Bearer {self._token}"}

    def download_large(self, file: RemoteFile, commit: str) -> None:
        """Download a file that is too large for HTTP.

        The library uses another protocol for it. Raises HubError on failure.
        """
        try:
            hf_hub_download(
                self.name,
                file.name,
                revision=commit,
                cache_dir=self.cache.root,
                endpoint=self._endpoint,
                token=self._token or False,
                library_name=USER_AGENT,
            )
        except Exception as error:
            raise self.requested.explain(error) from None


def _is_size(size: object) -> TypeGuard[int]:
    """Return True for a valid size; the library does not validate the hub's response."""
    return type(size) is int and size >= 0
