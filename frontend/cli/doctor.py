"""`tandem doctor`: report about this machine and the settings that a server would choose.

The output is meant for bug reports. The engine's code determines its choices in a child process, without loading
weights.
"""

import argparse
import errno
import os
import platform
import resource
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from tandem.frontend.cli.flags import hub_options
from tandem.frontend.hub.options import HubOptions
from tandem.frontend.listening import listen
from tandem.frontend.supervisor.addresses.port_flags import port_clash
from tandem.frontend.supervisor.addresses.service_sockets import Addresses
from tandem.frontend.supervisor.addresses.tcp_address import port_owner, tcp_addresses
from tandem.frontend.supervisor.launch import DEFAULT_OPS_PORT, check_engine_installed
from tandem.frontend.supervisor.model import LaunchError, find_draft_model, find_model, is_hub_name, preview_model
from tandem.frontend.supervisor.preflight import RunPreflight, run_preflight, text_problem
from tandem.protocol.engine_options import check_numbers, engine_options
from tandem.protocol.preflight import PreflightReport, Section

PACKAGES = (
    *("tandem-llm", "torch", "triton", "flashinfer-python", "pyzmq", "msgspec", "transformers"),
    *("tokenizers", "huggingface_hub", "safetensors", "llguidance", "uvicorn"),
)
GIB = 2**30


class Report(Struct, frozen=True):
    """Report sections, and the problems that would prevent a start."""

    sections: dict[str, Section]
    problems: list[str]

    def text(self) -> str:
        """Format the report as text."""
        lines = []
        for title, rows in self.sections.items():
            lines += [title, *(f"  {name:<18}{value}" for name, value in rows.items()), ""]
        problems = [f"  - {problem}" for problem in self.problems]
        return "\n".join([*lines, *(["problems", *problems] if problems else ["No problem found."])])


def run_doctor(arguments: argparse.Namespace, ask: RunPreflight | None = None) -> int:
    """Print the report; return 1 if a problem would prevent a start.

    ask: returns the preflight report; by default from a child process.
    """
    found = examine(arguments, ask or run_preflight)
    print(msgspec.json.format(msgspec.json.encode(found)).decode() if arguments.json else found.text())
    return 1 if found.problems else 0


def examine(arguments: argparse.Namespace, ask: RunPreflight) -> Report:
    """Collect the report. It contains no environment values and no keys."""
    problems: list[str] = []
    ports = _ports(arguments, problems)
    options = engine_options(arguments)
    engine, model = PreflightReport(), {_kind(options.model): options.model or ""}
    try:
        model, weight_bytes = _find_model(options.model, hub_options(arguments))
        check_engine_installed()
        check_numbers(options)
        options = find_draft_model(options, hub_options(arguments), may_download=False)
        engine = ask(structs.replace(options, model=options.model and model["folder"]), weight_bytes)
    except (LaunchError, ValueError) as error:
        problems.append(str(error))
    if engine.problems or engine.shortage:
        problems += engine.problems or [engine.shortage]
    elif engine.choices and (reason := text_problem(Path(model["folder"]), chat=None)):
        problems.append(reason)
    driver = _driver()
    gpus = {f"GPU {number}": line for number, line in enumerate(engine.gpus)} or {"GPU": "none seen by torch"}
    sections = {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "machine": {**_machine(), **gpus, "NVIDIA driver": driver},
        "ports": ports,
        "model": {**model, **engine.model},
        "choices": engine.choices or {"none": "see problems"},
    }
    return Report(sections, problems)


def _find_model(model: str | None, options: HubOptions) -> tuple[Section, int | None]:
    """Describe the model and return the bytes of weights that are still to be downloaded.

    Small files of a model from the hub are downloaded. Raises LaunchError if the model is not found.
    """
    if model is None or not is_hub_name(model):
        return {"folder": str(find_model(model, options).folder)}, None
    found = preview_model(model, options)
    return {"name": model, "folder": str(found.folder), **found.rows}, found.weight_bytes


def _kind(model: str | None) -> str:
    """Return the label of a model as given: a hub name or a folder."""
    return "folder" if model is None or not is_hub_name(model) else "name"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _machine() -> Section:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = next(
        (
            int(line.split()[1]) * 1024
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemAvailable:")
        ),
        0,
    )
    return {
        "system": platform.platform(),
        "CPU cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "memory": f"{total / GIB:.1f} GiB, {available / GIB:.1f} available",
        "open files": f"{soft}, at most {hard} (ulimit -n)",
        "/dev/shm": _shared_memory(Path("/dev/shm")),
    }


def _shared_memory(folder: Path) -> str:
    if not folder.is_dir():
        return "missing"
    usage = shutil.disk_usage(folder)
    return f"{usage.total / GIB:.1f} GiB, {usage.free / GIB:.1f} free"


def _driver() -> str:
    """Return the version of the NVIDIA driver from nvidia-smi."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "nvidia-smi not found"
    return found.stdout.strip().partition("\n")[0] or "nvidia-smi failed"


def _ports(arguments: argparse.Namespace, problems: list[str]) -> Section:
    """Describe the ports of a server, and record those that are not available.

    If the default ops port is taken, a server uses the next free one.
    """
    addresses, ops_host, given = Addresses(arguments.host, arguments.port), arguments.ops_host, arguments.ops_port
    ops_port = DEFAULT_OPS_PORT if given is None else given
    found, clash = ", ".join(addresses.tcp_hosts), ""
    try:
        resolved = tcp_addresses(addresses.tcp_hosts)
        found = "; ".join([_port(address.host, addresses.tcp_port, "--port", problems) for address in resolved])
        clash = port_clash(addresses, ops_host, ops_port, None)
    except LaunchError as error:
        problems.append(str(error))
    ops_problems = [clash] if clash else []
    if clash:
        ops = f"{ops_host}:{ops_port} is asked for twice"
    else:
        ops = _port(ops_host, ops_port, "--ops-port", ops_problems)
    if given is not None:
        problems += ops_problems
    elif ops_problems:
        ops += "; a server takes the next free one"
    return {"port": found, "ops port": ops}


def _port(host: str, port: int, flag: str, problems: list[str]) -> str:
    """Describe a port that must be free, and record a problem if it is not."""
    try:
        listen(host, port).close()
    except OSError as error:
        owner = f", used by {port_owner(port)}" if error.errno == errno.EADDRINUSE else ""
        problems.append(f"cannot listen on {host}:{port} ({error.strerror or error}{owner}); choose another {flag}")
        return f"{host}:{port} cannot be used{owner}"
    return f"{host}:{port} is free"
