"""Import levels of the modules, and the packages that each process may load."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("protocol", "engine_core", "frontend")

L0 = {"tandem.protocol"}
L1 = {
    f"tandem.engine_core.{name}"
    for name in (
        "config",
        "graph_sizes",
        "adapter",
        "weight_version",
        "errors",
        "plan",
        "contracts",
        "sequence",
        "startup.kv_sizing",
        "startup.log_level_file",
        "kv_cache.groups",
        "page_counts",
        "integers",
    )
}
L2_KV_CACHE = ("manager", "audit", "page_classes", "pages", "radix", "eviction", "pending_pages", "sessions")
L2 = {
    *("tandem.engine_core.pipeline", "tandem.engine_core.scheduler"),
    *(f"tandem.engine_core.lora.{name}" for name in ("adapters", "announcements")),
    *(f"tandem.engine_core.kv_cache.{name}" for name in (*L2_KV_CACHE, "state_slots", "states")),
}
L3_NAMES = (
    "kernels",
    "attention",
    "layers",
    "models",
    "model_config",
    "quantization",
    "rope_config",
    "sampling",
    "loader",
    "kv_cache.storage",
    *("lora.adapter_files", "lora.adapter_folder", "lora.adapter_loader", "lora.peft_config"),
    "weight_updates",
    "memory",
)
L3 = {f"tandem.engine_core.{name}" for name in L3_NAMES}
L4 = {"tandem.engine_core.runtime", "tandem.engine_core.constraints"}
L5_NAMES = (
    *("engine", "control", "key_limits", "weight_swaps", "wire", "stats", "__main__"),
    *(
        f"startup.{name}"
        for name in (
            "engine",
            "adapters",
            "runtime",
            "device",
            "attention",
            "device_memory",
            "draft_model",
            "draft_timing",
            "memory_trial",
            "step_timing",
            "warmup",
            "start_log",
            "pool_text",
            "weight_formats",
            "heap",
            "loading_progress",
            "preflight",
            "kv_calibration",
            "model_weights",
            "weight_updates",
            "stage_checkpoint",
            "staged_values",
            "file_stamps",
            "served_model",
            "opened_files",
            "checkpoint_stager",
            "checkpoint_copy",
            "weights",
            "sleep",
            "sleep_ranges",
        )
    ),
)
L5 = {f"tandem.engine_core.{name}" for name in L5_NAMES}
LEVELS = (L0, L1, L2, L3, L4, L5)

WIRE = {"msgspec", "zmq"}
GPU = {"msgspec", "torch", "numpy", "triton", "flashinfer", "safetensors", "huggingface_hub"}
MAY_LOAD = [WIRE, {"msgspec"}, {"msgspec"}, GPU, GPU | {"llguidance"}, GPU | {"zmq", "llguidance", "prometheus_client"}]
MAY_IMPORT = [L0, L0 | L1, L0 | L1 | L2, L0 | L1 | L3, L0 | L1 | L3 | L4, set().union(*LEVELS)]
FRONTEND_LOADS = {
    "fastapi", "starlette", "uvicorn", "httptools", "tokenizers", "llguidance", "jinja2", "prometheus_client",
    "pydantic", "msgspec", "zmq", "numpy", "anyio", "httpx", "uvloop", "huggingface_hub", "filelock",
    "opentelemetry",
}  # fmt: skip


CHILD, CHILD_LOADS = "tandem.frontend.supervisor.convert_tokenizer", {"transformers"}
"""Program of a short-lived child process, and what it may load that no server may."""


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(("tandem", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


MODULES = modules()


def within(name: str, places: set[str]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


def level_of(module: str) -> int:
    levels = [number for number, places in enumerate(LEVELS) if within(module, places)]
    assert len(levels) == 1, f"{module} belongs to no one level: {levels}; say in this table where it stands"
    return levels[0]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements(parent: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a tree at any depth; imports, functions and classes are among them, expressions not."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(parent, part, ()):
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


@cache
def imported(path: Path) -> set[str]:
    """Full names of what a file imports, wherever in the file; names of modules where they are ours."""
    names: set[str] = set()
    for node in statements(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they go"
            source = node.module or ""
            ours = {f"{source}.{alias.name}" for alias in node.names} & MODULES.keys()
            names |= ours or {source}
    return names - {"__future__"}


def problems(module: str, ours: set[str], others: set[str]) -> list[str]:
    found = []
    for name in sorted(imported(MODULES[module])):
        top = name.partition(".")[0]
        if top == "tandem":
            if not within(name, ours):
                found.append(f"{module} imports {name}")
        elif top not in sys.stdlib_module_names and top not in others:
            found.append(f"{module} imports {name}")
    return found


SHELLS = {
    f"tandem.{name}" for name in ("engine_core", "engine_core.kv_cache", "engine_core.lora", "engine_core.startup")
}
"""Packages that span levels: their __init__ is empty."""


def test_a_module_imports_only_from_lower_levels() -> None:
    found = []
    for module in MODULES:
        if not module.startswith("tandem.frontend") and module not in SHELLS:
            level = level_of(module)
            found += problems(module, MAY_IMPORT[level], MAY_LOAD[level])
    assert found == []


def test_frontends_never_import_the_engine_or_torch() -> None:
    found = []
    for module in MODULES:
        if module.startswith("tandem.frontend"):
            own = CHILD_LOADS if module == CHILD else set()
            found += problems(module, {"tandem.protocol", "tandem.frontend"}, FRONTEND_LOADS | own)
    assert found == []


def test_the_child_process_that_converts_tokenizers_is_imported_by_none() -> None:
    assert [module for module, path in MODULES.items() if CHILD in imported(path)] == []


def test_packages_of_the_engine_re_export_nothing() -> None:
    for path in (ROOT / "engine_core").rglob("__init__.py"):
        assert path.read_text() == "", path


def test_product_code_never_imports_tests_or_benchmarks() -> None:
    for module, path in MODULES.items():
        assert not [name for name in imported(path) if within(name, {"tests", "benchmarks"})], module


def test_nothing_is_called_utils() -> None:
    vague = {"utils", "util", "helpers", "common_utils", "misc"}
    assert [name for name in MODULES if name.rpartition(".")[2] in vague] == []


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_supervisor_and_frontend_load_neither_the_engine_nor_what_sends_traces() -> None:
    modules = "frontend.cli.main", "frontend.supervisor.launch", "frontend.server.server", "protocol.sockets"
    engine = "'torch', 'transformers', 'tandem.engine_core', 'triton', 'safetensors', 'numpy'"
    heavy = f"{{{engine}, 'opentelemetry.sdk', 'requests', 'google.protobuf'}}"
    code = "import sys, " + ", ".join(f"tandem.{module}" for module in modules)
    assert run(f"{code}; print(sorted({heavy} & set(sys.modules)))") == "[]"


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Block())
"""


def test_pure_modules_load_without_torch_numpy_and_zmq() -> None:
    pure = [name for name in MODULES if within(name, L1 | L2) and name not in SHELLS]
    assert len(pure) > 8
    run(
        BLOCKED.format({"torch", "numpy", "zmq"})
        + "import importlib\n"
        + "\n".join(f"importlib.import_module({name!r})" for name in pure)
    )


def test_the_only_markers_are_gpu_and_slow(pytestconfig: pytest.Config) -> None:
    own = [line for line in pytestconfig.getini("markers") if line.startswith(("gpu:", "slow:"))]
    assert len(own) == 2
    text = (ROOT / "pyproject.toml").read_text()
    assert text.count("markers = [") == 1
    assert text.split("markers = [")[1].split("]")[0].count('"') == 4
