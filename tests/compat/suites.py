"""Run third-party test suites against a running server, each in its own virtual environment.

    python tests/compat/suites.py http://127.0.0.1:8000 --environments /tmp/suites [--only schemathesis ...]

`schemathesis` asks by our own /openapi.json, with every check but one: fields that are fine alone may contradict each
other, or ask for more than the model can take, so not all data that fits the description is accepted. `llm-comply`
compares with OpenAI's description; the server has to serve the default model. Exits with 1 if schemathesis fails.
"""

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path

MODEL = "tandem-default"
FORMATS = ("openai-chat", "open-responses")


def program(name: str, environments: Path) -> Path:
    """Return a package's console command, installing it if necessary."""
    folder = environments / name
    command = folder / "bin" / name
    if not command.exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", name], check=True)
    return command


def run_schemathesis(command: Path, url: str, examples: int) -> int:
    flags = ("--checks", "all", "--exclude-checks", "positive_data_acceptance", "--max-examples", str(examples))
    more = ("--seed", "1", "--request-timeout", "120", "--suppress-health-check", "all", "--no-color")
    return subprocess.run([command, "run", url + "/openapi.json", *flags, *more], check=False).returncode


def run_llm_comply(command: Path, url: str) -> None:
    print("| suite | test | result |\n| --- | --- | --- |")
    for form in FORMATS:
        flags = ("-u", url + "/v1", "-k", "none", "-m", MODEL, "--format", form, "--json", "--timeout", "300")
        done = subprocess.run([command, *flags], capture_output=True, text=True, check=False)
        for result in json.loads(done.stdout)["results"]:
            said = "; ".join([result["status"], *result.get("errors", ()), *result.get("warnings", ())])
            print(f"| {form} | {result['name']} | {said} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=("schemathesis", "llm-comply"))
    parser.add_argument("--examples", type=int, default=50, help="generated cases an operation (default 50)")
    arguments = parser.parse_args()
    arguments.environments.mkdir(parents=True, exist_ok=True)
    wanted = arguments.only or ("llm-comply", "schemathesis")
    if "llm-comply" in wanted:
        run_llm_comply(program("llm-comply", arguments.environments), arguments.url)
    if "schemathesis" in wanted:
        command = program("schemathesis", arguments.environments)
        return 1 if run_schemathesis(command, arguments.url, arguments.examples) else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
