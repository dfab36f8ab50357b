"""A `tandem` package for child processes whose engine core is a program of the test's."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def write_tandem(folder: Path, program: str, frontend: str | None = None) -> str:
    """Write the package into a folder; return the PYTHONPATH that finds it first, and the tests behind it.

    The frontend and the protocol are links to the real ones. `python -m tandem.engine_core` runs `program`, and
    `python -m tandem.frontend` a program of its own if one is given.
    """
    package = folder / "tandem"
    engine = package / "engine_core"
    engine.mkdir(parents=True, exist_ok=True)
    if frontend is not None:
        (package / "frontend").mkdir(exist_ok=True)
        for part in (ROOT / "frontend").iterdir():
            if part.name != "__main__.py":
                (package / "frontend" / part.name).symlink_to(part)
        (package / "frontend" / "__main__.py").write_text(frontend)
    for part in ("frontend", "protocol"):
        if not (package / part).exists():
            (package / part).symlink_to(ROOT / part)
    (package / "__init__.py").write_text((ROOT / "src" / "tandem" / "__init__.py").read_text())
    (engine / "__init__.py").touch()
    (engine / "__main__.py").write_text(program)
    return f"{folder}:{ROOT}"
