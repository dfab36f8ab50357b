"""Continue's command line, `cn --print`, over chat completions."""

import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from checks import base_url, expect, run
from cli import SAID, SHELL_COMMAND, play, program, project, ran

WORK = project()
answered: list[tuple[bool, str]] = []
"""For each request, whether it asked for a stream, and the type of the answer."""


class Forwarding(BaseHTTPRequestHandler):
    """Passes requests on to the server, because `--print` does not show whether an answer was streamed."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        request = urllib.request.Request(base_url() + self.path, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            kind = reply.headers["content-type"]
            answered.append((json.loads(body).get("stream", False), kind))
            self.send_response(reply.status)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(reply.read())


forwarding = ThreadingHTTPServer(("127.0.0.1", 0), Forwarding)
SETTINGS = f"""
name: Tandem
version: 0.0.1
schema: v1
models:
  - name: agent
    provider: openai
    model: agent-model
    apiBase: {base_url()}/v1
    apiKey: none
    roles: [chat]
    capabilities: [tool_use]
    defaultCompletionOptions:
      contextLength: 131072
      maxTokens: 1024
"""


def cn(*arguments: str) -> str:
    return ran([program("cn"), "--config", str(WORK / "config.yaml"), "--print", *arguments], WORK)


def first_turn() -> None:
    expect("I heard ask-1." in (said := cn("Say hello (ask-1)")), said)


def second_turn() -> None:
    expect("I heard ask-1 ask-2." in (said := cn("--resume", "Say hello again (ask-2)")), said)


def stream() -> None:
    """Continue accumulates the chunks of a stream; its answer is the text of all of them."""
    with forwarding:
        threading.Thread(target=forwarding.serve_forever, daemon=True).start()
        (WORK / "config.yaml").write_text(SETTINGS.replace(base_url(), f"http://127.0.0.1:{forwarding.server_port}"))
        expect("I heard ask-4." in (said := cn("Say hello (ask-4)")), said)
        forwarding.shutdown()
    expect(answered and all(asked and "text/event-stream" in kind for asked, kind in answered), answered)


def tool() -> None:
    said = cn("--auto", f"Say hello with the shell (ask-3)\n{play('Bash', command=SHELL_COMMAND)}")
    expect("The tool said" in said and SAID in said, said)
    expect((WORK / "said.txt").read_text().strip() == SAID, "the command ran")


(WORK / "config.yaml").write_text(SETTINGS)
run(first_turn=(first_turn,), second_turn=(second_turn,), tool=(tool,), streaming=(stream,))
