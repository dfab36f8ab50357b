"""Resolve the model to serve to a folder, downloading it before any process starts."""

import importlib.util
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from tandem.frontend.hub.options import BeforeWeights, HubOptions
from tandem.frontend.hub.selection import has_tokenizer
from tandem.frontend.supervisor.tokenizer import ConversionError, cache_folder, with_tokenizer
from tandem.frontend.supervisor.wrong_folder import check_readable, explain, inaccessible
from tandem.protocol.engine_options import DRAFT_MODEL, EngineOptions

if TYPE_CHECKING:  # these import huggingface_hub
    from tandem.frontend.hub.client import HubModel
    from tandem.frontend.hub.snapshot import Preview

logger = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")


_MAX_SHOWN = 500

_DEFAULT_FOLDER = "default_model"
_DEFAULT_NAME = "tandem-default"
"""Name of the default model, which the engine core uses too."""


class LaunchError(Exception):
    """The server cannot be started; the message says what to change."""


class AddressInUseError(LaunchError):
    """A port, a path or an endpoint is in use.

    Child processes of a supervisor that was just killed may still use it.
    """


class NotDownloadedError(LaunchError):
    """A model from the hub is not in the cache, and downloads are disabled."""


class ModelFolder(Struct, frozen=True):
    """Model in a local folder."""

    folder: Path
    name: str = ""
    """Name on the hub as given, or name of the local folder if another path was given; otherwise empty."""
    commit: str = ""
    """Commit on the hub; empty for a local folder."""

    @property
    def served_name(self) -> str:
        """Default name under which an engine serves the model."""
        is_default = self.folder.name == _DEFAULT_FOLDER and self.folder == _default_model()
        return self.name or (_DEFAULT_NAME if is_default else self.folder.resolve().name)

    def options(self, given: EngineOptions) -> EngineOptions:
        """Return the engine's settings for this folder.

        The served name is `name`, unless another one was given.
        """
        if not self.name:
            return given
        return structs.replace(given, model=str(self.folder), served_model_name=given.served_model_name or self.name)


def find_model(
    model: str | None,
    hub: HubOptions,
    *,
    with_weights: bool = True,
    may_download: bool = True,
    stop: threading.Event | None = None,
    before_weights: BeforeWeights | None = None,
) -> ModelFolder:
    """Return the folder of the model to serve.

    A model from the hub is downloaded if it is not in the cache, and a tokenizer in another format is converted.

    The default is the model shipped with the engine core, which is located without importing it. A safetensors file
    selects its folder, if the folder has no other weights. with_weights: False for a frontend, which needs the
    tokenizer and templates only. may_download: False to use the cache without asking the hub. stop: aborts a download.
    before_weights: checks the small files of a model before its weights are downloaded.

    Raises LaunchError if the model is not found, or cannot be read, downloaded or converted; NotDownloadedError if it
    would have to be downloaded.
    """
    try:
        found = _find(model, hub, with_weights, stop or threading.Event(), may_download, before_weights)
        check_readable(found.folder, with_weights)
        folder = with_tokenizer(found.folder, cache_folder())
    except ConversionError as error:
        raise LaunchError(str(error)) from None
    except PermissionError as error:
        raise LaunchError(
            f"the model {model}: {inaccessible(Path(error.filename))} cannot be read by the user with the id "
            f"{os.geteuid()}; give it the right to read the folder and its files"
        ) from None
    if folder == found.folder:
        return found
    return ModelFolder(folder, found.name or found.folder.resolve().name, found.commit)


def find_draft_model(options: EngineOptions, hub: HubOptions, *, may_download: bool = True) -> EngineOptions:
    """Return the options with the folder of the draft model, if they name one.

    One from the hub is downloaded if it is not in the cache. hub: the revision is that of the served model, and is not
    used. Raises the errors of `find_model`.
    """
    if options.draft_model is None:
        return options
    try:
        found = find_model(options.draft_model, structs.replace(hub, revision=None), may_download=may_download)
    except NotDownloadedError as error:
        raise NotDownloadedError(f"--speculate {options.speculate}: {error}") from None
    except LaunchError as error:
        raise LaunchError(f"--speculate {options.speculate}: {error}") from None
    return structs.replace(options, speculate=DRAFT_MODEL + str(found.folder.absolute()))


def _find(
    model: str | None,
    hub: HubOptions,
    with_weights: bool,
    stop: threading.Event,
    may_download: bool,
    before_weights: BeforeWeights | None,
) -> ModelFolder:
    if model is None:
        if hub.revision is not None:
            raise LaunchError("--revision is for models of the hub; give one as --model, or leave it out")
        return ModelFolder(_default_model())
    path = Path(model)
    if (is_folder := os.path.isdir(model)) or os.path.isfile(model):
        if hub.revision is not None:
            kind = "directory" if is_folder else "file"
            raise LaunchError(
                f"the model {model} is a {kind} here, and --revision is for names on the hub; leave it out"
            )
        return _checked_folder(path, with_weights) if is_folder else _folder_of_file(path)
    if not is_hub_name(model):
        raise LaunchError(_missing_folder(model))
    return _download(model, hub, with_weights, stop, may_download, before_weights)


