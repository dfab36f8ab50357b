"""The fields that all responses begin with."""

import pytest
from msgspec import structs

from tandem.frontend.api.formatter import response_head
from tandem.protocol.version import distribution_version
from tests.fakes.engine_link import FACTS


@pytest.mark.parametrize(
    ("weights", "kv", "expected"),
    [
        ("", "", "cpu-float32"),
        ("float32", "float32", "cpu-float32"),
        ("fp8", "float32", "cpu-float32-fp8"),
        ("4 bits (gptq)", "float8_e4m3fn", "cpu-float32-4-bits-gptq-float8_e4m3fn"),
        ("fp8 in blocks of 128x128", "", "cpu-float32-fp8-in-blocks-of-128x128"),
    ],
)
def test_a_fingerprint_names_the_formats_that_output_depends_on(weights: str, kv: str, expected: str) -> None:
    model = structs.replace(FACTS, weight_format=weights, kv_dtype=kv)
    head = response_head("cmpl", "text_completion", model)
    assert head.system_fingerprint == f"tandem-{distribution_version()}-{expected}"
