"""Routes of `/admin/swap`: replace the weights by those of another checkpoint while the server runs."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from msgspec import Struct

from tandem.frontend.api.admin.weight_access import check_allowed
from tandem.frontend.api.openapi import error_response, json_response, takes
from tandem.frontend.api.service import Service
from tandem.frontend.errors import ApiError, unsupported
from tandem.frontend.request.field_types import Boolean, Number, OneOf, String
from tandem.frontend.request.fields import BodyFormat, Field
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.schema import STRING, Schema, closed
from tandem.protocol.commands import MAX_NAME_BYTES, SWAP_MODES, SwapMode
from tandem.protocol.events import SWAP_STATES, Answer

MAX_GRACE = 86_400
_BODY = BodyFormat(
    (
        Field("path", String(max_chars=4096, one_line=True), "Folder below --swap-root.", required=True),
        Field("running", OneOf(SWAP_MODES), "What happens to running requests (default: wait)."),
        Field("grace", Number(0, MAX_GRACE, 300.0), "Seconds that running requests may take to end, with wait."),
        Field("activate", Boolean(True), "False to only check and read the checkpoint."),
        Field(
            "version",
            String(max_chars=MAX_NAME_BYTES, max_bytes=MAX_NAME_BYTES, one_line=True),
            "Version that outputs report (default: the highest number of a version so far plus 1).",
        ),
    )
)
SWAP = closed(
    {
        "state": {"enum": [*SWAP_STATES]},
        "path": STRING,
        "percent": {"type": "integer", "minimum": 0, "maximum": 100},
        "active_path": STRING,
        "weight_version": STRING,
        "problem": STRING,
    }
)


class SwapRequest(Struct, frozen=True):
    """Body of a request to swap weights."""

    path: str
    running: SwapMode = "wait"
    grace: float = 300.0
    activate: bool = True
    version: str = ""


def parse_swap(body: bytes, ignored: IgnoredFields) -> SwapRequest:
    """Parse the body of a request to swap weights. Raises ApiError 400."""
    found = _BODY.read(body, ignored)
    running: SwapMode = found["running"] or "wait"
    return SwapRequest(found["path"], running, found["grace"], found["activate"], found["version"] or "")


def checkpoint_below(root: Path, given: str) -> Path:
    """Return the folder of a checkpoint, with all links followed.

    Raises ApiError 400 if it or one of its files is not below the root, if it is a file, or if it has no safetensors
    files, 404 if it does not exist. The message has the path that was given.
    """
    shown = repr(given[:200])
    try:
        folder, base = (root / given).resolve(), root.resolve()
        inside = folder.is_relative_to(base)
        is_file = inside and folder.is_file()
        exists = inside and folder.is_dir()
        files = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")] if exists else []
        inside = inside and all(file.resolve().is_relative_to(base) for file in files)
    except (OSError, ValueError, RuntimeError):
        inside, is_file, exists, files = False, False, False, []
    if not inside:
        raise unsupported(f"{{param}}: {shown}, or a file in it, is not below the server's --swap-root", "path")
    if is_file:
        raise unsupported(f"{{param}}: {shown} is a file; give its folder", "path")
    if not exists:
        raise ApiError(404, f"the folder of the checkpoint, {shown}, does not exist", "path", "not_found")
    if not any(file.suffix == ".safetensors" for file in files):
        raise unsupported(f"{{param}}: {shown} has no safetensors files, and no others are read", "path")
    return folder


def swap_body(answer: Answer) -> dict[str, Any]:
    """Convert the state of a swap to JSON."""
    facts = answer.swap
    if facts is None:
        raise ApiError(503, answer.message, None, "engine_unavailable")
    return {
        "state": facts.state,
        "path": facts.path,
        "percent": facts.percent,
        "active_path": facts.active_path,
        "weight_version": facts.version,
        "problem": facts.problem,
    }


def _described(described: Schema) -> Schema:
    described["responses"] |= {
        "403": error_response("There is no --swap-root, or the weights may not be changed from this host."),
        "404": error_response("The engine keeps its weights, or the folder does not exist."),
        "409": error_response("The swap failed, was cancelled or is refused; the weights are those before."),
    }
    return described


def swap_router(service: Service) -> APIRouter:
    """Build the routes that swap weights."""
    router, calls = APIRouter(), service.client.calls
    state = json_response("The state at one moment.", SWAP)

    @router.post("/admin/swap", openapi_extra=_described(takes(_BODY.schema(), state, names_model=False)))
    async def swap(request: Request) -> dict[str, Any]:
        """Swap weights, and answer once those of the checkpoint serve, or are staged.

        The checkpoint must be of the same model: architecture, shapes, tokenizer, quantization, chat template,
        generation config. It is checked and read first, while the server keeps serving.
        """
        check_allowed(service, request)
        root = service.config.swap_root
        if root is None:
            raise ApiError(403, "this frontend takes no checkpoints; start it with --swap-root", None, "swap_root")
        async with service.pending.receive(
            request, partial(parse_swap, ignored=service.ignored_fields(request))
        ) as body:
            # Disks may be slow, and folders large; others are served meanwhile.
            folder, base = await asyncio.to_thread(lambda: (checkpoint_below(root, body.path), root.resolve()))
            given = body.running, body.grace, body.activate, body.version
            answer = await calls.swap(str(folder), *given, root=str(base))
        if not answer.ok:
            raise ApiError(409, answer.message, None, "swap_failed")
        return swap_body(answer)

    @router.get("/admin/swap", openapi_extra=_described({"responses": {"200": state}}))
    async def get_swap(request: Request) -> dict[str, Any]:
        """Tell which weights serve, and how far a swap is."""
        check_allowed(service, request)
        return swap_body(await calls.inspect_swap())

    @router.delete("/admin/swap", openapi_extra=_described({"responses": {"200": state}}))
    async def cancel_swap(request: Request) -> dict[str, Any]:
        """Cancel the swap in progress, or drop what is staged."""
        check_allowed(service, request)
        answer = await calls.cancel_swap()
        if not answer.ok:
            raise ApiError(409, answer.message, None, "no_swap")
        return swap_body(answer)

    return router
