import torch

from tandem.engine_core.kv_cache.storage import KVStorage


def allocate(dtype: torch.dtype = torch.float32) -> KVStorage:
    return KVStorage.allocate(layers=3, pages=5, page_size=4, kv_heads=2, head_dim=8, dtype=dtype, device="cpu")


def test_one_zeroed_allocation_in_layer_views() -> None:
    storage = allocate()
    assert storage.pages == 5
    assert len(storage.keys) == len(storage.values) == 3
    tensors = [*storage.keys, *storage.values]
    assert all(tensor.shape == (20, 2, 8) and tensor.is_contiguous() for tensor in tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert all(not tensor.any() for tensor in tensors)


def test_views_do_not_overlap() -> None:
    storage = allocate()
    tensors = [*storage.keys, *storage.values]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))


def test_bytes_per_token_is_what_is_allocated() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        each = KVStorage.bytes_per_token(layers=3, kv_heads=2, head_dim=8, dtype=dtype)
        assert each * 20 == allocate(dtype).keys[0].untyped_storage().nbytes()
