"""Program that renders conversations with the chat templates of a model.

It is started as `python -m tandem.frontend.chat.render_worker FD`, with the file descriptor of a socket for
`render_frames`.

It runs as a separate process because a template is a program: a single call of a filter or operator on values within
the sandbox's limits can hold the GIL for minutes or use gigabytes, which cannot be interrupted within a process. Here
the kernel limits memory, and the frontend kills a process that takes too long.
"""

import gc
import resource
import socket
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

import msgspec
from jinja2 import Template

from tandem.frontend.chat.render_frames import (
    FAILURE,
    HEADER,
    MEMORY_BYTES,
    OUT_OF_MEMORY,
    PROMPT,
    READY,
    RenderRequest,
    Templates,
    frame,
)
from tandem.frontend.chat.template_sandbox import RenderError, SandboxedTemplates


class Renderer:
    """Renderer for the templates of a model, each compiled on first use."""

    def __init__(self, templates: Templates, sandbox: SandboxedTemplates) -> None:
        self._templates = templates
        self._sandbox = sandbox
        self._compiled: dict[str, Template] = {}

    def compile_all(self) -> None:
        """Compile all templates in advance. Raises RenderError."""
        for name in self._templates.texts:
            self._template(name)

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """Render the template of this name.

        Raises RenderError if it fails or exceeds a limit.
        """
        return self._sandbox.render(self._template(name), {**self._templates.special_tokens, **variables})

    def _template(self, name: str) -> Template:
        if name not in self._compiled:
            self._compiled[name] = self._sandbox.compile_template(self._templates.texts[name])
        return self._compiled[name]


def answer(renderer: Renderer, request: bytes) -> bytes:
    """Render a request; return the frame of the reply."""
    try:
        wanted = msgspec.json.decode(request, type=RenderRequest)
        return frame(PROMPT, renderer.render(wanted.template, wanted.variables).encode())
    except RenderError as failure:
        reason = str(failure)
    except UnicodeEncodeError:
        reason = "it renders half of a surrogate pair, which is not a character"
    except MemoryError:
        reason = f"it ran out of memory (at most {MEMORY_BYTES // 2**20} MiB)"
    except RecursionError:
        reason = "its input is nested too deeply"
    return frame(FAILURE, reason.encode(errors="replace"))


def serve(frames: BinaryIO, sock: socket.socket) -> None:
    """Serve requests until the peer closes the socket."""
    renderer = None
    while header := frames.read(HEADER.size):
        length, _ = HEADER.unpack(header)
        data = frames.read(length)
        if renderer is None:
            renderer = Renderer(msgspec.json.decode(data, type=Templates), SandboxedTemplates())
            renderer.compile_all()
            gc.freeze()  # exclude objects that live as long as the process from collections
            sock.sendall(frame(READY, b""))
        else:
            sock.sendall(answer(renderer, data))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with socket.socket(fileno=int(sys.argv[1])) as sock, sock.makefile("rb") as frames:
        try:
            serve(frames, sock)
        except MemoryError:  # outside of a template, such as for a large request when a template has left little memory
            sys.exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
