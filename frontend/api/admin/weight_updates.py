"""Routes by which a trainer sends weights, as vLLM has them.

The trainer broadcasts in a process group of its own; these calls only say what it sends, and wait for it.
"""

import base64
import binascii
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta, Struct

from tandem.frontend.api.admin.weight_access import check_allowed
from tandem.frontend.api.openapi import error_response, json_response
from tandem.frontend.api.service import Service
from tandem.frontend.engine.calls import UpdateCall
from tandem.frontend.errors import ApiError, malformed
from tandem.frontend.request.field_types import String
from tandem.frontend.request.schema import Schema, closed
from tandem.protocol.commands import (
    MAX_NAME_BYTES,
    FinishWeightUpdate,
    InitWeightTransfer,
    StartWeightUpdate,
    UpdateWeights,
)

_Body = TypeVar("_Body")

DEFAULT_BUFFER_BYTES = 2**30
"""vLLM's size of a packed buffer."""
MAX_BUFFER_BYTES = 2**36
UNIQUE_ID_BYTES = 128
MAX_WORLD_SIZE = 2**16
_Length = Annotated[int, Meta(ge=0, lt=2**31)]


class InitInfo(Struct):
    """`init_info`."""

    rank_offset: int
    world_size: Annotated[int, Meta(le=MAX_WORLD_SIZE)]
    master_address: str | None = None
    master_port: int | None = None
    nccl_unique_id_b64: str | None = None
    packed: bool = False
    packed_buffer_size_bytes: int = DEFAULT_BUFFER_BYTES


class UpdateInfo(Struct):
    """`update_info`."""

    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[_Length]] = []
    packed: bool | None = None
    packed_buffer_size_bytes: int = DEFAULT_BUFFER_BYTES


class InitBody(Struct):
    init_info: InitInfo


class UpdateBody(Struct):
    update_info: UpdateInfo


class FinishBody(Struct):
    weight_version: str | None = None


_VERSION = String(max_chars=MAX_NAME_BYTES, max_bytes=MAX_NAME_BYTES, one_line=True)
_INIT = msgspec.json.Decoder(InitBody)
_UPDATE = msgspec.json.Decoder(UpdateBody)
_FINISH = msgspec.json.Decoder(FinishBody | None)


def parse_init(body: bytes) -> InitInfo:
    """Parse the body of an initialization. Raises ApiError 400."""
    info = _decoded(_INIT, body).init_info
    if not 0 < info.rank_offset < info.world_size:
        raise malformed("{param} must be at least 1 and less than world_size", "init_info.rank_offset")
    if not 0 < info.packed_buffer_size_bytes <= MAX_BUFFER_BYTES:
        raise malformed(f"{{param}} must be between 1 and {MAX_BUFFER_BYTES}", "init_info.packed_buffer_size_bytes")
    has_address = info.master_address is not None or info.master_port is not None
    if not has_address and info.nccl_unique_id_b64 is None:
        raise malformed("{param} needs nccl_unique_id_b64, or master_address and master_port", "init_info")
    if has_address and (not info.master_address or info.master_port is None):
        raise malformed("{param} needs both master_address and master_port", "init_info")
    if info.master_port is not None and not 0 < info.master_port < 2**16:
        raise malformed(f"{{param}} must be between 1 and 65535, not {info.master_port}", "init_info.master_port")
    return info


def parse_update(body: bytes) -> UpdateInfo:
    """Parse the body of an update. Raises ApiError 400."""
    info = _decoded(_UPDATE, body).update_info
    if not len(info.names) == len(info.dtype_names) == len(info.shapes):
        raise malformed("{param} needs names, dtype_names and shapes of equal length", "update_info")
    if not 0 < info.packed_buffer_size_bytes <= MAX_BUFFER_BYTES:
        raise malformed(f"{{param}} must be between 1 and {MAX_BUFFER_BYTES}", "update_info.packed_buffer_size_bytes")
    return info


