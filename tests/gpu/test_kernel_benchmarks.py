"""The kernel benchmarks on a GPU, at one row."""

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "name",
    [
        *("linear", "quantized", "w8a8-gemm", "decode-attention", "elementwise"),
        *("prompt-attention", "fp8-kv", "sampling", "sampling-kernels"),
    ],
)
def test_kernel_benchmarks_give_positive_times(name: str) -> None:
    from benchmarks.kernels.__main__ import SUITES
    from benchmarks.kernels.suite import MODELS, Options

    if name in ("prompt-attention", "fp8-kv"):
        pytest.importorskip("flashinfer")
    records = SUITES[name][0](Options(MODELS["1b"], (64 if name == "w8a8-gemm" else 1,)))
    assert records
    times = [value for record in records for key, value in record.items() if key in ("us", "tandem", "chosen", "norm")]
    assert all(us > 0 for us in times)
