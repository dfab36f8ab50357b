"""Plans of campaigns: what they may say, and that their commands exist."""

from importlib import import_module
from pathlib import Path

import msgspec
import pytest

from benchmarks.campaign.plan import PLANS, Group, Measurement, Plan, choose, read_plan
from benchmarks.tune.shapes import SHAPES
from tandem.frontend.cli.main import build_parser

ROOT = Path(__file__).parents[3]
SMALL = """
[[group]]
name = "first"
shape = "llama-3.2-1b"
[[group.measurement]]
name = "one"
seconds = 5
command = "benchmarks.side_by_side --url {url} --save {name}"
[[group.measurement]]
name = "two"
seconds = 5
command = "benchmarks.bench_serving"
[[group]]
name = "second"
[[group.measurement]]
name = "three"
seconds = 5
command = "benchmarks.bench_tick --save {name}"
"""


def written(folder: Path, text: str) -> Plan:
    path = folder / "plan.toml"
    path.write_text(text)
    return read_plan(path)


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_planned_command_parses(path: Path) -> None:
    plan = read_plan(path)
    for group in plan.group:
        assert not group.shape or (SHAPES / group.shape / "config.json").is_file(), group.name
        if group.serve and group.shape:
            build_parser().parse_args(["serve", "--model", "m", "--load-format", "dummy", *group.flags.split()])
        for one in group.measurement:
            module, *arguments = one.arguments(dict.fromkeys(group.places, "http://127.0.0.1:1"))
            if module == "pytest":
                assert all((ROOT / path).exists() for path in arguments if path.startswith("tests/")), one.name
            elif module.startswith("benchmarks."):
                main = f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module
                import_module(main).arguments_parser().parse_args(arguments)


def test_places_are_filled(tmp_path: Path) -> None:
    one = written(tmp_path, SMALL).group[0].measurement[0]
    assert one.arguments({"url": "http://x"}) == ["benchmarks.side_by_side", "--url", "http://x", "--save", "one"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "two"', 'name = "one"', "names are there twice: ['one']"),
        ("{url}", "{port}", "one: 'port' in its command; known are name, out, folder, model, url, metrics"),
        (
            "benchmarks.bench_tick",
            "benchmarks.bench_tick {folder}",
            "three: 'folder' in its command; known are name, out",
        ),
        ("seconds = 5", "seconds = 0", "`int` >= 1"),
        ('shape = "llama-3.2-1b"', 'tokenizer = "mine"', "Invalid enum value 'mine'"),
        ("shape =", "shapes =", "unknown field `shapes`"),
        ("[[group]]", "[[group", "Expected ']]'"),
    ],
)
def test_a_wrong_plan_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(msgspec.MsgspecError) as caught:
        written(tmp_path, SMALL.replace(old, new, 1) if old != "[[group]]" else SMALL.replace(old, new))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("names", "done", "left"),
    [
        ([], set(), {"first": ["one", "two"], "second": ["three"]}),
        ([], {"two", "three"}, {"first": ["one"]}),
        (["first"], {"one"}, {"first": ["two"]}),
        (["two", "second"], set(), {"first": ["two"], "second": ["three"]}),
        (["three"], {"three"}, {}),
    ],
)
def test_what_is_asked_for_and_not_done_is_chosen(
    tmp_path: Path, names: list[str], done: set[str], left: dict[str, list[str]]
) -> None:
    groups = choose(written(tmp_path, SMALL), names, done)
    assert {group.name: [one.name for one in group.measurement] for group in groups} == left


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--only four: the plan has first, one, second, three, two"):
        list(choose(written(tmp_path, SMALL), ["one", "four"], set()))


def test_a_group_without_a_server_knows_its_folder_alone() -> None:
    command = Measurement("one", 1, "benchmarks.bench_faults --real --model {folder}")
    assert Group("faults", [command], shape="llama-3.2-1b", serve=False).places == ("name", "out", "folder", "model")
