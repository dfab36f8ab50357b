"""Program that renders conversations with the chat templates of one model.

It is started as `python -m tandem.frontend.chat.render_worker FD`, with the file descriptor of a socket on which it
exchanges `render_frames`.

It runs as a separate process because a template is a program, and a single call of a filter or operator on values
within the sandbox's bounds can hold the interpreter for minutes or take gigabytes. Within a process neither can be
stopped. Here memory has a limit of the kernel's, and the frontend kills a process that takes too long.
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
    """Render with the templates of one model, each compiled at its first use."""

    def __init__(self, templates: Templates, sandbox: SandboxedTemplates) -> None:
        self._templates = templates
        self._sandbox = sandbox
        self._compiled: dict[str, Template] = {}

    def compile_all(self) -> None:
        """Compile all templates, so that no request waits for it. Raises RenderError."""
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
    """Render one request; return the frame that answers it."""
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
    """Answer requests until the other side closes the socket."""
    renderer = None
    while header := frames.read(HEADER.size):
        length, _ = HEADER.unpack(header)
        data = frames.read(length)
        if renderer is None:
            renderer = Renderer(msgspec.json.decode(data, type=Templates), SandboxedTemplates())
            renderer.compile_all()
            gc.freeze()  # what lives as long as the process need not be looked at again
            sock.sendall(frame(READY, b""))
        else:
            sock.sendall(answer(renderer, data))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with socket.socket(fileno=int(sys.argv[1])) as sock, sock.makefile("rb") as frames:
        try:
            serve(frames, sock)
        except MemoryError:  # outside of a template, such as for a large request beside what a template has left
            sys.exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