def parse_finish(body: bytes) -> str:
    """Parse the body of the end of an update, which may be empty; return the version. Raises ApiError 400."""
    found = _decoded(_FINISH, body) if body.strip() else None
    version = "" if found is None else found.weight_version or ""
    return _VERSION.check("weight_version", version) if version else ""


def _decoded(decoder: "msgspec.json.Decoder[_Body]", body: bytes) -> _Body:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(f"the body is not valid: {error}", None) from None


def _unique_id(text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise malformed("{param} is not base64", "init_info.nccl_unique_id_b64") from None
    if len(data) != UNIQUE_ID_BYTES:
        raise malformed(f"{{param}} has {len(data)} bytes instead of {UNIQUE_ID_BYTES}", "init_info.nccl_unique_id_b64")
    return data


def weight_updates_router(service: Service) -> APIRouter:
    """Build the routes. They answer 404 unless the engine takes updates."""
    router = APIRouter()
    calls = service.client.calls

    async def carry_out(request: Request, make: Callable[[int], UpdateCall]) -> None:
        check_allowed(service, request)
        if problem := await calls.update_weights(make):
            raise ApiError(409, problem, None, "weight_update_failed")

    @router.post("/init_weight_transfer_engine", openapi_extra=_described("init_info"))
    async def init_weight_transfer_engine(request: Request) -> dict[str, str]:
        """Join the process group of a trainer, in which it has rank 0."""
        check_allowed(service, request)
        async with service.pending.receive(request, parse_init) as info:
            unique_id = b"" if info.nccl_unique_id_b64 is None else _unique_id(info.nccl_unique_id_b64)
            size = info.packed_buffer_size_bytes if info.packed else 0
            address = ("", 0) if unique_id else (info.master_address or "", info.master_port or 0)
            given = (info.rank_offset, info.world_size, *address)
        await carry_out(request, lambda call: InitWeightTransfer(call, *given, unique_id, size))
        return {"message": "Weight transfer initialized"}

    @router.post("/start_weight_update", openapi_extra=_described(None))
    async def start_weight_update(request: Request) -> dict[str, str]:
        """Begin an update. A body is ignored."""
        await carry_out(request, StartWeightUpdate)
        return {"message": "Weight update started"}

    @router.post("/update_weights", openapi_extra=_described("update_info"))
    async def update_weights(request: Request) -> dict[str, str]:
        """Receive tensors that the trainer broadcasts, and answer once all have arrived.

        Names, dtypes and shapes are checked before. Empty lists mean those of the previous call.
        """
        check_allowed(service, request)
        try:
            async with service.pending.receive(request, parse_update) as info:
                size = None if info.packed is None else info.packed_buffer_size_bytes * info.packed
                given = (info.names, info.dtype_names, info.shapes, size)
        except ApiError:
            calls.refuse_update()  # The trainer may be sending already.
            raise
        await carry_out(request, lambda call: UpdateWeights(call, *given))
        return {"message": "Weights updated"}

    @router.post("/finish_weight_update", openapi_extra=_described(None))
    async def finish_weight_update(request: Request) -> dict[str, str]:
        """Have the engine compute with the weights that were received, if they are complete."""
        check_allowed(service, request)
        async with service.pending.receive(request, parse_finish) as version:
            pass
        await carry_out(request, lambda call: FinishWeightUpdate(call, version))
        return {"message": "Weight update finished"}

    return router


def _described(field: str | None) -> Schema:
    described: Schema = {
        "responses": {
            "200": json_response("Done.", closed({"message": {"type": "string"}})),
            "400": error_response("The body is not valid."),
            "403": error_response("The client may not change the weights."),
            "404": error_response("The weights cannot be updated."),
            "409": error_response("The call failed, or is not the next one; the message says why."),
            "503": error_response("Not ready; try again later."),
        }
    }
    if field is not None:
        body = {"type": "object", "required": [field], "properties": {field: {"type": "object"}}}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return described
