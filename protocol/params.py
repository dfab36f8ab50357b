"""Parameters that choose the tokens of one request and end it."""

from msgspec import Struct

MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 512
MAX_SEED = 2**63 - 1
MAX_TOP_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 2**20
MAX_GRAMMAR_SYMBOLS = 20_000
"""Size of a compiled grammar, as llguidance counts it. Time grows faster than size: a grammar of this size compiles
in 0.2 s, one with nine times the symbols in 30 s, and then takes seconds for a mask."""
MAX_LEXER_STATES, LEXER_STEP_FUEL = 50_000, 100_000
"""Limits of a grammar's lexer: states that it may hold, and work for one token. With llguidance's own limits (five and
two times as high) a grammar of 10 kB grows by 180 MB during generation, and one mask takes a third of a second."""


MAX_PARSER_ITEMS = 6500
"""Parser items for one mask. An object takes 12 for each optional property; llguidance itself refuses more than 500
of them. An ambiguous grammar of 100 bytes uses up any limit, at a quadratic cost: 0.2 s for one mask, and 10 s with
llguidance's own limit, which is eight times as high."""


class SamplingField(Struct, frozen=True):
    """Sampling parameter that is a number, with its bounds.

    A request may set it; the neutral value changes nothing. The request parser, its documentation and the engine read
    the bounds from here, and the engine its table columns.
    """

    name: str
    """Name of the request field and of the `SamplingParams` attribute."""
    minimum: float
    maximum: float
    neutral: float
    """Value of a request that does not set it. An int marks an integer field, a float a number."""
    above_minimum: bool = False
    """The minimum itself is out of bounds."""
    text: str = ""
    """One line for the documentation of the API and for the help of a flag."""

    @property
    def is_integer(self) -> bool:
        return isinstance(self.neutral, int)

    def describe_bounds(self) -> str:
        """Return the bounds in words for error messages, for example "above 0 and at most 1"."""
        if self.above_minimum:
            return f"above {self.minimum:g} and at most {self.maximum:g}"
        high = self.maximum if self.is_integer else f"{self.maximum:g}"
        return f"{self.minimum:g} to {high}"

    def accepts(self, value: float) -> bool:
        """Return True if a value is within bounds.

        NaN and infinities never are.
        """
        above = self.minimum < value if self.above_minimum else self.minimum <= value
        return above and value <= self.maximum


# fmt: off
SAMPLING_FIELDS = (
    SamplingField("temperature", 0.0, 2.0, 1.0,
                  text="Randomness of sampling; 0 always takes the likeliest token."),
    SamplingField("top_p", 0.0, 1.0, 1.0, above_minimum=True,
                  text="Sample from the likeliest tokens whose probabilities add up to this share; "
                       "0 always takes the likeliest one."),
    SamplingField("min_p", 0.0, 1.0, 0.0,
                  text="Sample from tokens at least this likely, relative to the likeliest one."),
    SamplingField("repetition_penalty", 0.0, 10.0, 1.0, above_minimum=True,
                  text="Factor against tokens of the prompt and the answer; 1 has no effect."),
    SamplingField("presence_penalty", -2.0, 2.0, 0.0,
                  text="Penalty for tokens that occur in the answer; 0 has no effect."),
    SamplingField("frequency_penalty", -2.0, 2.0, 0.0,
                  text="Penalty for each occurrence of a token in the answer; 0 has no effect."),
    SamplingField("top_k", 0, 2**31 - 1, 0, text="Sample from this many of the likeliest tokens; 0 is all."),
)
# fmt: on
"""Numeric sampling parameters, each also an attribute of `SamplingParams`."""


class SamplingParams(Struct, frozen=True, array_like=True):
    """Sampling and stopping of one request. Encoded as an array: append new fields after the last one, with a default.

    The numbers of `SAMPLING_FIELDS` have their neutral values as defaults; temperature 0 is greedy. Ids and biases are
    packed little-endian, int32 and float32.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """Key of the random numbers, 0 to MAX_SEED. The frontend draws one when the client names none."""
    choice: int = 0
    """Index among the `n` choices of one HTTP request: choices share a seed and differ by this."""
    min_tokens: int = 0
    """Number of generated tokens before which no end-of-sequence or stop token is sampled."""
    ignore_eos: bool = False
    stop_token_ids: bytes = b""
    logit_bias_ids: bytes = b""
    logit_bias_values: bytes = b""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def truncates(self) -> bool:
        """True if sampling is restricted to part of the vocabulary.

        The restriction is by rank (`top_k`) or by probability (`top_p`, `min_p`).
        """
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def penalizes(self) -> bool:
        """True if the logits depend on the tokens that the sequence already holds."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
