"""Options of a model on the Hugging Face hub."""

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

BeforeWeights = Callable[[Path, int], None]
"""Called with the folder of the small files and the bytes of the weights before their download; raises to stop it."""


class HubOptions(Struct, frozen=True):
    """Options of a model that is given by its name on the hub."""

    revision: str | None = None
    """Branch, tag or commit; None for the main branch."""
    token: str | None = None
    """Access token; None for that of HF_TOKEN or of `hf auth login`, if there is one."""
    download_dir: Path | None = None
    """Folder of the cache; None for the usual one, which HF_HOME and HF_HUB_CACHE move."""
