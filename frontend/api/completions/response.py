"""The response of `POST /v1/completions`.

Each chunk is a prefix, the encoded text and a suffix, so that no object is created per token.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.frontend.api.formatter import DONE, KEEP_ALIVE, UsageSoFar, error_event, response_head
from tandem.frontend.api.logprobs import completion_logprobs, keep_best, prompt_logprobs
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.admission import Admitted
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.usage import Usage

_encode = msgspec.json.encode


class CompletionFormatter:
    """Format a response; `echo` prepends each prompt to its choices."""

    keep_alive = KEEP_ALIVE

    def __init__(self, admitted: Admitted, echo: bool) -> None:
        self._admitted = admitted
        self._echo = echo
        self._with_ids = admitted.options.return_token_ids
        self._include_usage = admitted.options.include_usage
        self._reply = response_head("cmpl", "text_completion", admitted.model)
        head = self._head = b"data: " + _encode(self._reply)[:-1]
        self._tail = b',"usage":null}\n\n' if self._include_usage else b"}\n\n"
        self._usage_so_far = UsageSoFar(admitted) if admitted.options.continuous_usage else None
        self._prefixes = [b'%b,"choices":[{"index":%d,"text":' % (head, i) for i in range(admitted.num_choices)]
        self._with_logprobs = admitted.options.logprobs is not None
        self._as_ids = admitted.options.return_tokens_as_token_ids
        self._text_only = not (self._with_ids or self._with_logprobs or admitted.options.continuous_usage)
        self._after_text = b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._unechoed = set(range(admitted.num_choices)) if echo and self._with_logprobs else set()
        """Choices with an echoed prompt to be sent in the first delta, with its log-probabilities."""

    def opening(self, usage: Usage) -> bytes:
        """Return the chunks of the echoed prompts and of their ids, as requested.

        They are sent before all output.
        """
        if not (self._with_ids or (self._echo and not self._unechoed)):
            return b""
        return b"".join([self._prompt(index) for index in range(self._admitted.num_choices)])

    def batch(self, pieces: Sequence[ChoiceDelta]) -> bytes:
        return self._piece(pieces[0]) if len(pieces) == 1 else b"".join([self._piece(piece) for piece in pieces])

    def closing(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        return self._head + b',"choices":[],"usage":' + _encode(usage) + b"}\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        return error_event(error)

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        options = self._admitted.options
        if options.num_returned is not None:
            choices = keep_best(choices, options.n, options.num_returned)
        shown = [self._choice(index, piece) for index, piece in enumerate(choices)]
        return _encode({**msgspec.structs.asdict(self._reply), "choices": shown, "usage": usage})

    def _piece(self, piece: ChoiceDelta) -> bytes:
        """Encode the chunk of a delta; empty if it has no visible output."""
        if self._usage_so_far is not None:
            self._usage_so_far.add(piece)
        if self._text_only and not piece.finish_reason:
            text = piece.text
            return self._prefixes[piece.index] + _encode(text) + self._after_text if text else b""
        if not (piece.text or piece.finish_reason or piece.logprobs or (self._with_ids and piece.token_ids)):
            return b""
        return self._chunk(self._echoing(piece), b"")

    def _echoing(self, piece: ChoiceDelta) -> ChoiceDelta:
        """Prepend the prompt to the first delta of a choice, unless it was sent before."""
        if piece.index not in self._unechoed:
            return piece
        self._unechoed.remove(piece.index)
        return msgspec.structs.replace(piece, text=self._admitted.prompt_of(piece.index).text + piece.text)

    def _prompt(self, index: int) -> bytes:
        prompt = self._admitted.prompt_of(index)
        ids = b',"prompt_token_ids":' + _encode(prompt.ids) if self._with_ids else b""
        text = prompt.text if self._echo and not self._unechoed else ""
        return self._chunk(ChoiceDelta(index, text, [], None), ids)

    def _chunk(self, piece: ChoiceDelta, extra: bytes) -> bytes:
        ids = b',"token_ids":' + _encode(piece.token_ids) if self._with_ids else b""
        finish = b'"%b"' % piece.finish_reason.encode() if piece.finish_reason else b"null"
        shown = piece.logprobs if self._with_logprobs else ()
        logprobs = _encode(completion_logprobs(shown, self._as_ids)) if shown else b"null"
        tail = self._tail if self._usage_so_far is None else self._usage_so_far.tail(piece.index)
        parts = (self._prefixes[piece.index], _encode(piece.text), logprobs, ids, extra, finish, tail)
        return b'%b%b,"logprobs":%b%b%b,"finish_reason":%b}]%b' % parts

    def _choice(self, index: int, piece: ChoiceDelta) -> dict[str, Any]:
        prompt = self._admitted.prompt_of(piece.index)
        text = prompt.text + piece.text if self._echo else piece.text
        scored, options = piece.logprobs, self._admitted.options
        if options.returns_prompt_logprobs and not self._echo:
            scored = scored[len(prompt.ids) :]
        logprobs = completion_logprobs(scored, self._as_ids) if self._with_logprobs else None
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs}
        choice["finish_reason"] = piece.finish_reason
        if options.returns_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(piece.logprobs[: len(prompt.ids)])
        if self._with_ids:
            choice |= {"prompt_token_ids": prompt.ids, "token_ids": piece.token_ids}
        return choice
