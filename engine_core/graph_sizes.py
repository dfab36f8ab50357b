"""The sizes of steps that are captured in CUDA graphs."""

from tandem.engine_core.errors import ConfigError
from tandem.protocol.engine_options import SpeculateTokens

GRAPH_ROWS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024),
)
MIXED_GRAPH_ROWS = (0, 8, 32, 64, 128, 192, 256, 512, 1024)
"""Fewer than of decode steps: they are captured for each of the token counts below, and a start should be short.
With 8, a few long contexts in a step with prompts get more attention programs each than with 32 rows, and there is
less padding."""
WIDE_STEP = 256
"""Rows from one captured row count to the next above the largest of these."""
MIXED_GRAPH_TOKENS = 2048
"""Maximum prompt positions of captured steps with decode rows: few prompts get more in a step with decode rows."""
GRAPH_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
MAX_ADAPTED_ROWS = 256
"""Most rows of steps with adapters that are captured, and most positions of those that verify drafts; larger ones take
long enough without a graph."""
ADAPTED_MIXED_ROWS = (0, 32, 128)
"""Decode rows that are captured with prompts and adapters, besides the most of them: a start should be short."""
ADAPTED_GRAPH_TOKENS = 512
"""Maximum prompt positions of captured steps with adapters: larger ones take long enough without a graph."""
DRAFT_SIZES = (1, 2, 3, 5, 7)
"""Numbers of drafts that a step may verify for each row."""
DRAFT_PROMPT_TOKENS = (16, 64, 128, 256, 512)
"""Positions of prompts that a draft model computes as a CUDA graph, for up to 64 rows. Without one, the host takes
longer to launch them than the device to compute a thousand."""
MAX_VERIFY_POSITIONS = 512
"""Maximum number of positions of a step that verifies drafts: with more it takes clearly longer than one without."""


def draft_sizes(speculate: str, tokens: SpeculateTokens) -> tuple[int, ...]:
    """Choose the numbers of drafts of steps. tokens: maximum number of drafts."""
    if speculate == "off":
        return ()
    if tokens == "auto":
        return DRAFT_SIZES
    return (*[size for size in DRAFT_SIZES if size < tokens], tokens)


def draft_prompts(step_tokens: int) -> tuple[int, ...]:
    """Choose the prompt positions of graphs of a draft model. step_tokens: maximum positions of a step."""
    return tuple([tokens for tokens in DRAFT_PROMPT_TOKENS if tokens <= step_tokens])


def decode_rows(asked: str | None, max_rows: int) -> tuple[int, ...]:
    """Choose the row counts of decode graphs."""
    return _sizes("--graph-rows", asked, _wide(GRAPH_ROWS, max_rows), "--max-rows", max_rows)


def mixed_rows(max_rows: int) -> tuple[int, ...]:
    """Choose the decode-row counts that are captured with prompts."""
    return _up_to(_wide(MIXED_GRAPH_ROWS, max_rows), max_rows)


def _wide(sizes: tuple[int, ...], max_rows: int) -> tuple[int, ...]:
    """Extend row counts up to `max_rows`."""
    return (*sizes, *range(sizes[-1] + WIDE_STEP, max_rows + WIDE_STEP, WIDE_STEP))


def adapted_mixed_rows(rows: tuple[int, ...]) -> tuple[int, ...]:
    """Choose the decode-row counts that are captured with prompts and adapters. rows: those without, ascending."""
    few = tuple([count for count in rows if count <= MAX_ADAPTED_ROWS])
    return tuple([count for count in few if count in ADAPTED_MIXED_ROWS or count == few[-1]])


def prompt_tokens(asked: str | None, step_tokens: int, positions: int) -> tuple[int, ...]:
    """Choose the prompt positions of mixed graphs. positions: of all rows together."""
    sizes = _sizes("--graph-tokens", asked, GRAPH_TOKENS, "--max-step-tokens", step_tokens)
    return tuple(size for size in sizes if size <= positions)


def _sizes(flag: str, asked: str | None, usual: tuple[int, ...], limit_flag: str, limit: int) -> tuple[int, ...]:
    """Choose the sizes that graphs are captured for.

    A step between two sizes is padded to the larger one; a step above all of them runs eagerly. Raises ConfigError for
    a list that is malformed or beyond the limit.
    """
    if asked == "off":
        return ()
    if asked is None:
        return _up_to(usual, limit)
    try:
        counts = sorted({int(part) for part in asked.split(",")})
    except ValueError:
        raise ConfigError(f"{flag} {asked}: must be a list of sizes like 1,2,4,8, or off") from None
    if counts[0] < 1 or counts[-1] > limit:
        raise ConfigError(f"{flag} {asked}: sizes must be from 1 to {limit_flag} {limit}")
    return tuple(counts)


def _up_to(sizes: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Return the sizes below the limit, and the limit itself.

    The limit is left out if it is above every size.
    """
    return tuple(sorted({*(size for size in sizes if size < limit), min(limit, sizes[-1])}))
