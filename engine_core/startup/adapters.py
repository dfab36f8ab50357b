"""Assembly of the adapters of an engine, and their file."""

import logging
from collections.abc import Callable
from pathlib import Path

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.lora.adapter_loader import SideCopies, ThreadedLoader
from tandem.engine_core.lora.adapters import Adapters
from tandem.engine_core.runtime.row_adapters import RowAdapters
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.adapters_file import AdaptersFile, read_adapters, write_adapters
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.events import AdapterList

logger = logging.getLogger(__name__)


def build_adapters(
    options: EngineOptions,
    rows: RowAdapters,
    copies: SideCopies | None,
    file: Path | None,
    status: Status,
    wake: Callable[[], None],
    announce: Callable[[], None],
    weight_version: str,
) -> Adapters:
    """Load the adapters of the file, which is kept up to date from then on; None: it is not stored.

    wake: ends a wait of the loop; announce: publishes the heartbeat at once; weight_version: of the base model's
    weights, for adapters that no engine has loaded before.

    Raises ConfigError for an adapter of the flags that cannot be loaded. One that was loaded at run time, and cannot be
    loaded again, is left out.
    """
    loader = ThreadedLoader(rows.lora, options.max_cpu_loras or options.max_loras, wake, copies)

    def save(listed: AdapterList, next_version: int) -> None:
        status.adapters = listed
        if file is not None:
            try:
                write_adapters(file, AdaptersFile(listed.adapters, next_version))
            except OSError as error:
                logger.error("a restarted engine would not have the adapters of this one: %s", error)
        announce()

    stored = _read(file)
    adapters = Adapters(options.max_loras, loader, save, stored.next_version)
    for facts in stored.adapters:
        try:
            rank = loader.read_now(facts.version, facts.path, facts.root)
        except ConfigError as error:
            if stored.is_given:
                raise ConfigError(f"--lora-modules {facts.name}: {error}") from None
            logger.error("the adapter %s is no longer served: %s", facts.name, error)
            continue
        adapters.add(facts.name, facts.path, facts.version, facts.root, facts.weight_version or weight_version)
        logger.info("adapter %s of rank %d from %s", facts.name, rank, facts.path)
    save(adapters.listed, stored.next_version)
    return adapters


def _read(file: Path | None) -> AdaptersFile:
    try:
        return AdaptersFile() if file is None else read_adapters(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the file of the adapters cannot be read: {error}") from None
