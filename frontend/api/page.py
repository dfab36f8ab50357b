"""The playground at `/` and the reference at `/docs`.

Both are static files of the package, without secrets.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

_FOLDER = Path(__file__).parents[1] / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".ico": "image/x-icon",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_paths() -> dict[str, Path]:
    """Map each URL path of the pages to its file.

    A browser requests them before the user can enter an API key, and `/favicon.ico` for any other page.
    """
    files = {
        f"/page/{file.relative_to(_FOLDER).as_posix()}": file
        for file in sorted(_FOLDER.rglob("*"))
        if file.suffix in _TYPES
    }
    for path, name in (("/", "index.html"), ("/docs", "docs.html"), ("/favicon.ico", "favicon.ico")):
        files[path] = files.pop(f"/page/{name}")
    return files


def page_router() -> APIRouter:
    """Build the routes of the playground and of the reference."""
    router = APIRouter()
    for path, file in page_paths().items():
        router.add_api_route(path, _serving(file), methods=["GET", "HEAD"], include_in_schema=False)
    return router


def _serving(file: Path) -> Callable[[], Awaitable[Response]]:
    content, kind = file.read_bytes(), _TYPES[file.suffix]

    async def serve() -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)

    return serve
