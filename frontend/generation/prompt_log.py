"""Log of prompts and parameters, for servers with `--log-requests on`."""

import logging

from tandem.frontend.generation.admission import Admitted
from tandem.frontend.generation.request_record import RequestRecord
from tandem.frontend.generation.tokenizer import Tokenizer
from tandem.protocol.logs import REQUESTS_LOGGER, with_fields

logger = logging.getLogger(REQUESTS_LOGGER)


def log_request(record: RequestRecord, admitted: Admitted, tokenizer: Tokenizer, max_len: int) -> None:
    """Log the prompts and parameters of a request.

    At most `max_len` characters of each prompt are logged.
    """
    sampling, options = admitted.sampling, admitted.options
    for index, prompt in enumerate(admitted.prompts):
        # A token has at least one character, unless it is part of one.
        text = prompt.text[:max_len] or tokenizer.decode(prompt.ids[: 4 * max_len])
        logger.info(
            "received",
            extra=with_fields(
                request_id=record.request_id,
                prompt_index=index if len(admitted.prompts) > 1 else None,
                prompt=text[:max_len],
                prompt_tokens=len(prompt.ids),
                n=options.n,
                max_tokens=prompt.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sampling.seed,
                stream=options.stream,
            ),
        )
