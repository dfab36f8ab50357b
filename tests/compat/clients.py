"""Check common client libraries against a running server, each in its own virtual environment.

    python tests/compat/clients.py http://127.0.0.1:8000 --environments /tmp/clients [--only NAME ...]

The server has to serve the default model. Prints a table of what passed; exits with 1 if anything did not.
"""

import argparse
import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
MOST_SECONDS = 900


@dataclass(frozen=True)
class Client:
    name: str
    requirements: tuple[str, ...]
    script: str


CLIENTS = (
    Client("openai-1", ("openai>=1,<2",), "openai_checks.py"),
    Client("openai-2", ("openai>=2,<3",), "openai_checks.py"),
    Client("openai-3", ("openai>=3,<4",), "openai_checks.py"),
    Client("litellm", ("litellm", "mcp"), "litellm_checks.py"),
    Client("langchain-openai", ("langchain-openai",), "langchain_checks.py"),
    Client("instructor", ("instructor",), "instructor_checks.py"),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]",), "pydantic_ai_checks.py"),
)


def prepared(client: Client, environments: Path) -> Path:
    """Return the interpreter of an environment that has the client."""
    folder = environments / client.name
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *client.requirements], check=True)
        (folder / "ready").touch()
    return python


def version(python: Path, client: Client) -> str:
    package = client.requirements[0].partition("[")[0].partition(">")[0]
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def checked(python: Path, client: Client, url: str, log: Path) -> list[dict[str, object]]:
    """Return the result of each check; tracebacks are logged."""
    environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": str(HERE)}
    with log.open("w") as errors:
        done = subprocess.run(
            [python, HERE / client.script, url],
            env=environ, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=MOST_SECONDS, check=False,
        )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    if done.returncode != 0 or not results:
        results.append({"check": "the script itself", "ok": False, "detail": f"exit {done.returncode}, see {log}"})
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=[client.name for client in CLIENTS])
    arguments = parser.parse_args()
    arguments.environments.mkdir(parents=True, exist_ok=True)
    failed = 0
    print("| client | check | result |\n| --- | --- | --- |")
    for client in CLIENTS:
        if arguments.only and client.name not in arguments.only:
            continue
        python = prepared(client, arguments.environments)
        name = f"{client.name} {version(python, client)}"
        for result in checked(python, client, arguments.url, arguments.environments / f"{client.name}.log"):
            failed += not result["ok"]
            print(f"| {name} | {result['check']} | {'ok' if result['ok'] else result['detail']} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