def _checked_folder(path: Path, with_weights: bool) -> ModelFolder:
    """Return a folder that may contain a model, or for a frontend a tokenizer.

    Raises LaunchError for a folder that contains something else.
    """
    if (with_weights or not has_tokenizer(path)) and (problem := explain(path)):
        raise LaunchError(problem)
    return ModelFolder(path)


def _folder_of_file(path: Path) -> ModelFolder:
    """Return the folder of a safetensors file with all weights of a model.

    Raises LaunchError for any other file.

    """
    folder = path.parent
    if path.suffix == ".gguf":
        raise LaunchError(_missing_folder(str(path)))
    if path.suffix != ".safetensors":
        raise LaunchError(f"the model {path} is a file, and no safetensors; give the model's folder")
    if not (folder / "config.json").is_file():
        raise LaunchError(
            f"{path} holds weights, and a model needs its config.json and tokenizer too, which {folder.resolve()} "
            "lacks; download the whole model, or give its name on the hub"
        )
    # The engine reads model.safetensors if it exists, otherwise the files listed in the index.
    others = {other.name for other in folder.glob("*.safetensors")} - {path.name}
    if path.name != "model.safetensors" and (others or (folder / "model.safetensors.index.json").exists()):
        raise LaunchError(
            f"{path} is one of the files of a model's weights, which are read together; give the folder, "
            f"{folder.resolve()}"
        )
    return ModelFolder(folder, folder.resolve().name)


def is_hub_name(model: str) -> bool:
    """Return True for a valid name on the hub, such as Qwen/Qwen3-0.6B.

    A local folder or file of that name takes precedence.
    """
    return _HUB_NAME.fullmatch(model) is not None and not model.endswith(".gguf") and not os.path.exists(model)


@contextmanager
def _hub_errors() -> Iterator[None]:
    """Convert hub errors to LaunchError."""
    from tandem.frontend.hub.errors import HubError

    try:
        yield
    except HubError as error:
        raise LaunchError(str(error)) from None


def _open_model(model: str, hub: HubOptions) -> "HubModel":
    """Return the model on the hub, without any request.

    The library is imported here, because it reads the environment on import and is slow to import.
    """
    try:
        from tandem.frontend.hub.client import HubModel
    except ValueError as error:
        raise LaunchError(
            f"the settings of huggingface_hub in the environment cannot be read ({error}): check HF_ENDPOINT and the "
            "other variables that start with HF_"
        ) from None
    return HubModel.open(model, hub)


def preview_model(model: str, hub: HubOptions) -> "Preview":
    """Ask the hub for a model and download its small files.

    Raises LaunchError if the model is not available.
    """
    with _hub_errors():
        wanted = _open_model(model, hub)
        from tandem.frontend.hub.snapshot import preview

        return preview(wanted)


def _download(
    model: str,
    hub: HubOptions,
    with_weights: bool,
    stop: threading.Event,
    may_download: bool,
    before_weights: BeforeWeights | None,
) -> ModelFolder:
    with _hub_errors():
        wanted = _open_model(model, hub)
        from tandem.frontend.hub.snapshot import cached_snapshot, find_snapshot

        if may_download or wanted.offline:  # when offline, the error says why there is nothing to serve
            found = find_snapshot(wanted, with_weights, stop, before_weights)
        elif (cached := cached_snapshot(wanted, with_weights)) is not None:
            found = cached
        else:
            raise NotDownloadedError(f"{model} is not in the cache {wanted.cache.root}; a start downloads it")
    logger.info("%s is commit %s, in %s", model, found.commit, found.folder)
    return ModelFolder(found.folder, model, found.commit)


def _default_model() -> Path:
    spec = importlib.util.find_spec("tandem.engine_core")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (folder := Path(location) / "default_model").is_dir():
            return folder
    raise LaunchError("this installation has no default model; give one with --model DIR")


def _missing_folder(model: str) -> str:
    """Explain that a model is not on this machine, and that its name is not a valid hub name."""
    if model.endswith(".gguf"):
        return f"the model {model} is in the GGUF format, which is not supported; give a folder with safetensors"
    return (
        f"the model {model[:_MAX_SHOWN]} is not a directory; give a Hugging Face one with config.json, or a name on "
        "the hub like Qwen/Qwen3-0.6B"
    )
