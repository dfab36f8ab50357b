"""uvicorn's HTTP protocol, with errors of the transport in the same shape as all others."""

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tandem.frontend.errors import error_body
from tandem.frontend.server.middleware import REQUEST_ID, fresh_id


class JsonErrorProtocol(HttpToolsProtocol):
    """What is no HTTP at all never reaches the app; uvicorn answers it here, in plain text if it were not for this."""

    def send_400_response(self, msg: str) -> None:
        body = error_body(400, msg, None, "invalid_http")
        lines = [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
        lines += [b"%b: %b\r\n" % (REQUEST_ID, fresh_id()), b"content-type: application/json\r\n"]
        lines += [b"content-length: %d\r\n" % len(body)]
        self.transport.write(b"".join([STATUS_LINE[400], *lines, b"connection: close\r\n\r\n", body]))
        self.transport.close()
