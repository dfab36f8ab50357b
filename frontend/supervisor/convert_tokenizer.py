"""Child process that converts a tokenizer to tokenizer.json using transformers.

It runs as `python -m tandem.frontend.supervisor.convert_tokenizer FOLDER OUT`, with limits on CPU time, memory and file
size, because checkpoints are untrusted. Code of the checkpoint is never run.
"""

import resource
import sys

MAX_CPU_SECONDS = 120
MAX_MEMORY_BYTES = 6 * 2**30
MAX_FILE_BYTES = 2**30


def limit() -> None:
    """Limit the resources of this process."""
    for kind, limit in (
        (resource.RLIMIT_CPU, MAX_CPU_SECONDS),
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def convert(folder: str, out: str) -> None:
    """Write the tokenizer of a folder to another one as tokenizer.json."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(
        folder, use_fast=True, trust_remote_code=False, local_files_only=True
    ).save_pretrained(out)


def main() -> None:
    """Convert, or print the reason on one line and exit with 1."""
    limit()
    # Skip torch, which tokenizers do not need and which takes seconds and gigabytes of address space to import.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        convert(*sys.argv[1:])
    except Exception as error:
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))


if __name__ == "__main__":
    main()
