"""Chat templates with the rules of published ones, shortened: which roles they take, and how they write calls."""

from pathlib import Path

_SOURCES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}

PUBLISHED = {
    **{name: {"default": source} for name, source in _SOURCES.items() if name != "hermes_tools"},
    "hermes": {"default": _SOURCES["chatml"], "tool_use": _SOURCES["hermes_tools"]},
}
"""Templates by name, by the model's name. `system_first` has the rule of Qwen 3.5."""
