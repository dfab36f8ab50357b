"""Prevent special tokens in text from clients, for `--no-special-tokens-in-text`.

All text is encoded by a second tokenizer with random names for the special tokens, which no text from clients matches.
This covers completions and `/tokenize`. Ids, merges and normalization are those of the original tokenizer.

A rendered chat mixes text from clients with special tokens of the template, which are replaced by their random names
after rendering. To identify them, special tokens in client strings are broken up by a random marker before rendering,
and the markers are removed afterwards. Marking whole strings would be simpler, but templates trim, compare and search
contents. A string is therefore modified only where it has the first letters of a special token, where it ends in fewer
of them, or where it starts with an inner part of one that starts with punctuation; otherwise adjacent text could
complete it. A template can still build a special token from client text if it deletes characters between the first four
(`replace`), or if it adds both ends around a word. Where it cuts text within a marker, the rest of the marker stays in
the prompt.

Special tokens are those marked `special` in tokenizer.json, and other added tokens of the form `<|...|>`, which are
roles and turns in some checkpoints. Others, such as `<think>` and `<tool_call>`, are usually text.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import tokenizers

from tandem.frontend.errors import unsupported

_HEX_TO_LETTERS = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
_PREFIX_CHARS = 4
"""Number of leading characters of a special token that are broken up anywhere in client text."""
_SLICE_CHARS = 2**14
"""Number of characters searched for special tokens before other threads may run."""
_PRIVATE_USE = range(0xE000, 0xF900)
_TURN_TOKEN = re.compile("<[|\uff5c].+[|\uff5c]>", re.DOTALL)


class SpecialTokenGuard:
    """Random names of the special tokens, which client text cannot match.

    Text with the random names is called sealed; `encoder` creates the tokenizer for it.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        """Choose random names for the special tokens, given with their ids."""
        nonce = secrets.token_hex(12).translate(_HEX_TO_LETTERS)
        self.names = {text: f"<{nonce}{_letters(index)}>" for index, text in enumerate(ids)}
        self._texts = {name: text for text, name in self.names.items()}
        self._ids = {token_id: text for text, token_id in ids.items()}
        self._break, self._head = _marker(), _marker()
        whole = [_any_of(text for text in ids if len(text) > 1)] if any(len(text) > 1 for text in ids) else []
        single = [f"{re.escape(text)}(?!{self._break})" for text in ids if len(text) == 1]
        self._special = re.compile("|".join([*whole, *single]) or r"(?!)")
        self._start = re.compile(_starts(ids), re.IGNORECASE)
        self._inner = frozenset(
            text[at : at + size].lower() for text in ids for at in range(1, len(text)) for size in (1, 2)
        )
        self._sealed = re.compile(f"<{nonce}[a-j]+>")
        self._nonce = nonce
        markers = (self._break, self._head)
        self._markers = (*markers, *(json.dumps(marker)[1:-1] for marker in markers))

    def protect(self, value: Any) -> Any:
        """Break up special tokens in all strings of a client's JSON value, and in keys."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, dict):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.protect, value))
        return value

    def seal(self, rendered: str) -> str:
        """Seal a rendered template.

        Its special tokens get their random names, and the client's text is restored.
        """
        return self.unmarked(self._special.sub(self._name, rendered))

    def unmarked(self, text: str) -> str:
        """Remove the markers of `protect`, verbatim or as escaped by `tojson`."""
        for marker in self._markers:
            text = text.replace(marker, "")
        return text

    def unsealed(self, text: str) -> str:
        """Return the original of a sealed text."""
        return self._sealed.sub(self._text, text) if self._nonce in text else text

    def check_ids(self, ids: Sequence[int], leading: Sequence[int], field: str) -> None:
        """Raise ApiError 400 for special tokens in a prompt of ids.

        A prompt may start with `leading`, the ids that the tokenizer prepends to text.
        """
        skipped = len(leading) if list(ids[: len(leading)]) == list(leading) else 0
        if self._ids.keys().isdisjoint(ids):
            return
        for at in range(skipped, len(ids)):
            if (text := self._ids.get(ids[at])) is not None:
                raise unsupported(
                    f"token id {ids[at]} at index {at} of a prompt in {field!r} is the special token {text!r}, which "
                    "this server does not take from clients (--no-special-tokens-in-text); leave it out",
                    field,
                )

    def encoder(self, data: bytes) -> tokenizers.Tokenizer:
        """Load a tokenizer.json with random names for the special tokens.

        Raises ValueError if its ids would differ.

        """
        described = msgspec.json.decode(data)
        for token in described["added_tokens"]:
            token["content"] = self._named(token["content"])
        model = described["model"]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {self._named(text): token_id for text, token_id in vocabulary.items()}
        elif vocabulary is not None:
            model["vocab"] = [[self._named(text), score] for text, score in vocabulary]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = self._named(model["unk_token"])
        if model.get("merges"):
            model["merges"] = [merge for merge in model["merges"] if not self._makes_special(merge)]
        encoder = tokenizers.Tokenizer.from_buffer(msgspec.json.encode(described))
        found = {encoder.token_to_id(name): text for text, name in self.names.items()}
        if ambiguous := [
            text for token_id, text in found.items() if token_id is None or self._ids.get(token_id) != text
        ]:
            raise ValueError(f"the special tokens {ambiguous} cannot be told from text")
        return encoder

    def _protect_text(self, text: str) -> str:
        # Encode in slices, between which other threads run. A slice that ends within a special token is cut at its
        # start.
        slices = (text[at : at + _SLICE_CHARS] for at in range(0, len(text), _SLICE_CHARS))
        text = "".join(self._start.sub(rf"\g<0>{self._break}", part) for part in slices)
        at = len(text) - len(text.lstrip())
        head = text[at : at + 2].rstrip().lower()
        if head and not head[0].isalnum() and head in self._inner:
            return text[:at] + self._head + text[at:]
        return text

    def _name(self, found: re.Match[str]) -> str:
        return self.names[found[0]]

    def _text(self, found: re.Match[str]) -> str:
        return self._texts.get(found[0], found[0])

    def _named(self, text: str) -> str:
        return self.names.get(text, text)

    def _makes_special(self, merge: str | list[str]) -> bool:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        return "".join(parts) in self.names or any(part in self.names for part in parts)


def guarded_tokens(raw: tokenizers.Tokenizer) -> dict[str, int]:
    """Return the ids of the protected tokens, by text."""
    return {
        token.content: token_id
        for token_id, token in raw.get_added_tokens_decoder().items()
        if token.content and (token.special or _TURN_TOKEN.fullmatch(token.content))
    }


def _letters(number: int) -> str:
    return str(number).translate(_HEX_TO_LETTERS)


def _marker() -> str:
    return "".join(chr(secrets.choice(_PRIVATE_USE)) for _ in range(6))


def _starts(texts: Iterable[str]) -> str:
    """Build a pattern of the leading characters of texts.

    At the end of a string, fewer characters match.
    """
    endings: dict[str, set[str]] = {}
    for text in texts:
        prefix = text[:_PREFIX_CHARS]
        endings.setdefault(prefix[0], set()).add(prefix[1:])
    patterns = [
        f"{re.escape(first)}(?={_any_of(rest, or_end=True)})" if "" not in rest else re.escape(first)
        for first, rest in endings.items()
    ]
    return "|".join(patterns) or r"(?!)"


def _any_of(texts: Iterable[str], or_end: bool = False) -> str:
    """Build a pattern of texts, as a trie; it prefers the longest.

    With `or_end`, a prefix of a text also matches if only whitespace follows.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        longer = [re.escape(char) + pattern(following) for char, following in node.items() if char]
        ways = [*longer, ""] if "" in node else [*longer, r"\s*\Z"] if or_end else longer
        return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"

    return pattern(tree) if tree else r"(?!)"
