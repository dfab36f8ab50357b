"""The KV pool: its layout, and the addresses of its slots."""

import pytest
import torch

from tandem.engine_core.kernels.kv_dtype import read_pool, write_pool
from tandem.engine_core.kv_cache.groups import KVGroup
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage

PAGES = torch.tensor([[0, 0], [4, 1], [2, 3]], dtype=torch.int32)


def layout(dtype: torch.dtype = torch.float32) -> KVLayout:
    return KVLayout.of_one_group(3, page_size=4, kv_heads=2, head_dim=8, dtype=dtype)


def allocate(dtype: torch.dtype = torch.float32, pages: int = 5) -> KVStorage:
    return KVStorage.allocate(layout(dtype), pages, "cpu")


def test_the_pool_is_one_zeroed_allocation_with_views_for_each_layer() -> None:
    storage = allocate()
    assert storage.pages == 5
    assert storage.pool.shape == (5, 3, 2, 4, 2, 8) and storage.pool.is_contiguous()
    assert len(storage.keys) == len(storage.values) == 3
    tensors = [*storage.keys, *storage.values]
    assert all(tensor.shape[1:] == (2, 8) and tensor.is_contiguous() for tensor in tensors)
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} == {storage.pool.untyped_storage().data_ptr()}
    assert not storage.pool.any()


def test_slots_of_different_layers_do_not_overlap() -> None:
    storage = allocate()
    table = storage.page_table(PAGES)
    tensors = [*storage.keys, *storage.values]
    for number, tensor in enumerate(tensors):
        table.view_pages(tensor).fill_(number)
    assert all((table.view_pages(tensor) == number).all() for number, tensor in enumerate(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_slot_is_the_position_in_its_page_of_every_layer(dtype: torch.dtype) -> None:
    storage = allocate(dtype)
    table = storage.page_table(PAGES)
    slots = table.slots(torch.tensor([1, 1, 2]), torch.tensor([3, 4, 6]))
    for number, (keys, values) in enumerate(zip(storage.keys, storage.values, strict=True)):
        write_pool(keys, slots, torch.full((3, 2, 8), 2.0 * number + 1))
        write_pool(values, slots, torch.full((3, 2, 8), 2.0 * number + 2))
    for number, (keys, values) in enumerate(zip(storage.keys, storage.values, strict=True)):
        assert (read_pool(keys, slots, torch.float32) == 2 * number + 1).all()
        assert (read_pool(values, slots, torch.float32) == 2 * number + 2).all()
    pool = storage.pool.float()
    expected = torch.arange(1.0, 7.0).view(3, 2, 1, 1)
    for page, offset in ((4, 3), (1, 0), (3, 2)):
        assert (pool[page, :, :, offset] == expected).all()
        pool[page, :, :, offset] = 0
    assert not pool.any()


def test_views_by_page_share_the_memory_of_the_pool() -> None:
    storage = allocate()
    table = storage.page_table(PAGES)
    storage.pool.copy_(torch.arange(storage.pool.numel()).view_as(storage.pool))
    for layer in range(3):
        assert torch.equal(table.view_pages(storage.keys[layer]), storage.pool[:, layer, 0])
        assert torch.equal(table.view_pages(storage.values[layer]), storage.pool[:, layer, 1])


def test_slots_beyond_32_bits_are_addressed_in_full() -> None:
    """Page 300 of 2^17 positions in 40 layers begins beyond slot 2^31."""
    page_size, layers = 1 << 17, 40
    long = KVLayout.of_one_group(layers, page_size=page_size, kv_heads=1, head_dim=1, dtype=torch.float32)
    storage = KVStorage.allocate(long, 1, "meta")
    table = storage.page_table(torch.tensor([[300]], dtype=torch.int32))
    slot = table.slots(torch.tensor([0]), torch.tensor([7]))
    assert slot.tolist() == [300 * 2 * layers * page_size + 7] and slot.item() > 2**31


def test_a_pool_of_the_reserved_page_alone_has_slots_for_it() -> None:
    storage = allocate(pages=1)
    assert storage.pages == 1
    assert all(len(tensor) == 4 for tensor in (*storage.keys, *storage.values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_bytes_of_tokens_and_pages_equal_the_allocation(dtype: torch.dtype) -> None:
    size = allocate(dtype).pool.untyped_storage().nbytes()
    assert layout(dtype).token_bytes * 20 == layout(dtype).page_bytes * 5 == size
    assert layout(dtype).page_elements * dtype.itemsize * 5 == size


def test_pages_of_several_groups_have_one_size_and_a_layer_its_index_in_the_group() -> None:
    groups = KVGroup((1, 3, 5), 2, 8), KVGroup((0, 2, 4), 2, 8, 16), KVGroup((6,), 2, 8, 16)
    layout = KVLayout(groups=groups, page_size=4, dtype=torch.float32)
    storage = KVStorage.allocate(layout, 6, "cpu")
    assert storage.pool.shape == (6, 3, 2, 4, 2, 8)
    storage.pool.copy_(torch.arange(storage.pool.numel()).view_as(storage.pool))
    table = storage.page_table(PAGES)
    for layer, index in enumerate((0, 0, 1, 1, 2, 2, 0)):
        assert torch.equal(table.view_pages(storage.keys[layer]), storage.pool[:, index, 0])
        assert torch.equal(table.view_pages(storage.values[layer]), storage.pool[:, index, 1])
    assert layout.token_bytes == 3 * layout.page_bytes // 4


def test_groups_with_other_heads_are_refused() -> None:
    groups = KVGroup((0,), 2, 8), KVGroup((1,), 1, 16)
    with pytest.raises(ValueError, match="different"):
        KVStorage.allocate(KVLayout(groups=groups, page_size=4, dtype=torch.float32), 2, "cpu")
