"""The token embedding, scaled and tied."""

import pytest
import torch

from tandem.engine_core.layers.embedding import Embedding
from tandem.engine_core.layers.linear_choice import torch_build_context

IDS = torch.tensor([3, 0, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_scale_is_rounded_to_the_dtype_as_in_the_gemma_of_transformers(dtype: torch.dtype) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    context = torch_build_context(torch.device("cpu"), dtype)
    embedding = Embedding.build(5, 8, context, scale=3072**0.5)
    embedding.table.normal_()
    reference = Gemma3TextScaledWordEmbedding(5, 8, 0, embed_scale=3072**0.5).to(dtype)
    reference.weight.data = embedding.table
    assert torch.equal(embedding(IDS), reference(IDS))


def test_a_scaled_table_stays_as_it_is_in_the_tied_head() -> None:
    context = torch_build_context(torch.device("cpu"), torch.float32)
    head = context.linear("lm_head", 5, 8)
    (slot,) = head.slots("", "lm_head")
    slot.target.normal_()
    stored = slot.target.clone()
    embedding = Embedding.tied_to(head, scale=4.0)
    assert torch.equal(embedding(IDS), stored[IDS] * 4)
    assert torch.equal(slot.target, stored)
    assert embedding.table.data_ptr() == slot.target.data_ptr()
