"""Errors of the hub, with remedies."""

import errno
import os
from pathlib import Path

from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from msgspec import Struct

_REFUSED_TOKEN = "the hub does not accept the token (401): check it, or leave it out for a public model"


class HubError(Exception):
    """A model is not available from the hub; the message says what to do."""


class UnreachableError(HubError):
    """The hub is unreachable or did not respond."""


class RequestedModel(Struct, frozen=True):
    """Request for a model, described in error messages."""

    name: str
    """Name of the model, such as Qwen/Qwen3-0.6B."""
    revision: str
    endpoint: str
    """URL of the hub."""
    has_token: bool

    def offline(self) -> HubError:
        """Return the error for offline mode."""
        return UnreachableError("HF_HUB_OFFLINE is set")

    def explain(self, error: BaseException) -> HubError:
        """Convert any error of a download to one with a remedy."""
        if isinstance(error, HubError):
            return error
        if isinstance(error, OfflineModeIsEnabled):
            return self.offline()
        if isinstance(error, HFValidationError):
            return HubError(f"the model {self.name} is not a directory here, and no hub has such a name: {error}")
        if isinstance(error, HfHubHTTPError):
            return self._explain_answer(error)
        if is_transport_error(error):
            return UnreachableError(f"cannot reach {self.endpoint} ({str(error) or type(error).__name__})")
        if isinstance(error, OSError) and (cause := error.__cause__) is not None and cause is not error:
            return self.explain(cause)  # the library wraps the original error
        if isinstance(error, OSError):
            return HubError(explain_file_error(error, None))
        return HubError(f"{self.name} cannot be downloaded: {type(error).__name__}: {error}")

    def explain_status(self, status: int) -> HubError:
        """Explain a response by its status."""
        if status in (401, 403):
            return self._gated() if status == 403 or not self.has_token else HubError(_REFUSED_TOKEN)
        if status == 404:
            return HubError(f"{self.endpoint} has lost a file of {self.name} (404); start again")
        if status == 429:
            return UnreachableError(f"{self.endpoint} answers 429, too many requests: try again later, or give a token")
        return UnreachableError(f"{self.endpoint} answers {status}: try again later")

    def _explain_answer(self, error: HfHubHTTPError) -> HubError:
        if isinstance(error, GatedRepoError):
            return self._gated()
        if isinstance(error, DisabledRepoError):
            return HubError(f"the model {self.name} has been disabled by its author or by the hub; choose another")
        if isinstance(error, RepositoryNotFoundError):
            return HubError(
                f"the model {self.name} is neither a directory here nor a model on {self.endpoint} that can be seen "
                f"{'with this token' if self.has_token else 'without a token'} ({error.response.status_code}): check "
                "the spelling; for a private model give a token with HF_TOKEN or --hf-token"
            )
        if isinstance(error, RevisionNotFoundError):
            return HubError(
                f"the model {self.name} has no revision {self.revision} (404): give --revision a branch, tag or commit "
                f"of {self.endpoint}/{self.name}"
            )
        return self.explain_status(error.response.status_code)

    def _gated(self) -> HubError:
        token = (
            "wait until access is granted to the account of this token, or give another one's"
            if self.has_token
            else "give a token of that account with HF_TOKEN or --hf-token"
        )
        return HubError(
            f"the model {self.name} is gated: accept its licence at {self.endpoint}/{self.name}, then {token}"
        )


def is_transport_error(error: BaseException) -> bool:
    """Return True for a connection error.

    The library's HTTP client is httpx or httpx2, depending on its version; both call that a TransportError.

    """
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def explain_file_error(error: OSError, root: Path | None) -> str:
    """Explain why the cache at `root` is not writable."""
    prefix = f"{error.filename or root}: " if error.filename or root else ""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.ENOSPC:
        return f"{prefix}the disk is full; free some space, or give a folder on another disk with --download-dir"
    return f"{prefix}{reason}; give a folder that can be written with --download-dir or HF_HOME"
