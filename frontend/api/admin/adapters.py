"""Routes that load and unload adapters at run time, with the names and bodies of vLLM.

They exist with `--lora-root` only, and take folders below it: a path names files that the engine reads.
"""

import asyncio
from functools import partial
from pathlib import Path

from fastapi import APIRouter, Request
from msgspec import Struct
from starlette.responses import PlainTextResponse

from tandem.frontend.api.openapi import error_response, takes
from tandem.frontend.api.service import Service
from tandem.frontend.errors import ApiError, malformed, unsupported
from tandem.frontend.request.field_types import Boolean, String
from tandem.frontend.request.fields import BodyFormat, Field
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.schema import STRING, Schema
from tandem.protocol.commands import MAX_NAME_BYTES

FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Files of an adapter that an engine reads."""
_NAME_TYPE = String(max_chars=MAX_NAME_BYTES, max_bytes=MAX_NAME_BYTES, one_line=True)
_NAME = Field("lora_name", _NAME_TYPE, "Name of the adapter.", required=True)
_LOAD = BodyFormat(
    (
        _NAME,
        Field("lora_path", String(max_chars=4096, one_line=True), "Folder below --lora-root.", required=True),
        Field("load_inplace", Boolean(), "Replace an adapter of the name."),
    )
)
_UNLOAD = BodyFormat((_NAME,))


class LoadRequest(Struct, frozen=True):
    """Body of a request to load an adapter."""

    name: str
    path: str
    replaces: bool


def parse_load(body: bytes, ignored: IgnoredFields) -> LoadRequest:
    """Parse the body of a request to load an adapter. Raises ApiError 400."""
    found = _LOAD.read(body, ignored)
    return LoadRequest(found["lora_name"], found["lora_path"], found["load_inplace"])


def parse_unload(body: bytes, ignored: IgnoredFields) -> str:
    """Parse the body of a request to unload an adapter; return its name. Raises ApiError 400."""
    name: str = _UNLOAD.read(body, ignored)["lora_name"]
    return name


def folder_below(root: Path, given: str) -> Path:
    """Return the folder of an adapter, given its path, absolute or relative to the root.

    Raises ApiError 400 for a folder, or a file in it, that is not below the root once links are followed.
    """
    try:
        folder, base = (root / given).resolve(), root.resolve()
        inside = all(path.resolve().is_relative_to(base) for path in (folder, *(folder / name for name in FILES)))
        exists = inside and folder.is_dir()
    except (OSError, ValueError, RuntimeError):
        inside = exists = False
    if not inside:
        raise unsupported("{param} is not below the folder of adapters (--lora-root)", "lora_path")
    if not exists:
        raise ApiError(404, "the folder of the adapter does not exist", "lora_path", "not_found")
    return folder


def _described(body: BodyFormat, done: str, missing: str) -> Schema:
    """Describe a route. done: its answer; missing: the reason of a 404."""
    described = takes(body.schema(), {"description": done, "content": {"text/plain": {"schema": STRING}}}, False)
    described["responses"]["404"] = error_response(missing)
    return described


def adapters_router(service: Service) -> APIRouter:
    """Build the routes of adapters; there are none without a folder for them."""
    router, root, calls = APIRouter(), service.config.lora_root, service.client.calls
    if root is None:
        return router

    @router.post(
        "/v1/load_lora_adapter",
        openapi_extra=_described(_LOAD, "The adapter is loaded.", "The folder does not exist."),
    )
    async def load_lora_adapter(request: Request) -> PlainTextResponse:
        """Load an adapter, and answer once requests may use it."""
        parse = partial(parse_load, ignored=service.ignored_fields(request))
        async with service.pending.receive(request, parse) as body:
            own = service.ready().model.name
            if body.name in service.names.listed(own):
                raise unsupported("{param} is the name of the model itself; choose another", "lora_name")
            if body.name in service.client.adapters and not body.replaces:
                raise unsupported("the adapter is loaded already; give load_inplace to replace it", "lora_name")
            folder, base = await asyncio.to_thread(lambda: (folder_below(root, body.path), root.resolve()))
            given = str(folder), body.replaces, str(base)
            if problem := await calls.load_adapter(body.name, *given):
                raise malformed(problem, "lora_path")
        return PlainTextResponse(f"Success: LoRA adapter '{body.name}' added successfully.")

    @router.post(
        "/v1/unload_lora_adapter",
        openapi_extra=_described(_UNLOAD, "The adapter is unloaded.", "The adapter is not loaded."),
    )
    async def unload_lora_adapter(request: Request) -> PlainTextResponse:
        """Unload an adapter, and answer once no request uses it any more.

        Requests that arrive meanwhile get a 404.
        """
        parse = partial(parse_unload, ignored=service.ignored_fields(request))
        async with service.pending.receive(request, parse) as name:
            if problem := await calls.unload_adapter(name):
                raise ApiError(404, problem, "lora_name", "not_found")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return router
