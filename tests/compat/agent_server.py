"""A real frontend in front of a scripted engine that plays an agent's turns, with room for an agent's long prompts."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from tandem.protocol.codec import unpack_ids
from tandem.protocol.commands import Submit
from tests.compat.checks import FORECAST_VALUE
from tests.fakes.engine import FakeEngine
from tests.support.reasoning_model import RAW, encode, write_reasoning_model
from tests.support.serving import GUARD_SECONDS, free_port, until

ROOT = Path(__file__).parents[2]
CONTEXT = 131_072


def answer(prompt: str, constrained: bool) -> str:
    """Return what the engine says to a prompt.

    A line `PLAY {call}` of the user's is played as this tool call, and a result after it is repeated. Every answer
    names the marks (`ask-1`, `ask-2`) that its prompt has: so a client sees whether its conversation arrived. Under a
    grammar the answer is the forecast.
    """
    if constrained:
        return json.dumps(FORECAST_VALUE)
    marks = " ".join(sorted(set(re.findall(r"ask-\d", prompt))))
    before, played, after = prompt.rpartition("PLAY ")
    if played and "<tools>" in before:
        call = after.partition("\n")[0].partition("<|im_end|>")[0]
        results = re.findall(r"<tool_response>\n(.*?)</tool_response>", after, re.DOTALL)
        if not results:
            return f"<think>\nIt asks for a tool.\n</think>\n\nI call it.\n<tool_call>\n{call}\n</tool_call>"
        return f"<think>\nIt answered.\n</think>\n\nThe tool said {results[-1].strip()}. I heard {marks}."
    return f"<think>\nNo tool is needed.\n</think>\n\nI heard {marks}."


def script(submit: Submit) -> list[int]:
    prompt = RAW.decode(list(unpack_ids(submit.prompt_ids)), skip_special_tokens=False)
    return encode(answer(prompt, submit.constraint is not None))


class AgentServer:
    """Serves on a free port of the loopback from entry to exit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "frontend.log"
        self.endpoint = f"ipc://{folder / 'engine'}"
        self.engine = FakeEngine(
            self.endpoint, script, name="agent-model", vocab_size=RAW.get_vocab_size(), max_len=CONTEXT
        )
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "AgentServer":
        template = (ROOT / "frontend" / "templates" / "qwen3.jinja").read_text()
        model = self.folder / "model"
        model.mkdir()
        write_reasoning_model(model, template)
        self.engine.kv_tokens, self.engine.tokens_per_step = 8 * CONTEXT, 4
        self.engine.start()
        command = [
            sys.executable, "-m", "tandem.frontend", "--endpoint", self.endpoint, "--model-dir", str(model),
            "--port", str(self.port), "--served-model-name", "agent-model", "*", "--log-level", "debug",
            "--tool-parser", "hermes", "--reasoning-parser", "think", "--beat-timeout", "60",
        ]  # fmt: skip
        environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
        until(self.ready, "the frontend of the scripted engine")
        return self

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health/ready", timeout=GUARD_SECONDS) as reply:
                return reply.status == 200
        except (urllib.error.URLError, ConnectionError):
            return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(GUARD_SECONDS)
        self.engine.die()
