"""The reading of sliding windows that begin at some layer, as in Qwen 2 and 3."""

from collections.abc import Sequence

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.models.config_fields import ConfigFields
from tandem.engine_core.rope_config import FULL, SLIDING, Count


class SlidingFields(ConfigFields, kw_only=True):
    """The fields of config.json that give the upper layers a window."""

    use_sliding_window: bool = False
    sliding_window: Count | None = 4096
    max_window_layers: int = 28
    """Index of the first layer with a window, if there are no `layer_types`."""
    layer_types: list[str] | None = None

    def windows(self) -> list[int | None]:
        """Return the window of each layer.

        Raises ConfigError for malformed `layer_types`.
        """
        window, layers = self.sliding_window if self.use_sliding_window else None, self.num_hidden_layers
        if self.layer_types is None:
            return [window if index >= self.max_window_layers else None for index in range(layers)]
        return windows_of_types(self.layer_types, layers, window)


def windows_of_types(types: Sequence[str], layers: int, window: int | None) -> list[int | None]:
    """Return the window of each layer by its entry of `layer_types`.

    Raises ConfigError if that does not name full or sliding attention for each layer.
    """
    if unknown := sorted(set(types) - {FULL, SLIDING}):
        raise ConfigError(f"layer_types {', '.join(unknown)} are not supported, only {FULL} and {SLIDING}")
    if len(types) != layers:
        raise ConfigError(f"layer_types has {len(types)} entries for {layers} layers")
    if SLIDING in types and window is None:
        raise ConfigError(f"layer_types has {SLIDING}, but sliding_window is not set")
    return [window if kind == SLIDING else None for kind in types]
