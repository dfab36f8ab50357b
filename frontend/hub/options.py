"""Options of a model on the Hugging Face hub."""

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

BeforeWeights = Callable[[Path, int], None]
"""Called before the download of weights with the folder of the small files and the size of the weights in bytes; raises
to abort."""


class HubOptions(Struct, frozen=True):
    """Options of a model from the hub."""

    revision: str | None = None
    """Branch, tag or commit; None for the main branch."""
    token: str | None = None
    """Access token; None to use HF_TOKEN or the token stored by `hf auth login`, if any."""
    download_dir: Path | None = None
    """Folder of the cache; None for the default, which HF_HOME and HF_HUB_CACHE change."""
