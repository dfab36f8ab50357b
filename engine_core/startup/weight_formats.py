"""Formats of the linear layers of a quantized checkpoint, counted from its tensors."""

from collections import Counter

from msgspec import Struct

from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.models.decoder import EMBEDDING, HEAD
from tandem.engine_core.quantization.quantization import PACKED, Quantization

MAX_NAMED = 5
"""Maximum number of layers in a note."""
_ROUTER = ".gate"
"""Last component of the names of routers, which are never quantized."""


class WeightFormats(Struct, frozen=True):
    """Formats of the linear layers of a checkpoint, without its head if that is not quantized."""

    num_layers: int = 0
    """0: unknown, because the weights are not here or are quantized while loading."""
    num_quantized: int = 0
    text: str = ""
    """Number of layers in each format, empty if unknown."""
    note: str = ""
    """The layers that the config calls quantized but are not, empty if there are none."""
    unmatched: str = ""
    """The entries of the config that name no module, empty if there are none."""


def weight_formats(checkpoint: Checkpoint, quantization: Quantization | None) -> WeightFormats:
    """Count the linear layers of a checkpoint by format.

    Raises ConfigError if the tensors of a layer contradict the config.
    """
    if quantization is None:
        return WeightFormats()
    stored = quantization.with_stored({tensor.name: tensor.dtype for tensor in checkpoint.tensors.values()})
    if stored.stored is None:
        return WeightFormats()
    modules = {
        name.rpartition(".")[0]
        for name, tensor in checkpoint.tensors.items()
        if name.rpartition(".")[2] in ("weight", *PACKED) and len(tensor.shape) == 2
    }
    linear = sorted(name for name in modules - {EMBEDDING} if not name.endswith(_ROUTER))
    schemes = {name: stored.scheme_for(name) for name in linear}
    if HEAD in schemes and schemes[HEAD] is None:
        del schemes[HEAD]
    counts = Counter(str(scheme) for scheme in schemes.values() if scheme is not None)
    plain = sorted(stored.stored_plain & schemes.keys())
    return WeightFormats(len(schemes), counts.total(), _text(counts, len(schemes)), _note(plain))


def _text(counts: Counter[str], total: int) -> str:
    if not counts:
        return f"none of {total} linear layers quantized"
    if counts.total() == total and len(counts) == 1:
        return f"linear layers in {next(iter(counts))}"
    first, *others = [f"{count} in {scheme}" for scheme, count in counts.most_common()]
    plain = [f"{total - counts.total()} in 16 bits"] if counts.total() < total else []
    count, _, scheme = first.partition(" ")
    return ", ".join([f"{count} of {total} linear layers {scheme}", *others, *plain])


def _note(names: list[str]) -> str:
    if not names:
        return ""
    named = ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
    return f"{len(names)} linear layers are not quantized although quantization_config does not exclude them: {named}"
