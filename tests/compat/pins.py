"""The clients that are checked, with the versions that are pinned."""

from dataclasses import dataclass
from typing import Literal

NODE = "node@22.23.3"
"""The interpreter that the clients from npm get."""


@dataclass(frozen=True)
class Client:
    """A client, the packages it needs with the one that names its version first, and the script with its checks."""

    name: str
    packages: tuple[str, ...]
    script: str
    server: Literal["model", "agent"] = "model"
    """The server that it asks: one of the default model, or one whose scripted engine plays an agent's turns."""

    @property
    def from_npm(self) -> bool:
        return "==" not in self.packages[0]

    @property
    def version(self) -> str:
        return self.packages[0].rpartition("==" if not self.from_npm else "@")[2]


CLIENTS = (
    Client("Codex CLI", ("@openai/codex@0.169.0", NODE), "codex_checks.py", "agent"),
    Client("Claude Code", ("@anthropic-ai/claude-code@2.1.197", NODE), "claude_code_checks.py", "agent"),
    Client("Continue", ("@continuedev/cli@1.5.47", NODE), "continue_checks.py", "agent"),
    Client(
        "Vercel AI SDK",
        ("ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7", NODE),
        "vercel_checks.mjs",
    ),
    Client("openai-agents", ("openai-agents==0.24.0",), "openai_agents_checks.py"),
    Client("LangChain", ("langchain-openai==1.7.3",), "langchain_checks.py"),
    Client("litellm", ("litellm==1.106.2", "mcp==2.3.0"), "litellm_checks.py"),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]==2.68.0",), "pydantic_ai_checks.py"),
    Client("instructor", ("instructor==1.17.0",), "instructor_checks.py"),
    Client("openai 1", ("openai==1.109.1",), "openai_checks.py"),
    Client("openai 2", ("openai==2.54.0",), "openai_checks.py"),
    Client("openai 3", ("openai==3.54.0",), "openai_checks.py"),
    Client("anthropic", ("anthropic==2.12.0",), "anthropic_checks.py"),
)
