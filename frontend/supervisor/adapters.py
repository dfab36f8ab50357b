"""Folders of the adapters that a server has from the start."""

import os
from collections.abc import Collection, Sequence

from tandem.frontend.hub.options import HubOptions
from tandem.frontend.supervisor.model import LaunchError, is_hub_name

FILES = ("adapter_config.json", "adapter_model.safetensors")

Module = tuple[str, str]
"""Name of an adapter, and its folder or its name on the hub."""


def check_modules(
    modules: Sequence[Module], base: Collection[str], is_enabled: bool, root: os.PathLike[str] | None = None
) -> None:
    """Raise LaunchError for adapters that no engine could serve.

    base: names of the model itself; is_enabled: True with --enable-lora; root: of --lora-root.
    """
    if not is_enabled:
        given = "--lora-modules" if modules else "--lora-root" if root is not None else ""
        if given:
            raise LaunchError(f"{given} needs --enable-lora; add it, or leave {given} out")
        return
    if root is not None and not os.path.isdir(root):
        raise LaunchError(f"--lora-root {root} is not a folder")
    names = [name for name, _ in modules]
    for name in names:
        if name in base:
            raise LaunchError(f"--lora-modules {name}: this is the name of the model itself; choose another")
        if names.count(name) > 1:
            raise LaunchError(f"--lora-modules {name}: the name is given twice")


def find_adapters(modules: Sequence[Module], hub: HubOptions) -> dict[str, str]:
    """Return the folders of adapters by name, after downloading those of the hub.

    Raises LaunchError for one that is neither a folder nor available from the hub.
    """
    return {name: _folder(name, given, hub) for name, given in modules}


def check_path(name: str, given: str) -> None:
    """Raise LaunchError unless an adapter is a folder with its files, or has the form of a name on the hub."""
    if os.path.isdir(given):
        if missing := [file for file in FILES if not os.path.isfile(os.path.join(given, file))]:
            reason = f"the folder has no {' and no '.join(missing)}; an adapter is a folder in PEFT's format"
            raise LaunchError(f"--lora-modules {name}={given}: {reason}")
    elif not is_hub_name(given):
        raise LaunchError(f"--lora-modules {name}={given}: this is neither a folder nor a name on the hub")


def _folder(name: str, given: str, hub: HubOptions) -> str:
    check_path(name, given)
    return os.path.abspath(given) if os.path.isdir(given) else _download(name, given, hub)


def _download(name: str, given: str, hub: HubOptions) -> str:
    """Return the folder of an adapter in the cache of the hub. The library is imported here: it is slow to import."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(given, allow_patterns=list(FILES), token=hub.token, cache_dir=hub.download_dir)
    except Exception as error:
        # The library raises errors of requests, of the file system and its own.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise LaunchError(f"--lora-modules {name}={given} could not be downloaded: {reason}") from None
