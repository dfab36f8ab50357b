"""Plans are compiled in processes of their own, for as long as there is time."""

import pickle

from benchmarks.tune.compiling import compile_all, identity
from benchmarks.tune.timings import AnyPlan, Key
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, SplitKPlan
from tandem.engine_core.kernels.tiles.table import ProductKey
from tests.fakes.gpus import H200

KEY = ProductKey("product", 16, 256, 128, 16)
JOBS: dict[tuple[object, ...], tuple[Key, AnyPlan]] = {
    identity(KEY, plan): (KEY, plan) for plan in (SplitKPlan(64, 64, 1), SplitKPlan(64, 128, 1))
}


def test_the_traits_of_a_gpu_travel_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(H200)) == H200


def test_a_plan_that_fails_in_its_process_is_told_with_the_reason() -> None:
    """Without a GPU every plan fails."""
    said: list[str] = []
    found = compile_all(JOBS, H200, 120.0, said.append)
    assert set(found) == set(JOBS)
    (line,) = said
    assert line.startswith(f"compiled {sum(not reason for reason in found.values())} of 2 kernels in ")


def test_no_time_compiles_nothing_and_says_so() -> None:
    said: list[str] = []
    assert len(compile_all(JOBS, H200, 0.0, said.append)) <= len(JOBS)
    assert "of 2 kernels" in said[0]


def test_products_share_code_whatever_their_number_of_outputs() -> None:
    plan = SplitKPlan(64, 64, 1)
    assert identity(KEY, plan) == identity(KEY._replace(outputs=512), plan)
    assert identity(KEY, plan) != identity(KEY._replace(inputs=256), plan)
    assert identity(KEY, plan) != identity(KEY._replace(rows=32), plan)
    one = KEY._replace(rows=1)
    assert identity(one, GemvPlan(2, 1024)) != identity(one, GemvPlan(4, 1024))
